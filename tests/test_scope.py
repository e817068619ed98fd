from __future__ import annotations

import pytest
import torch
from torch import fx

from splitkit import _torch
from splitkit.errors import GraphError
from splitkit.scope import NEUTRAL, Scope, is_state_op, scopes


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
        "p": NEUTRAL, "q": Scope((a,)), "r": Scope((a,), False), "s": Scope((a, b), False), "t": Scope((a,), True),
        "u": Scope((), True),
    }  # fmt: skip
    assert {name: scope[node] for name, node in op.items()} == expected
    assert final == Scope((), True)


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
    assert [scope[op[n]] for n in "pqr"] == [Scope((h["i"],), False), Scope((h["i"],), True), Scope((), True)]


def test_saving_and_restoring_grad_mode_gives_the_callers():
    graph, op, h = graph_of("save", "off", "p", "back", "q")
    scope, final = scopes(graph)
    assert scope[op["p"]] == Scope((), False)
    assert scope[op["q"]] == final == NEUTRAL
    assert is_state_op(h["grad"])


def test_is_grad_enabled_as_a_value_is_no_state_op():
    graph = fx.Graph()
    node = graph.call_function(torch.is_grad_enabled)
    graph.output(node)
    assert not is_state_op(node)


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
