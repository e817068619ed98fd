"""Regions and settings in parts: opened by need, in the right order, and the caller's state left as it was."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from campaigns import some_of_all
from handgraphs import graph_of
from splitlaws import assert_emitted_as_planned
from torch import fx, nn
from visiblestate import Divided, observe

import splitkit as sk
from splitkit import _torch
from splitkit.errors import GraphError
from splitkit.graph import ambient as states
from splitkit.graph.scope import scopes
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same

FACTOR = [1.0]


def enter_factor(factor, *, also=0.0):
    """A user's own region, as plain functions: yields what exit restores."""
    before, FACTOR[0] = FACTOR[0], factor + also
    return before


def exit_factor(before):
    FACTOR[0] = before


def push_factor(factor):
    FACTOR.append(factor)


def pop_factor():
    FACTOR.pop()


def times_factor(x):
    return x * FACTOR[-1]


sk.extend.register_region("factor", enter_factor, exit_factor)
sk.extend.register_region("pushed factor", push_factor, pop_factor, handle=False)


@pytest.fixture(autouse=True)
def _declared():
    from splitkit.graph import ops

    ops.declare(times_factor)
    yield
    assert FACTOR == [1.0]


def module(graph):
    graph.output(next(iter(reversed(graph.nodes))))
    return fx.GraphModule(nn.Module(), graph)


def calls(graph):
    """What a graph calls, inputs and output aside."""
    return [_torch.target_name(n).split(".")[-1] for n in graph.nodes if n.op.startswith("call_")]


def factors():
    """x * 2, where the 2 comes from a region, then * 3 from one inside; the last one outside."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(enter_factor, (1.5,), {"also": 0.5})
    a = graph.call_function(times_factor, (x,), name="a")
    inner = graph.call_function(enter_factor, (3.0,))
    b = graph.call_function(times_factor, (a,), name="b")
    graph.call_function(exit_factor, (inner,))
    c = graph.call_function(times_factor, (b,), name="c")
    graph.call_function(exit_factor, (outer,))
    graph.call_function(times_factor, (c,), name="d")
    return module(graph)


@pytest.mark.parametrize("labels", itertools.product((0, 1, None), repeat=4))
def test_a_users_region_is_opened_in_each_part(labels):
    gm = factors()
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(gm(x), torch.full((2,), 12.0))
    flow = sk.analyze(gm)
    made = sk.split(gm, sk.extend.refine(flow, sk.Plan.of(dict(zip(flow.nodes, labels, strict=True)))))
    assert_emitted_as_planned(made)
    assert_same(gm, made, x)


def test_a_part_has_the_regions_of_its_nodes_and_no_other():
    made = sk.split(factors(), {"a": 0, "b": 1, "c": 2, "d": 3})
    assert [calls(part.graph) for part in made.parts.values()] == [
        ["enter_factor", "times_factor", "exit_factor"],
        ["enter_factor", "enter_factor", "times_factor", "exit_factor", "exit_factor"],
        ["enter_factor", "times_factor", "exit_factor"],
        ["times_factor"],
    ]
    assert calls(made.module.graph) == ["submod_0", "submod_1", "submod_2", "submod_3"]


def test_a_users_region_without_a_handle():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(push_factor, (2.0,))
    a = graph.call_function(times_factor, (x,), name="a")
    graph.call_function(push_factor, (3.0,))
    b = graph.call_function(times_factor, (a,), name="b")
    graph.call_function(pop_factor)
    graph.call_function(pop_factor)
    graph.call_function(times_factor, (b,), name="c")
    gm = module(graph)
    made = sk.split(gm, {"a": 0, "b": 1, "c": 2})
    assert calls(made.parts[1].graph) == ["push_factor", "push_factor", "times_factor", "pop_factor", "pop_factor"]
    assert calls(made.parts[2].graph) == ["times_factor"]
    assert_same(gm, made, torch.ones(2, requires_grad=True))


def test_a_users_region_that_sets_grad_mode():
    class Frozen:
        @staticmethod
        def enter():
            before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            return before

    def leave(before):
        torch._C._set_grad_enabled(before)

    sk.extend.register_region("frozen", Frozen.enter, leave, grad=False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    handle = graph.call_function(Frozen.enter)
    a = graph.call_function(observe, (x,), name="a")
    graph.call_function(_torch.SET_GRAD, (True,))
    b = graph.call_function(observe, (a,), name="b")
    graph.call_function(leave, (handle,))
    scope, final = scopes(graph)
    assert (scope[a].grad, scope[b].grad, final.grad) == (False, True, None)
    handle.graph.output(b)


def test_a_users_operator_is_known_by_all_its_names():
    @torch.library.custom_op("splitkit_test::enter_scale", mutates_args=())
    def enter_scale(by: float) -> int:
        return 0

    @torch.library.custom_op("splitkit_test::exit_scale", mutates_args=())
    def exit_scale(handle: int) -> None:
        pass

    sk.extend.register_region("scale", enter_scale, exit_scale)
    ops = torch.ops.splitkit_test
    for enter, leave in [
        (ops.enter_scale, ops.exit_scale),
        (ops.enter_scale.default, ops.exit_scale.default),
    ]:
        graph = fx.Graph()
        handle = graph.call_function(enter, (2.0,))
        inside = graph.call_function(torch.ones, (2,))
        graph.call_function(leave, (handle,))
        assert scopes(graph)[0][inside].regions == (handle,)


def test_registering_again_changes_nothing_and_nonsense_is_refused():
    sk.extend.register_region("factor", enter_factor, exit_factor)
    for enter, leave, why in [
        (enter_factor, pop_factor, "opens, closes or sets something already"),
        (times_factor, enter_factor, "opens, closes or sets something already"),
        (times_factor, pop_factor, "opens, closes or sets something already"),  # pop takes no handle
        (torch.is_grad_enabled, exit_factor, "opens, closes or sets something already"),
        ("enter", exit_factor, "'enter' cannot be called"),
        (times_factor, 3, "3 cannot be called"),
        (times_factor, times_factor, "by the same function"),
    ]:
        with pytest.raises(GraphError, match=f"SK105: region 'bad': .*{why}"):
            sk.extend.register_region("bad", enter, leave)
    assert not states.closed_by(fx.Graph().call_function(times_factor))


def test_several_regions_may_share_an_exit():
    def enter_double():
        return enter_factor(2.0)

    sk.extend.register_region("double", enter_double, exit_factor, state="factor")
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(enter_double)
    b = graph.call_function(enter_factor, (3.0,))
    graph.call_function(exit_factor, (a,))
    inside = graph.call_function(times_factor, (x,))
    graph.call_function(exit_factor, (b,))
    scope, _ = scopes(graph)
    assert scope[inside].regions == ()  # one state: closing the outer one restores what was before it
    graph.output(inside)


def hooked():
    """Saved-tensors hooks that halve, then none allowed, then hooks of thirds; one op under each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    same = graph.get_attr("same")
    graph.call_function(_torch.PUSH_HOOKS, (graph.get_attr("a.halved"), same))
    y = graph.call_function(torch.sin, (x,), name="a")
    graph.call_function(_torch.PUSH_HOOKS, (graph.get_attr("thirds"), same))
    y = graph.call_function(torch.sin, (y,), name="b")
    graph.call_function(_torch.POP_HOOKS)
    graph.call_function(_torch.POP_HOOKS)
    graph.call_function(_torch.FORBID_HOOKS, ("not here",))
    y = graph.call_function(observe, (y,), name="c")
    graph.call_function(_torch.ALLOW_HOOKS)
    graph.output(graph.call_function(torch.sin, (y,), name="d"))
    return fx.GraphModule({"a.halved": Divided(2), "thirds": Divided(3), "same": nn.Identity()}, graph)


@pytest.mark.parametrize(
    ("labels", "parameters"), some_of_all(itertools.product((0, 1, None), repeat=4), ["own", "hoist"], ())
)
def test_saved_tensors_hooks(labels, parameters):
    gm = hooked()
    flow = sk.analyze(gm)
    made = sk.split(
        gm, sk.extend.refine(flow, sk.Plan.of(dict(zip(flow.nodes, labels, strict=True)))), parameters=parameters
    )
    assert_same(gm, made, torch.randn(3, requires_grad=True))
    assert_same(gm, copy.deepcopy(made.module), torch.randn(3, requires_grad=True))


def test_hooks_of_a_graph_run_in_the_parts_that_torchs_signature_makes():
    gm = hooked()
    made = sk.split_module(gm, None, lambda node: {"a": 0, "b": 1, "c": 2, "d": 3}.get(node.name, 0))
    assert_same(gm, made, torch.randn(3, requires_grad=True))


SETTERS = [
    (_torch.SET_GRAD, (False,), {}),
    (_torch.SET_FWD_GRAD, (False,), {}),
    (_torch.FORBID_HOOKS, ("no",), {}),
    (_torch.SET_DETERMINISTIC, (True,), {"warn_only": True}),
]


def ambient():
    modes = {name: setting.get() for name, setting in states.SETTINGS.items()}
    return modes | {"autocast": torch.is_autocast_enabled("cpu"), "inference": torch.is_inference_mode_enabled()}


@pytest.fixture
def odd_caller():
    """Run under a state that no graph would guess."""
    before = {name: setting.get() for name, setting in states.SETTINGS.items()}
    states.GRAD.set(False)
    states.FORWARD_GRAD.set(False)
    states.HOOKS.set("the caller's")
    states.DETERMINISTIC.set((True, False))
    yield
    for name, setting in states.SETTINGS.items():
        setting.set(before[name])


@pytest.mark.parametrize("caller", ["plain", "odd"])
@pytest.mark.parametrize("setter", SETTERS, ids=lambda s: s[0].__name__)
@pytest.mark.parametrize("region", ["none", "autocast", "inference"])
def test_a_part_alone_leaves_its_caller_as_it_was_although_the_graph_does_not(caller, setter, region, request):
    graph = fx.Graph()
    x = graph.placeholder("x")
    if region == "autocast":
        graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    elif region == "inference":
        graph.call_function(_torch.ENTER_INFERENCE, (True,))
    a = graph.call_function(torch.sin, (x,), name="a")
    graph.call_function(setter[0], *setter[1:])
    graph.output(graph.call_function(torch.sin, (a,), name="b"))
    gm = fx.GraphModule(nn.Module(), graph)
    made = sk.split(gm, {"a": 0, "b": 1})
    if caller == "odd":
        request.getfixturevalue("odd_caller")
    before = ambient()
    for part in made.parts.values():
        part(torch.randn(2))
        assert ambient() == before
    if region == "none":
        left = []
        for whole in (gm, made.module):
            whole(torch.randn(2))
            left.append(ambient())
            states_as(before)
        assert left[0] == left[1] != before or caller == "odd"


def states_as(state):
    for name, setting in states.SETTINGS.items():
        setting.set(state[name])


def test_a_setting_restored_in_one_part_is_the_callers(odd_caller):
    graph = fx.Graph()
    x = graph.placeholder("x")
    handle = graph.call_function(_torch.ENTER_INFERENCE, (True,))
    graph.call_function(_torch.SET_FWD_GRAD, (True,))
    a = graph.call_function(observe, (x,), name="a")
    graph.call_function(_torch.EXIT_INFERENCE, (handle,))
    before = graph.call_function(_torch.HOOKS_MESSAGE)
    graph.call_function(_torch.ALLOW_HOOKS)
    b = graph.call_function(observe, (x,), name="b")
    graph.call_function(_torch.set_hooks_message, (before,))
    c = graph.call_function(observe, (x,), name="c")
    graph.output((a, b, c))
    gm = fx.GraphModule(nn.Module(), graph)
    want = gm(torch.zeros(1))
    assert len({float(v) for v in want}) == 3
    for labels in itertools.product((0, 1, None), repeat=3):
        flow = sk.analyze(gm)
        made = sk.split(gm, sk.Plan.of(dict(zip(flow.nodes, labels, strict=True))))
        assert all(torch.equal(a, b) for a, b in zip(made(torch.zeros(1)), want, strict=True))
        again = sk.split(made.module, lambda node: None)  # what is emitted can be read again
        assert all(torch.equal(a, b) for a, b in zip(again(torch.zeros(1)), want, strict=True))


def test_dynamo_writes_settings_that_parts_carry():
    def f(x):
        with torch.autograd.graph.disable_saved_tensors_hooks("no"):
            y = observed(x.sin())
        with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
            y = observed(y)
        torch.use_deterministic_algorithms(True)
        y = observed(y)
        torch.use_deterministic_algorithms(False)
        return y.cos()

    observed = torch.compiler.allow_in_graph(observe)
    caught = []

    def backend(gm, example):
        caught.append(gm)
        return gm.forward

    torch.compiler.reset()
    x = torch.randn(3, requires_grad=True)
    torch.compile(f, backend=backend, fullgraph=True)(x)
    (gm,) = caught
    flow = sk.analyze(gm)
    assert {name for s in flow.scope.values() for name, _ in s.settings} == {
        "saved-tensors hooks", "forward-mode gradients", "deterministic algorithms",
    }  # fmt: skip
    assert not flow.once
    for n in (2, 3, 6):
        assert_same(gm, sk.split(gm, sk.policies.RoundRobin(n)), x)


def test_levels_of_dual_numbers_stay_effects():
    """Their tensors die with the level, which cannot be opened again in another part."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.autograd.forward_ad.enter_dual_level)
    y = graph.call_function(torch.sin, (x,))
    leave = graph.call_function(torch.autograd.forward_ad.exit_dual_level, (), {"level": 0})
    graph.output(y)
    flow = sk.analyze(fx.GraphModule(nn.Module(), graph))
    assert leave in flow.once and y in flow.after[leave]


def test_setting_ambient_state_keeps_other_nodes_in_place():
    def write(g):
        x = g.placeholder("x")
        before = g.call_function(torch.cos, (x,))
        g.call_function(torch.set_grad_enabled, (False,))
        inside = g.call_function(torch.tan, (x,))
        g.call_function(torch.set_grad_enabled, (True,))
        g.output((inside, before))

    gm = graph_of(write)
    with pytest.raises(sk.errors.CycleError):
        sk.split(gm, {"cos": 0, "tan": 0, "set_grad_enabled": 1, "set_grad_enabled_1": 1})
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_the_grad_mode_may_be_asked_for_both_to_read_and_to_restore_it():
    def write(g):
        x = g.placeholder("x")
        before = g.call_function(torch.is_grad_enabled)
        g.call_function(_torch.SET_GRAD, (False,))
        frozen = g.call_function(torch.sin, (x,))
        g.call_function(_torch.SET_GRAD, (before,))
        g.output((frozen, before, g.call_function(torch.cos, (x,))))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))
