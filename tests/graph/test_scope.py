from __future__ import annotations

import pytest
import torch
from torch import fx

from splitkit import _torch
from splitkit.errors import GraphError
from splitkit.graph.ambient import SETTINGS as SETTINGS_BY_NAME
from splitkit.graph.scope import CALLERS, NEUTRAL, Scope, is_state_op, scopes


def under(grad, *regions):
    return Scope(regions, (("grad mode", grad),))


def graph_of(*steps):
    """Steps: `+a` `-a` open and close autocast, `+i` `-i` inference; `on off save back` for grad mode; or ops."""
    graph, handles, found = fx.Graph(), {}, {}
    x = graph.placeholder("x")
    for step in steps:
        if step[0] == "+":
            is_autocast = step[1] != "i"
            target = _torch.ENTER_AUTOCAST if is_autocast else _torch.ENTER_INFERENCE
            device = "cuda" if step[1:] == "gpu" else "cpu"
            args = (device, torch.bfloat16, True, None) if is_autocast else (True,)
            handles[step[1:]] = graph.call_function(target, args)
        elif step[0] == "-":
            target = _torch.EXIT_INFERENCE if step[1] == "i" else _torch.EXIT_AUTOCAST
            graph.call_function(target, (handles[step[1:]],))
        elif step in ("on", "off"):
            graph.call_function(_torch.SET_GRAD, (step == "on",))
        elif step == "save":
            handles["grad"] = graph.call_function(torch.is_grad_enabled)
        elif step == "back":
            graph.call_function(_torch.SET_GRAD, (handles["grad"],))
        else:
            found[step] = graph.call_function(torch.sin, (x,), name=step)
    graph.output(x)
    return graph, found, handles


def test_nested_regions():
    graph, op, h = graph_of("p", "+a", "q", "off", "r", "+b", "s", "-b", "on", "t", "-a", "u")
    scope, final = scopes(graph)
    a, b = h["a"], h["b"]
    expected = {
        "p": NEUTRAL, "q": Scope((a,)), "r": under(False, a), "s": under(False, a, b), "t": under(True, a),
        "u": under(True),
    }  # fmt: skip
    assert {name: scope[node] for name, node in op.items()} == expected
    assert final == under(True)


def test_an_exit_restores_what_its_enter_saw_where_regions_interleave():
    graph, op, h = graph_of("+a", "+b", "-a", "p", "-b", "q")
    scope, final = scopes(graph)
    assert scope[op["p"]] == NEUTRAL
    assert scope[op["q"]] == final == Scope((h["a"],))


def test_regions_of_different_devices_are_independent():
    graph, op, h = graph_of("+a", "+gpu", "-a", "p", "-gpu", "q")
    scope, _ = scopes(graph)
    assert scope[op["p"]] == Scope((h["gpu"],))
    assert scope[op["q"]] == NEUTRAL


def test_inference_mode_sets_and_restores_grad_mode():
    graph, op, h = graph_of("on", "+i", "p", "on", "q", "-i", "r")
    scope, _ = scopes(graph)
    inside = Scope((h["i"],), (("forward-mode gradients", False), ("grad mode", False)))
    assert [scope[op[n]] for n in "pqr"] == [
        inside,
        inside.having({"grad mode": True}),
        under(True),
    ]


def test_saving_and_restoring_grad_mode_gives_the_callers():
    graph, op, h = graph_of("save", "off", "p", "back", "q")
    scope, final = scopes(graph)
    assert scope[op["p"]] == under(False)
    assert scope[op["q"]] == final == NEUTRAL
    assert is_state_op(h["grad"])


def test_is_grad_enabled_as_a_value_is_no_state_op():
    graph = fx.Graph()
    node = graph.call_function(torch.is_grad_enabled)
    graph.output(node)
    assert not is_state_op(node)


A = torch._C._autograd
SETTINGS = [
    ("grad mode", torch._C._set_grad_enabled, (False,), {}, False),
    ("forward-mode gradients", torch._C._set_fwd_grad_enabled, (False,), {}, False),
    ("saved-tensors hooks", A._saved_tensors_hooks_disable, ("no",), {}, "no"),
    ("saved-tensors hooks", A._saved_tensors_hooks_enable, (), {}, None),
    ("deterministic algorithms", torch._C._set_deterministic_algorithms, (True,), {"warn_only": True}, (True, True)),
]


@pytest.mark.parametrize(("name", "target", "args", "kwargs", "value"), SETTINGS)
def test_each_setting_is_read_and_can_be_put_back(name, target, args, kwargs, value):
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(SETTINGS_BY_NAME[name].get)
    graph.call_function(target, args, kwargs)
    inside = graph.call_function(torch.sin, (x,))
    graph.call_function(SETTINGS_BY_NAME[name].set, (before,))
    outside = graph.call_function(torch.sin, (x,))
    scope, final = scopes(graph)
    assert scope[inside] == Scope((), ((name, value),)) and scope[inside].value(name) == value
    assert scope[outside] == final == NEUTRAL and final.value(name) is CALLERS
    assert set(scope) == {x, inside, outside}
    assert SETTINGS_BY_NAME[name].write(value) == (target, args, kwargs)


def test_regions_without_a_handle_close_the_innermost():
    graph = fx.Graph()
    pack = graph.get_attr("pack")
    fx.GraphModule({"pack": torch.nn.Identity()}, graph)
    outer = graph.call_function(_torch.PUSH_HOOKS, (pack, pack))
    inner = graph.call_function(_torch.PUSH_HOOKS, (pack, pack))
    graph.call_function(_torch.POP_HOOKS)
    between = graph.call_function(torch.ones, (2,))
    graph.call_function(_torch.POP_HOOKS)
    scope, final = scopes(graph)
    assert scope[between] == Scope((outer,)) and final == NEUTRAL and is_state_op(inner)
    graph.call_function(_torch.POP_HOOKS)
    with pytest.raises(GraphError, match="SK103: .*closes a region that was not opened"):
        scopes(graph)


def test_what_an_exit_must_take():
    for exit_args in ((), ("handle", 3), ("handle", "handle")):
        graph = fx.Graph()
        enter = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        graph.call_function(_torch.EXIT_AUTOCAST, tuple(enter if a == "handle" else a for a in exit_args))
        with pytest.raises(GraphError, match="SK103: _exit_autocast closes a region that was not opened"):
            scopes(graph)


def test_a_region_is_closed_once():
    graph, _, _ = graph_of("+a", "-a", "-a")
    with pytest.raises(GraphError, match="SK103: _exit_autocast_1 closes a region that .* has been closed"):
        scopes(graph)


def test_only_its_own_exit_reads_a_handle():
    graph = fx.Graph()
    enter = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_torch.EXIT_INFERENCE, (enter,))
    with pytest.raises(GraphError, match="SK103: _exit_inference_mode reads what _enter_autocast yields"):
        scopes(graph)


def test_a_memory_that_may_be_written_is_no_constant():
    graph = fx.Graph()
    graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, graph.get_attr("on"), None))
    fx.GraphModule({"on": torch.ones(1)}, graph)
    with pytest.raises(GraphError, match="SK103.*computed by on"):
        scopes(graph)


def test_an_odd_call_of_a_setter_is_refused():
    graph = fx.Graph()
    graph.call_function(_torch.ALLOW_HOOKS, (3,))
    with pytest.raises(GraphError, match="SK103: .* sets the saved-tensors hooks in an unknown way"):
        scopes(graph)


def test_the_value_of_another_setting_is_computed():
    graph = fx.Graph()
    graph.call_function(_torch.SET_GRAD, (graph.call_function(_torch.IS_FWD_GRAD),))
    with pytest.raises(GraphError, match="SK103.*grad mode to _is_fwd_grad_enabled, which the graph computes"):
        scopes(graph)


def test_an_exit_without_enter_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(_torch.EXIT_AUTOCAST, (x,))
    with pytest.raises(GraphError, match="SK103: _exit_autocast closes a region that was not opened"):
        scopes(graph)


def test_a_computed_state_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(_torch.SET_GRAD, (x,))
    with pytest.raises(GraphError, match="SK103.*grad mode to x"):
        scopes(graph)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, x, None))
    with pytest.raises(GraphError, match="SK103.*computed by x"):
        scopes(graph)
