"""One test a bug, named after it: bugs of splitkit that were found and mended."""

from __future__ import annotations

import copy
import functools
import gc
import json
import operator
import pickle
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import splitkit as sk
from splitkit import _torch, costs
from splitkit.cli import main
from splitkit.costs import unit
from splitkit.costs.keys import is_lasting, key_of
from splitkit.errors import CostError, GraphError
from splitkit.plan import Plan
from splitkit.policies import RoundRobin
from splitkit.rewrite import refine
from splitkit.split import split
from splitkit.testing import assert_emitted_as_planned, assert_legal, assert_same


def test_one_tensor_given_twice_was_captured_as_one_input():
    class Model(nn.Module):
        def forward(self, x, labels):
            return x * 2 + labels

    x = torch.ones(2)
    gm = sk.capture(Model(), x, x)
    assert torch.equal(gm(torch.ones(2), torch.zeros(2)), torch.full((2,), 2.0))


def test_nodes_of_another_graph_were_dropped_in_silence(chain):
    other = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    with pytest.raises(sk.PlanError, match="SK201"):
        split(chain, Plan.of(dict.fromkeys(other.graph.nodes, 0)))


def test_refine_let_a_later_visit_read_a_home_that_had_not_run():
    """`a` has copies in 0 and 1; the second visit of 1 has no copy, so it reads the home's, which must come before."""

    class Model(nn.Module):
        def forward(self, x):
            a = x.sin()
            b = a.cos()
            c = b.tan()
            return c + a

    gm = fx.symbolic_trace(Model())
    flow = sk.analyze(gm)
    sin, cos, tan, add = flow.nodes
    plan = refine(flow, Plan.of({sin: [0, 1], cos: 1, tan: 2, add: 1}))
    assert_legal(flow, plan)
    assert_same(gm, split(gm, plan), torch.ones(2))


def test_interleaved_autocast_left_its_state_on_for_the_next_comparison():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    b = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_torch.EXIT_AUTOCAST, (a,))
    graph.call_function(_torch.EXIT_AUTOCAST, (b,))
    graph.output(graph.call_function(torch.mm, (x, x)))
    gm = fx.GraphModule(nn.Module(), graph)
    assert_same(gm, split(gm, RoundRobin(1)), torch.randn(3, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_hooks_of_an_exported_module_did_not_find_their_attributes_on_the_parent():
    gm = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(check_guards=False)
    assert_same(gm, split(gm, lambda node: 0), torch.ones(1, 2))


def test_gradients_of_tied_weights_were_compared_under_two_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.last = nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x).relu())

    model = Tied()
    gm = sk.capture(model, torch.randn(2, 4))
    result = sk.compare(model, split(gm, RoundRobin(3)), torch.randn(2, 4))
    assert result.same and [d.name for d in result.gradients] == ["gradient of first.weight"]


def test_a_failed_write_left_a_temporary_file(tmp_path):
    from splitkit import planfile

    with pytest.raises(TypeError):
        planfile.write(tmp_path / "plan.json", {"not json": object()})
    assert not list(tmp_path.iterdir())


def test_a_policy_class_instead_of_a_policy_was_called(chain):
    with pytest.raises(sk.PolicyError, match="SK301"):
        split(chain, RoundRobin)


def test_views_that_are_buffers_could_not_be_restored_after_a_comparison():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("whole", torch.zeros(2, 2))
            self.register_buffer("turned", self.whole.t())

        def forward(self, x):
            self.whole.copy_(self.linear(x))
            return x @ self.turned

    gm = fx.symbolic_trace(Model())
    assert_same(gm, split(gm, RoundRobin(2), costs=unit(gm)), torch.randn(2, 2))
    assert torch.equal(gm.whole, torch.zeros(2, 2))


def test_exports_guard_call_was_taken_for_a_writer():
    class Model(nn.Module):
        def forward(self, x, y):
            return x.sin() + y.cos()

    gm = torch.export.export(Model(), (torch.ones(2), torch.ones(2))).module()
    flow = sk.analyze(gm)
    assert not any(flow.after[n] for n in flow.nodes)
    assert_same(gm, split(gm, RoundRobin(2)), torch.ones(2), torch.ones(2))


def test_export_lost_a_no_grad_block_around_control_flow():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                z = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
                w = y.tan()
            return y + z + w

    model, x = Branches(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    assert_same(model, gm, x)
    assert_same(model, split(gm, RoundRobin(2)), x)


def test_export_lost_no_grad_inside_autocast():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.no_grad()
        def frozen(self, x):
            return self.linear(x).tanh()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    a = self.linear(x).sin()
                b = self.linear(x)
                c = self.frozen(x)
            with torch.no_grad():
                d = self.linear(x)
                with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                    e = self.linear(x)
                f = self.linear(x)
            return a, b, c, d, e, f

    model, x = Mixed(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    wanted = [v.requires_grad for v in model(x)]
    for made in (gm, split(gm, RoundRobin(1)), split(gm, RoundRobin(3))):
        assert [v.requires_grad for v in made(x)] == wanted == [False, True, False, False, True, False]
        assert_same(model, made, x, tolerance=1e-2)
        with torch.no_grad():
            made(x)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def graph_of(write, root=None):
    """A GraphModule around a function that writes a graph."""
    graph = fx.Graph()
    write(graph)
    return fx.GraphModule(root or nn.Module(), graph)


def test_setting_ambient_state_did_not_keep_other_nodes_in_place():
    def write(g):
        x = g.placeholder("x")
        before = g.call_function(torch.cos, (x,))
        g.call_function(torch.set_grad_enabled, (False,))
        inside = g.call_function(torch.tan, (x,))
        g.call_function(torch.set_grad_enabled, (True,))
        g.output((inside, before))

    gm = graph_of(write)
    with pytest.raises(sk.CycleError):
        split(gm, {"cos": 0, "tan": 0, "set_grad_enabled": 1, "set_grad_enabled_1": 1})
    assert_same(gm, split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_a_checkpointed_part_drew_other_numbers_from_a_generator_of_its_own():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.bernoulli, (x,), {"generator": g.get_attr("generator")}))

    root = nn.Module()
    root.generator = torch.Generator()
    gm = graph_of(write, root)
    parts = {0: sk.Part(0, call="checkpoint")}
    with pytest.raises(sk.PlanError, match="SK207.*bernoulli"):
        split(gm, Plan(dict.fromkeys(sk.analyze(gm).nodes, (0,)), parts))
    assert len(split(gm, lambda node: 0).parts) == 1


def test_a_buffer_written_in_one_part_and_read_in_another_was_torn_apart_by_double():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.register_buffer("fixed", torch.ones(3))

        def forward(self, x):
            self.count.add_(x)
            return x.sin() + self.count + self.fixed

    gm = fx.symbolic_trace(Counting())
    made = split(gm, {"add_": 0, "sin": 1, "add": 1, "add_1": 1}).module
    assert sorted(made.state_dict()) == ["count", "submod_1.fixed"]
    x = torch.ones(3, dtype=torch.double)
    assert torch.equal(copy.deepcopy(gm).double()(x), copy.deepcopy(made).double()(x))


def test_backward_hooks_of_the_original_were_lost():
    gm = fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.Tanh()))
    gm.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 10,))
    gm.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))
    assert_same(gm, split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_a_copy_of_a_split_lost_the_check_of_its_inputs():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3))
    made = split(gm, lambda node: 0)
    for copied in (copy.deepcopy(made.module), copy.deepcopy(made)):
        with pytest.raises(RuntimeError, match="[Ee]xpected input"):
            copied(torch.ones(5, 3))


def test_a_split_of_a_captured_model_could_not_be_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    gm = sk.capture(model, torch.ones(2, 3))
    made = split(gm, RoundRobin(2))
    copied = copy.deepcopy(made)
    assert_emitted_as_planned(copied)
    assert not {id(p) for p in copied.module.parameters()} & {id(p) for p in made.module.parameters()}
    assert_same(gm, copied, torch.ones(2, 3))


def test_a_split_with_hooks_could_not_be_pickled():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3), how="symbolic_trace")
    again = pickle.loads(pickle.dumps(split(gm, lambda node: 0).module))
    assert torch.equal(again(torch.ones(2, 3)), gm(torch.ones(2, 3)))


def test_part_names_that_python_folds_called_the_wrong_part():
    class Three(nn.Module):
        def forward(self, x):
            return x.sin().cos().tan()

    gm = fx.symbolic_trace(Three())
    made = split(gm, dict(zip(["sin", "cos", "tan"], ["\ufb01", "fi", "\uff11"], strict=True)))
    assert all(name.isascii() for name, _ in made.module.named_children())
    assert_same(gm, made, torch.ones(2))


def test_refine_did_not_take_the_plan_of_a_split(chain):
    made = split(chain, {"add": 0, "mul": 0, "sub": 1})
    assert list(refine(made.flow, made.plan).parts) == [(0, 0), (1, 1)]


def test_a_value_called_self_hid_the_module():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.cos, (g.create_node("call_function", torch.sin, (x,), name="self"),)))

    gm = graph_of(write)
    assert_same(gm, split(gm, {"self": 0, "cos": 1}), torch.ones(2))


def test_refine_gave_a_circle_where_the_index_of_a_tuple_is_computed():
    def write(g):
        x = g.placeholder("x")
        parts = g.call_function(torch.chunk, (x, 2))
        first = g.call_method("sum", (g.call_function(operator.getitem, (parts, 0)),))
        index = g.call_function(int, (g.call_method("item", (first,)),))
        g.output(g.call_function(operator.getitem, (parts, index)))

    gm = graph_of(write)
    assert_same(gm, split(gm, RoundRobin(2)), torch.tensor([0.0, 1.0, 5.0, 6.0]))


def test_asking_for_the_grad_mode_both_to_read_and_to_restore_it_was_refused():
    def write(g):
        x = g.placeholder("x")
        before = g.call_function(torch.is_grad_enabled)
        g.call_function(_torch.SET_GRAD, (False,))
        frozen = g.call_function(torch.sin, (x,))
        g.call_function(_torch.SET_GRAD, (before,))
        g.output((frozen, before, g.call_function(torch.cos, (x,))))

    gm = graph_of(write)
    assert_same(gm, split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_tied_weights_in_the_parent_counted_as_shared_between_parts():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    gm = sk.capture(model, torch.ones(1, 3))
    assert split(gm, RoundRobin(2), parameters="hoist").shared == ()
    assert len(split(gm, RoundRobin(2)).shared) == 1


def test_merging_a_part_with_itself_forgot_how_it_is_called(chain):
    flow = sk.analyze(chain)
    plan = Plan(dict.fromkeys(flow.nodes, (0,)), {0: sk.Part(0, call="checkpoint")})
    assert sk.merge(flow, plan, 0, 0) == plan
    with pytest.raises(sk.PlanError, match="SK206: the plan has no part 7"):
        sk.rematerialize(flow, plan, into=7)


def test_an_item_of_a_list_that_is_written_was_read_too_early():
    def write(g):
        x = g.placeholder("x")
        made = g.call_function(list, ((1, 2, 3),))
        g.call_function(operator.setitem, (made, 0, 7))
        g.output(g.call_function(torch.add, (x, g.call_function(operator.getitem, (made, 0)))))

    gm = graph_of(write)
    with pytest.raises(sk.CycleError, match="getitem must run after the effect or read of setitem"):
        split(gm, {"list_1": 0, "setitem": 1, "getitem": 0, "add": 0})
    assert_same(gm, split(gm, RoundRobin(2)), torch.zeros(2))


def grad_modes(model, x):
    """requires_grad of the outputs and the caller's mode afterwards, called with grad mode on and off."""
    found = []
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            found.append(([y.requires_grad for y in model(x)], torch.is_grad_enabled()))
    return found


class GradBlocks(nn.Module):
    """One way of changing grad mode, given by name."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    @torch.set_grad_enabled(False)
    def decorated(self, x):
        return self.linear(x)

    def forward(self, x):
        return getattr(self, self.way)(x)

    def set_off(self, x):
        with torch.set_grad_enabled(False):
            y = self.linear(x)
        return y, self.linear(x), self.decorated(x)

    def set_on(self, x):
        with torch.set_grad_enabled(True):
            y = self.linear(x)
        return y, self.linear(x)

    def sequence(self, x):
        with torch.enable_grad():
            a = self.linear(x)
        with torch.no_grad():
            b = self.linear(x)
        with torch.enable_grad(), torch.enable_grad():
            c = self.linear(x)
        return a, b, c, self.linear(x)

    def nested(self, x):
        with torch.no_grad():
            with torch.enable_grad():
                a = self.linear(x)
            b = self.linear(x)
        return a, b, self.linear(x)

    def inference(self, x):
        with torch.inference_mode():
            a = self.linear(x)
        with torch.no_grad(), torch.inference_mode(False):
            b = self.linear(x)
        return self.linear(x), a, b

    def plainly(self, x):
        torch.set_grad_enabled(False)
        a = self.linear(x)
        torch.set_grad_enabled(True)
        return a, self.linear(x)

    def branches(self, x):
        def frozen(v):
            with torch.no_grad():
                return v * 2

        return torch.cond(x.sum() > 0, frozen, lambda v: v * 3, (x,)), self.linear(x)


@pytest.mark.parametrize(
    "way", ["set_off", "set_on", "sequence", "nested", "inference", "plainly", "branches", "decorated_alone"]
)
def test_blocks_of_grad_mode_were_told_apart_by_value(way):
    if way == "decorated_alone":
        GradBlocks.decorated_alone = lambda self, x: (self.decorated(x), self.linear(x))
    model, x = GradBlocks(way), torch.ones(2, 4)
    gm = sk.capture(model, x)
    wanted = grad_modes(model, x)
    torch.set_grad_enabled(True)
    assert grad_modes(gm, x) == wanted
    torch.set_grad_enabled(True)
    assert grad_modes(split(gm, RoundRobin(2)), x) == wanted


def test_captures_in_threads_left_export_patched():
    results = []

    def work(depth):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
        results.append(sk.capture(model, torch.ones(1, 4)))

    threads = [threading.Thread(target=work, args=(depth,)) for depth in (2, 9, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    exported = torch.export.export(GradBlocks("nested"), (torch.ones(1, 4),), strict=False)
    assert any("wrap_with_set_grad_enabled" in str(n.target) for n in exported.graph.nodes)


def test_requires_grad_in_a_model_was_lost():
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).detach().requires_grad_(True) * 2

    with pytest.raises(sk.CaptureError, match="SK401: the model calls requires_grad_"):
        sk.capture(Marks(), torch.ones(1, 4))


def test_a_caller_under_autocast_changed_what_was_captured():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        gm = sk.capture(model, x)
    assert gm.graph.find_nodes(op="output")[0].args[0][0].meta["val"].dtype == torch.float32
    assert_same(model, split(gm, RoundRobin(2)), torch.ones(1, 4))


def test_a_pickled_split_lost_its_regions_in_silence():
    """fx unpickles by tracing the code, in which ``_set_grad_enabled`` runs instead of becoming a node."""

    def model(x):
        with torch.no_grad():
            y = x.sin()
        return y * x

    gm = make_fx(model, pre_dispatch=True)(torch.ones(2))
    for lazy in (False, True):
        made = split(gm, lambda node: 0, lazy=lazy)
        with pytest.raises(GraphError, match="SK107"):
            pickle.dumps(made.module)
        assert_same(gm, copy.deepcopy(made.module), torch.ones(2, requires_grad=True))


def test_a_called_module_did_not_wait_for_writes_to_its_weights():
    """`Linear` only reads state: `_only_aliases` dropped it from the nodes that effects concern."""

    def write(g):
        x = g.placeholder("x")
        weight = g.call_function(torch.ops.aten.detach.default, (g.get_attr("linear.weight"),))
        g.call_function(torch.ops.aten.add_.Scalar, (weight, 1.0))
        y = g.call_module("linear", (x,))
        g.call_function(torch.ops.aten.mul_.Scalar, (weight, 3.0))
        g.output(y)

    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    gm = graph_of(write, root)
    parts = {"detach_default": 0, "add__scalar": 0, "linear": 1, "mul__scalar": 0}
    with pytest.raises(sk.CycleError):
        sk.split(gm, parts)


def test_splits_were_never_collected():
    """`gc.freeze` sets all counts back to zero and makes everything old: a loop of splits kept every one of them."""
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(10)]))
    gc.collect()
    made = [weakref.ref(sk.split(gm, RoundRobin(2)).module) for _ in range(400)]
    assert sum(ref() is not None for ref in made) < 300


def test_pow_of_tensors_as_a_function_was_a_value_error():
    gm = graph_of(lambda g: g.output(g.call_function(torch.Tensor.__pow__, (g.placeholder("x"), 2))))
    assert list(sk.split(gm, {"pow_1": 0}).parts) == [0]


def test_inputs_of_a_part_that_differ_in_case_were_mixed_up():
    """`graph.placeholder("A")` calls its node `a`; the code is `def forward(self, A, a): a = A; a_1 = a`."""

    def write(g):
        x = g.placeholder("x")
        upper = g.create_node("call_function", torch.sin, (x,), name="A")
        lower = g.create_node("call_function", torch.cos, (x,), name="a")
        g.output(g.create_node("call_function", torch.sub, (upper, lower), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"A": 0, "a": 0, "d": 1}), torch.ones(2))


def test_inputs_of_a_part_called_self_and_self_underscore_were_one():
    def write(g):
        x = g.placeholder("x")
        one = g.create_node("call_function", torch.sin, (x,), name="self_")
        other = g.create_node("call_function", torch.cos, (x,), name="self")
        g.output(g.create_node("call_function", torch.sub, (one, other), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"self_": 0, "self": 0, "d": 1}), torch.ones(2))


def in_runs(gm, cuts):
    """`split_module` in the original order, cut before the named nodes."""
    part = iter(range(99))
    label = {}
    now = next(part)
    for node in gm.graph.nodes:
        now = next(part) if node.name in cuts else now
        label[node.name] = now
    return sk.split_module(gm, None, lambda node: label[node.name], keep_original_order=True)


def interleaved():
    def write(g):
        x = g.placeholder("x")
        a = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.call_function(torch.mm, (x, x))
        b = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, False, None))
        g.call_function(_torch.EXIT_AUTOCAST, (a,))
        inside = g.call_function(torch.mm, (x, x))
        g.call_function(_torch.EXIT_AUTOCAST, (b,))
        last = g.call_function(torch.mm, (x, x))
        g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.output((inside, last))

    return graph_of(write)


@pytest.mark.parametrize("cuts", [["_exit_autocast_1"], ["mm_1"], ["mm_2"], ["mm_1", "mm_2"]])
def test_regions_that_interleave_ran_in_another_state_in_runs(cuts):
    """What `scopes` calls open and what the graph has not closed differ where regions interleave."""
    gm = interleaved()
    x = torch.randn(3, 3)
    try:
        wanted = gm(x)
        torch.set_autocast_enabled("cpu", False)
        made = in_runs(gm, cuts)(x)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert [v.dtype for v in made] == [v.dtype for v in wanted]


def test_a_setting_was_asked_again_in_another_state_in_runs():
    """`recompute_locally` copies `get_autocast_dtype` into the run of its reader, which has closed the region."""

    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.float16, True, None))
        dtype = g.call_function(torch.get_autocast_dtype, ("cpu",))
        dtype.meta["val"] = torch.float16
        y = g.call_function(torch.sin, (x,))
        g.call_function(_torch.EXIT_AUTOCAST, (handle,))
        g.output(g.call_method("to", (y, dtype)))

    gm = graph_of(write)
    assert_same(gm, in_runs(gm, ["_exit_autocast"]), torch.ones(2))


def test_a_wrapper_of_a_torch_function_was_taken_for_it():
    """`functools.wraps` copies `__name__` and `__module__`."""

    @functools.wraps(F.relu)
    def noisy(x):
        return F.relu(x) + torch.rand_like(x)

    gm = graph_of(lambda g: g.output(g.call_function(noisy, (g.placeholder("x"),))))
    assert sk.analyze(gm).once


def test_a_buffer_of_a_called_module_and_the_same_buffer_read_elsewhere_were_torn_apart_by_double():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x) + self.norm.running_mean

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, {"norm": 0, "add": 1}).module
    x = torch.randn(4, 3, dtype=torch.double)
    assert torch.equal(copy.deepcopy(gm).double()(x), copy.deepcopy(made).double()(x))


def test_a_long_chain_of_numbers_was_a_recursion_error():
    def write(g):
        x = g.placeholder("x")
        y = g.call_function(torch.sin, (x,))
        y.meta["val"] = torch.ones(())
        number = g.call_method("item", (y,))
        number.meta["val"] = 1.0
        for _ in range(2000):
            number = g.call_function(operator.add, (number, 1.0))
            number.meta["val"] = 1.0
        g.output(g.create_node("call_function", torch.mul, (y, number), name="last"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, lambda node: int(node.name == "last")), torch.ones(()))


def test_many_sizes_of_one_tensor_took_quadratic_time():
    def calls(count):
        def write(g):
            x = g.placeholder("x")
            y = g.call_function(torch.sin, (x,))
            for _ in range(count):
                size = g.call_method("size", (y,))
                x = g.call_method("view", (x, size))
                y.meta["val"] = x.meta["val"] = torch.ones(2)
                size.meta["val"] = torch.Size([2])
            g.output(x)

        gm = graph_of(write)
        part = {n: 0 if n.target == "size" else i // 8 for i, n in enumerate(gm.graph.nodes)}
        seen = [0]
        sys.setprofile(lambda frame, event, arg: seen.__setitem__(0, seen[0] + 1))
        try:
            sk.plan(gm, part.__getitem__)
        finally:
            sys.setprofile(None)
        return seen[0]

    assert calls(800) < 5 * calls(200)


def test_two_threads_that_called_a_lazy_split_first_broke_its_code():
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(8)]))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed = []
    try:
        for _ in range(150):
            made = sk.split(gm, RoundRobin(3), lazy=True)
            gate = threading.Barrier(4)

            def call(made=made, gate=gate):
                gate.wait()
                try:
                    made(torch.ones(1))
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_inline_of_an_empty_graph_was_a_runtime_error():
    gm = graph_of(lambda g: None)
    assert not list(sk.inline(sk.split(gm, lambda node: 0)).graph.nodes)


def test_the_forward_of_a_lazy_part_could_not_be_replaced():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    made = sk.split(gm, {"_0": 0, "_1": 1}, lazy=True)
    made.parts[0].forward = lambda x: x * 5
    assert made(torch.ones(())) == 5


def test_objects_behind_targets_were_kept_alive_for_ever():
    """`torch_name`, `signature_facts` and `is_ambient` are cached by target: bound methods, closures over tensors."""

    class Model(nn.Module):
        def double(self, x):
            return x * 2

    def splits():
        model = Model()
        sk.split(graph_of(lambda g: g.output(g.call_function(model.double, (g.placeholder("x"),)))), RoundRobin(1))
        return weakref.ref(model)

    kept = splits()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("how", ["split", "lazy", "split_module"])
def test_a_part_could_not_be_overridden_in_the_dict_of_its_parent(how):
    """vLLM puts its piecewise backends there: ``module.__dict__["submod_0"] = backend``. A property comes first."""
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    labels = {"_0": 0, "_1": 1}
    if how == "split_module":
        made = sk.split_module(gm, None, lambda node: labels[node.name])
    else:
        made = sk.split(gm, labels, lazy=how == "lazy").module
    made.__dict__["submod_0"] = lambda x: x * 5
    assert made(torch.ones(())) == 5
    del made.__dict__["submod_0"], made.submod_0
    made.submod_0 = lambda x: x * 7
    assert made(torch.ones(())) == 7


def test_an_exit_by_keyword_was_an_index_error_in_runs():
    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        y = g.call_function(torch.sin, (x,))
        g.call_function(_torch.EXIT_AUTOCAST, (), {"mode": handle})
        g.output(g.call_function(torch.cos, (y,)))

    gm = graph_of(write)
    assert_same(gm, in_runs(gm, ["cos"]), torch.ones(2))


def test_a_number_was_computed_again_in_another_state_in_runs():
    """The copy of a module that yields a float has inputs, and depends on autocast all the same."""
    root = nn.Module()

    def inner(g):
        x = g.placeholder("x")
        g.output(g.call_method("item", (g.call_method("sum", (g.call_function(torch.mm, (x, x)),)),)))

    root.inner = graph_of(inner)

    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        number = g.call_module("inner", (x,))
        number.meta["val"] = 1.0
        g.call_function(_torch.EXIT_AUTOCAST, (handle,))
        g.output(g.call_function(torch.mul, (x, number)))

    gm = graph_of(write, root)
    assert_same(gm, in_runs(gm, ["_exit_autocast"]), torch.randn(5, 5))


def test_a_transform_of_the_code_of_a_split_was_one_of_the_original():
    """The parent had the code generator of the original, which ``on_generate_code`` changes."""
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    made = sk.split(gm, RoundRobin(2)).module
    made.graph.on_generate_code(lambda before: lambda body: ["raise AssertionError\n", *body])
    gm.recompile()
    assert torch.equal(gm(torch.ones(2)), torch.ones(2))


def test_buffers_of_one_memory_but_two_storages_were_not_in_one_class():
    memory = np.zeros(3, dtype=np.float32)
    root = nn.Module()
    root.register_buffer("a", torch.from_numpy(memory))
    root.register_buffer("b", torch.from_numpy(memory))

    def write(g):
        x = g.placeholder("x")
        g.call_method("add_", (g.get_attr("a"), x))
        g.output(g.call_function(torch.mul, (g.get_attr("b"), 2)))

    flow = sk.analyze(graph_of(write, root))
    assert flow.after[flow.nodes[1]] == (flow.nodes[0],)


_X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("target", "others"),
    [
        (torch.sin_, {}),
        (torch.clamp_, {"max": 0.5}),
        (torch.fill_, {"value": 2.0}),
        (F.relu_, {}),
        (F.hardtanh_, {}),
        (F.threshold_, {"threshold": 0.1, "value": 0.0}),
        (torch.nan_to_num_, {}),
    ],
)
@pytest.mark.parametrize("keyword", ["input", "x"])
def test_a_write_of_an_input_given_by_keyword_was_not_seen(target, others, keyword):
    """In Python the first tensor is `input` (numpy: `x`), in the schema `self`."""
    target(**{keyword: torch.ones(2, 3)}, **others)

    def write(g):
        y = g.call_function(torch.clone, (g.placeholder("x"),))
        g.call_function(target, (), {keyword: y, **others})
        g.output(g.call_function(torch.mul, (y, 3)))

    clone, written, read = sk.analyze(graph_of(write)).nodes
    assert sk.analyze(read.graph.owning_module).effects[written].writes == (clone,)
    assert written in sk.analyze(read.graph.owning_module).after[read]


@pytest.mark.parametrize(
    ("target", "others"),
    [
        (torch.transpose, {"input": _X, "dim0": 0, "dim1": 1}),
        (torch.transpose, {"a": _X, "dim0": 0, "dim1": 1}),
        (torch.split, {"tensor": _X, "split_size_or_sections": 1}),
        (torch.detach, {"input": _X}),
        (torch.squeeze, {"input": _X}),
        (torch.flatten, {"input": _X}),
        (torch.reshape, {"input": _X, "shape": (6,)}),
        (torch.unbind, {"input": _X}),
        (torch.chunk, {"input": _X, "chunks": 2}),
        (torch.select, {"input": _X, "dim": 0, "index": 0}),
        (torch.narrow, {"input": _X, "dim": 0, "start": 0, "length": 1}),
        (torch.permute, {"input": _X, "dims": (1, 0)}),
        (torch.unflatten, {"input": _X, "dim": 1, "sizes": (3, 1)}),
    ],
)
def test_a_view_of_an_input_given_by_keyword_was_not_seen(target, others):
    target(**others)

    def write(g):
        y = g.call_function(torch.clone, (g.placeholder("x"),))
        view = g.call_function(target, (), {k: y if v is _X else v for k, v in others.items()})
        g.output(view)

    clone, view = (flow := sk.analyze(graph_of(write))).nodes
    assert flow.effects[view].aliases == (clone,)


def test_einsum_by_keyword_was_a_value_error():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.ops.aten.einsum.default, (), {"equation": "ij->ji", "tensors": [x]}))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, RoundRobin(1)), torch.ones(2, 2))


def test_a_circle_through_nodes_that_the_host_and_a_part_share_was_not_seen():
    """Nodes in (HOST, 1) were taken for one unit: in the host each runs by itself, and waits for the others."""

    def write(g):
        x = g.placeholder("x")
        before = g.create_node("call_function", torch.sin, (x,), name="before")
        shared = g.create_node("call_function", torch.cos, (before,), name="shared")
        other = g.create_node("call_function", torch.tan, (shared,), name="other")
        after = g.create_node("call_function", torch.exp, (other,), name="after")
        g.output((after, g.create_node("call_function", torch.neg, (other,), name="last")))

    places = {"before": 0, "shared": [None, 1], "other": [None, 1], "after": 0, "last": 1}
    with pytest.raises(sk.CycleError):
        sk.split(graph_of(write), places)


def _captured(forward, *inputs, **attributes):
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return sk.capture(model, *inputs)


@pytest.mark.parametrize("record", [[10**400, 0], [1.0, 10**400], [True, False]])
def test_a_cost_cache_with_numbers_that_are_no_seconds_was_an_overflow_error_or_believed(tmp_path, record):
    file = tmp_path / "costs.json"
    gm = _captured(lambda self, x: x.sin(), torch.ones(3))
    costs.measured(gm, torch.ones(3), cache=file, min_run_time=1e-4)
    damaged = json.loads(file.read_text())
    for known in damaged["environments"].values():
        known.update(dict.fromkeys(known, record))
    file.write_text(json.dumps(damaged))
    with pytest.warns(UserWarning, match="is no cost cache"):
        found = costs.measured(gm, torch.ones(3), cache=file, min_run_time=1e-4)
    assert sum(map(found.seconds, gm.graph.nodes)) < 0.5
    assert "[1" not in file.read_text().replace(" ", "")


def test_an_op_on_a_size_that_only_the_data_decides_took_no_time():
    gm = _captured(lambda self, x: x[x > 0] * 2, torch.ones(64, 64))
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    (index,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    price = costs.roofline(gm, "cpu")
    bound = 64 * 64 * 4  # nonzero yields as many at most, and says so
    assert (price.nbytes(product), price.moved(product)) == (bound, 2 * bound)
    assert price.seconds(product) == 2 * bound / price.device.bandwidth + price.device.launch
    assert price.flops(index) == 64 * 64
    assert price.seconds(index) > price.device.launch


def test_ops_that_write_a_list_and_yield_nothing_cost_nothing():
    gm = _captured(lambda self, x, y: (torch._foreach_add_([x, y], 1.0), x)[1], torch.ones(10), torch.ones(20))
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.Scalar)
    price = costs.roofline(gm, "cpu")
    assert price.flops(add) == 30
    assert price.moved(add) == 2 * 30 * 4
    assert price.seconds(add) == 2 * 30 * 4 / price.device.bandwidth + price.device.launch


@pytest.mark.parametrize("make", [costs.flops, costs.roofline, costs.unit])
def test_prices_of_what_is_no_graph_were_an_attribute_error(make):
    with pytest.raises(GraphError, match="SK101.*Linear"):
        make(nn.Linear(2, 2))


def test_a_peak_that_was_changed_changed_the_device_for_everyone():
    rate = costs.devices()["a100"].rate(torch.float32)
    gm = _captured(lambda self, x: x.sin(), torch.ones(3))
    costs.devices()["a100"].peak["float32"] = 1
    costs.roofline(gm, "a100").device.peak["float32"] = 1
    assert costs.roofline(gm, "a100").device.rate(torch.float32) == rate


def test_numbers_of_numpy_were_no_numbers_to_devices_and_links():
    device = costs.Device("mine", {"float32": np.float32(2e12)}, np.int64(10**9), np.int64(10**9))
    assert device.rate(torch.float32) == np.float32(2e12)
    assert costs.Links.uniform(np.float32(1e9)).seconds(0, 1, np.int64(10**9)) == pytest.approx(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: costs.Links.matrix([[1, 2], [3]]),
        lambda: costs.Links.matrix([[0, 1], [1, 0]], latency="soon"),
        lambda: costs.Links.measured(["cpu:0", "meta"]),
        lambda: costs.Links.measured(["cpu:0", "cpu:1"], sizes=(1.5, 2)),
        lambda: costs.Links.uniform(1e9).seconds(0, 1, "5"),
    ],
)
def test_links_described_wrongly_were_raw_errors(make):
    with pytest.raises(CostError, match="SK322"):
        make()


def test_a_measured_op_on_a_conjugate_had_the_key_of_one_without():
    """`conj()` leaves a bit to whoever reads the tensor, and costs that reader a pass over it."""

    def twice(self, x):
        return x @ x, x.conj() @ x

    x = torch.randn(16, 16, dtype=torch.complex64)
    gm = _captured(twice, x)
    products = [n for n in gm.graph.nodes if n.target is torch.ops.aten.matmul.default]
    keys = [key_of(n, n.target, (v, x), {}) for n, v in zip(products, (x, x.conj()), strict=True)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda gm: costs.measured(gm, None, cache=False), "SK324.*NoneType"),
        (lambda gm: costs.measured(gm, torch.ones(3), None, cache=False), "SK321.*None"),
        (lambda gm: costs.measured(gm, torch.ones(3, device="meta"), cache=False), "SK324.*meta"),
    ],
)
def test_measuring_without_inputs_or_a_device_was_an_error_that_did_not_say_so(call, said):
    with pytest.raises(CostError, match=said):
        call(_captured(lambda self, x: x.sin(), torch.ones(3)))


def test_a_constant_of_a_captured_graph_was_measured_as_made_by_the_op_that_copies_it():
    """So the measured peak missed it where it lay before that op."""

    def forward(self, x):
        return (x @ torch.ones(16, 2000)).sum() + torch.tensor([1.0] * 1000)

    x = torch.ones(8, 16)
    gm = _captured(forward, x)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    simulated = sk.simulate_memory(gm)
    assert simulated.baseline == measured.baseline == 8 * 16 * 4 + 4000
    assert simulated.peak == measured.peak


class _Nothing(nn.Module):
    def forward(self, x, *, allocator=None):
        return x if allocator is None else x + allocator


def no_bytes():
    return _Nothing(), (torch.zeros(0),)


def an_input_called_allocator():
    return _Nothing(), (torch.zeros(3),), {"allocator": torch.zeros(3)}


@pytest.mark.parametrize("factory", [no_bytes, an_input_called_allocator])
def test_profile_divided_by_a_peak_of_0_and_took_an_input_for_its_own_option(factory, capsys):
    assert main(["profile", f"{__file__}:{factory.__name__}", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["predicted"] == row["measured"]
    assert row["error"] == 0


class _Views(nn.Module):
    """Of what the second part takes, two values are views of one memory, and one repeats a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        y = self.first(x)
        return self.second(y.view(-1).view(8, 64)) + self.second(y) + self.second(y[:1, :1].expand(8, 64))


def views_between_parts():
    return _Views(), (torch.randn(8, 16),)


def test_profile_measured_parts_on_copies_of_views_that_no_longer_shared_memory(capsys):
    policy = "ByName({'first': 0, 'second': 1, '*': 0})"
    words = ["profile", f"{__file__}:views_between_parts", "--policy", policy, "--on-cycle", "refine", "--json"]
    assert main([*words, "--forward-only"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) > 2
    assert [row["error"] for row in rows] == [0] * len(rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Upsample(size=[4, 4]), nn.Upsample(size=[512, 512])),
        (nn.Unflatten(1, [2, 8]), nn.Unflatten(1, [8, 2])),
        (
            nn.TransformerEncoderLayer(16, 2, activation=torch.tanh),
            nn.TransformerEncoderLayer(16, 2, activation=F.silu),
        ),
    ],
)
def test_modules_that_differ_in_a_list_or_a_function_had_one_measured_time(one, other):
    def key(module):
        graph = fx.Graph()
        x = graph.placeholder("x")
        return key_of(graph.call_module("m", (x,)), module, (torch.ones(1, 16, 16),), {})

    assert key(one) != key(other)
    assert key(one) == key(copy.deepcopy(one))
    assert is_lasting(key(one))


def test_the_products_of_transformers_experts_counted_as_random():
    import transformers.integrations.moe  # noqa: F401  (defines the op)

    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xwo"]
    node = graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, tuple(inputs))
    graph.output(node)
    assert node not in sk.analyze(fx.GraphModule(nn.Module(), graph)).once


class Held(nn.Module):
    """A leaf that splitkit does not know; it reaches a buffer in one of many ways."""

    def __init__(self, buffer, way, act):
        super().__init__()
        self.act = act
        if way == "list":
            self.reach = [buffer].__getitem__
        elif way == "dict":
            self.reach = {0: [buffer]}[0].__getitem__
        elif way == "closure":
            self.reach = lambda _: buffer
        else:
            GLOBALS["held"] = buffer
            self.reach = lambda _: GLOBALS["held"]

    def forward(self, x):
        return self.act(self.reach(0), x)


GLOBALS = {}
ACTS = {
    "writes": lambda held, x: (held.add_(1), x * 1)[1],
    "reads": lambda held, x: x + held,
    "resizes": lambda held, x: (held.data.mul_(3), x * 1)[1],
    "lends": lambda held, x: held,
}


def around_a_leaf(way, act, kind="buffer"):
    """An op that reads the buffer, the leaf, an op that writes it, an op that reads it again."""
    root = nn.Module()
    if kind == "buffer":
        root.register_buffer("held", torch.zeros(3))
    else:
        root.register_parameter("held", nn.Parameter(torch.zeros(3), requires_grad=False))
    root.leaf = Held(root.held, way, ACTS[act])
    graph = fx.Graph()
    x, y, held = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("held")
    early = graph.call_function(torch.add, (x, held))
    leaf = graph.call_module("leaf", (y,))
    middle = graph.call_function(torch.mul, (held, 2))
    write = graph.call_method("add_", (leaf if act == "lends" else held, 5))
    late = graph.call_function(torch.sub, (early, held))
    graph.output((early, leaf, middle, write, late))
    return root, fx.GraphModule(root, graph)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("act", list(ACTS))
@pytest.mark.parametrize("way", ["list", "dict", "closure", "global"])
def test_opaque_code_reached_a_buffer_by_another_way_than_its_arguments(way, act, kind):
    root, gm = around_a_leaf(way, act, kind)

    def run(module):
        root.held.data.zero_()
        return [v.tolist() for v in module(torch.ones(3), torch.zeros(3))]

    whole, nodes, right = run(gm), [n for n in gm.graph.nodes if n.op.startswith("call")], 0
    for labels in range(2 ** len(nodes)):
        where = {n: labels // 2**i % 2 for i, n in enumerate(nodes)}
        for options in ({}, {"parameters": "hoist", "on_cycle": "refine"}):
            try:
                made = sk.split(gm, where, **options)
            except sk.SplitError as error:
                assert error.code == "SK203" and "on_cycle" not in options
            else:
                assert run(made.module) == whole
                right += 1
    assert right >= 2 ** len(nodes)


def test_by_support_moved_ops_across_an_opaque_leaf_that_updates_a_buffer():
    from splitkit.policies import BySupport

    root, gm = around_a_leaf("list", "writes")
    whole = gm(torch.ones(3), torch.zeros(3))[4].tolist()
    root.held.zero_()
    made = sk.split(gm, BySupport(lambda n: n.op != "call_module"))
    assert made(torch.ones(3), torch.zeros(3))[4].tolist() == whole


def test_a_refusal_for_opaque_code_names_declare_and_declaring_lifts_it():
    class Harmless(nn.Module):
        def forward(self, x):
            return x * 1

    root = nn.Module()
    root.register_buffer("held", torch.zeros(3))
    root.leaf = Harmless()
    graph = fx.Graph()
    x, held = graph.placeholder("x"), graph.get_attr("held")
    first = graph.call_function(torch.add, (x, held))
    leaf = graph.call_module("leaf", (x,))
    graph.output((graph.call_function(torch.sub, (first, held)), leaf))
    gm = fx.GraphModule(root, graph)
    where = {"add": 0, "leaf": 1, "sub": 0}
    with pytest.raises(sk.SplitError, match=r"SK203(.|\n)*leaf(.|\n)*declare"):
        sk.split(gm, where)
    sk.ops.declare(Harmless)
    assert sk.split(gm, where)(torch.ones(3))[0].tolist() == [1.0] * 3


def test_opaque_code_without_attributes_orders_nothing_that_it_was_not_given():
    def opaque(x):
        return x * 1

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.sin, (x,))
    leaf = graph.call_function(opaque, (y,))
    graph.output((graph.call_function(torch.add, (first, x)), leaf))
    made = sk.split(fx.GraphModule(nn.Module(), graph), {"sin": 0, "opaque": 1, "add": 0})
    assert len(made.parts) == 2


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("fill", (5,)), ("put", ([0], [9.0])), ("sort", (0,)), ("partition", (0, 0)), ("setfield", (7.0, "f4")),
        ("itemset", (0, 1.0)), ("cumsum", (0, None, "itself")), ("clip", (0, 1, "itself")), ("round", (0, "itself")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["numpy", "asarray", "__array__"])
@pytest.mark.parametrize("between", ["nothing", "item", "reshape"])
def test_methods_of_numpy_were_taken_for_those_of_tensors(method, args, way, between):
    graph = fx.Graph()
    copied = graph.call_function(torch.clone, (graph.placeholder("x"),))
    array = graph.call_function(np.asarray, (copied,)) if way == "asarray" else graph.call_method(way, (copied,))
    if between == "item":
        array = graph.call_function(operator.getitem, (array, slice(None)))
    elif between == "reshape":
        array = graph.call_method("reshape", (array, (2, 2)))
    args = tuple(array if a == "itself" else a for a in args)
    graph.call_method(method, (array, *args))
    graph.output((graph.call_function(torch.mul, (copied, 1)),))
    gm = fx.GraphModule(nn.Module(), graph)
    where = {"clone": "A", "mul": "A"}
    with pytest.raises(sk.SplitError, match="SK203"):
        sk.split(gm, lambda n: where.get(n.name, "B"))


def two_inputs_one_written():
    root = nn.Module()
    root.register_buffer("buf", torch.zeros(3))
    graph = fx.Graph()
    x, y, buffer = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("buf")
    a = graph.call_function(torch.mul, (y, 1))
    graph.call_method("add_", (x, 10))
    r = graph.call_function(torch.sub, (a, y))
    graph.output((r, graph.call_function(torch.add, (r, buffer))))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", ["own", "hoist", "lazy", "split_module"])
def test_inputs_that_share_memory_gave_wrong_results_in_silence(make, copied):
    gm = two_inputs_one_written()
    where = {"mul": "A", "add_": "B", "sub": "A", "add": "A"}
    if make == "split_module":
        module = sk.split_module(gm, None, lambda n: where[n.name])
    elif make == "lazy":
        module = sk.split(gm, where, lazy=True).module
    else:
        module = sk.split(gm, where, parameters=make).module
    module = copied(module)
    t, buffer = torch.zeros(3), next(module.buffers())
    calls = [
        ((t, t), {}),
        ((), {"x": t, "y": t}),
        ((t, t.view(3)), {}),
        ((t, torch.from_numpy(t.numpy())), {}),
        ((buffer, t), {}),
    ]
    for args, kwargs in calls:
        with pytest.raises(sk.SplitError, match="SK212"):
            module(*args, **kwargs)
    assert module(torch.zeros(3), t)[0].tolist() == [0.0] * 3


def test_inputs_that_share_memory_are_fine_where_parts_keep_the_order_or_nothing_is_written():
    gm = two_inputs_one_written()
    made = sk.split(gm, {"mul": 0, "add_": 1, "sub": 2, "add": 2})
    t = torch.zeros(3)
    assert not made.module._forward_pre_hooks and made(t, t)[0].tolist() == [-10.0] * 3
    reads = fx.symbolic_trace(lambda x, y: (x + y) * torch.sin(x))
    module = sk.split(reads, {"add": 0, "sin": 1, "mul": 0}).module
    assert not module._forward_pre_hooks and torch.equal(module(t, t), reads(t, t))


def test_an_input_in_a_dict_that_is_a_buffer_which_batch_norm_writes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, given):
            early = given["mean"] * 1
            return self.norm(x), given["mean"] - early

    net = Net()
    gm = sk.capture(net, torch.randn(4, 3), {"mean": torch.zeros(3)})
    first = next(n for n in gm.graph.nodes if "mul" in n.name)
    last = next(n for n in gm.graph.nodes if "sub" in n.name)
    module = sk.split(gm, lambda n: "A" if n in (first, last) else "B").module
    assert module(torch.randn(4, 3), {"mean": torch.zeros(3)})[1].tolist() == [0.0] * 3
    with pytest.raises(sk.SplitError, match="SK212"):
        module(torch.randn(4, 3), {"mean": net.norm.running_mean})


class TiedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3) / 2)
        self.register_buffer("b", torch.ones(3))
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(torch.relu(x @ self.w + self.b) @ self.w * self.b))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.double().to_empty(device="cpu").float(),
        lambda m: copy.deepcopy(m).to_empty(device="cpu"),
        lambda m: pickle.loads(pickle.dumps(m)).to_empty(device="cpu"),
        lambda m: nn.Sequential(m).to_empty(device="cpu")[0],
        lambda m: (m.load_state_dict({k: torch.ones(v.shape) for k, v in m.state_dict().items()}, assign=True), m)[1],
        lambda m: (
            (s := nn.Sequential(m)).load_state_dict(
                {k: torch.ones(v.shape) for k, v in s.state_dict().items()}, assign=True
            ),
            m,
        )[1],
        lambda m: m.to_empty(device="cpu").share_memory(),
    ],
)
def test_a_tied_parameter_became_several(change, lazy):
    with torch.device("meta"):
        model = TiedInside()
    module = sk.split(fx.symbolic_trace(model), lambda n: n.name, lazy=lazy).module

    def groups(m):
        every = [*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)]
        names = {}
        for name, tensor in every:
            names.setdefault(id(tensor), []).append(name)
        return sorted(names.values())

    before = groups(module)
    assert any(len(names) > 1 for names in before)
    module = change(module)
    assert groups(module) == before
    assert {t.device.type for t in module.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda other, x, a, b, out: setattr(a, "args", (other, 1)),
        lambda other, x, a, b, out: setattr(b, "args", ([a, other],)),
        lambda other, x, a, b, out: setattr(b, "kwargs", {"dim": other}),
        lambda other, x, a, b, out: setattr(out, "args", ({"r": [a, other]},)),
        lambda other, x, a, b, out: setattr(a, "args", (x, slice(other, 1))),
        lambda other, x, a, b, out: setattr(a, "args", (b, 1)),
        lambda other, x, a, b, out: setattr(a, "args", (a, 1)),
    ],
)
def test_a_node_of_another_graph_ended_in_a_key_error(edit):
    graph, other = fx.Graph(), fx.Graph().placeholder("z")
    x = graph.placeholder("x")
    a = graph.call_function(torch.add, (x, 1))
    b = graph.call_function(torch.cat, ([a, x],))
    out = graph.output({"r": [a, b]})
    gm = fx.GraphModule(nn.Module(), graph)
    edit(other, x, a, b, out)
    for door in (sk.analyze, sk.capture, lambda m: sk.split(m, lambda n: 0), lambda m: sk.split_module(m, None, id)):
        with pytest.raises(GraphError, match="SK111"):
            door(gm)


def key_that(equals):
    return type("Key", (), {"__eq__": equals, "__hash__": lambda self: 1})


def _raise(*_):
    raise ValueError("no")


@pytest.mark.parametrize(
    "equals",
    [
        lambda *_: True,
        lambda _, o: o is None,
        lambda *_: np.array([True, False]),
        _raise,
        lambda _, o: isinstance(o, Exception),
    ],
)
@pytest.mark.parametrize("wrap", [lambda k: k, lambda k: (k, 0), lambda k: ("a", (k,))])
def test_keys_that_equal_everything_ended_in_stop_iteration(equals, wrap):
    gm = fx.symbolic_trace(lambda x: torch.relu(torch.sin(x) + 1))
    kind = key_that(equals)
    single = wrap(kind())
    sane = equals(None, 0) is False and equals(None, None) is False if equals is not _raise else False
    for callback in (lambda n: wrap(kind()), lambda n: single if n.name == "add" else 0):
        for door in (lambda: sk.split(gm, callback), lambda: sk.split_module(gm, None, callback)):
            try:
                door()
            except sk.SplitError as error:
                assert error.code == ("SK203" if sane else "SK211")
            else:
                assert sane


@pytest.mark.parametrize(
    "make",
    [
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.ops.aten.zeros_like.default,
        torch.ops.aten.empty_like, "new_zeros", "new_empty", torch.ops.aten.new_empty.default, "size", "dim", "numel",
        getattr,
    ],
)  # fmt: skip
def test_what_reads_a_size_was_taken_for_a_reader_of_memory(make):
    def graph_with(write):
        graph = fx.Graph()
        value = graph.call_function(torch.neg, (graph.placeholder("x"),))
        written = graph.call_method(
            write, (value, *((1,) if write == "add_" else (0,) if write == "unsqueeze_" else ()))
        )
        more = ([2],) if "new" in str(make) else ("shape",) if make is getattr else ()
        asked = (graph.call_method if isinstance(make, str) else graph.call_function)(make, (value, *more))
        asked.name = "asked"
        graph.output((written, asked))
        return fx.GraphModule(nn.Module(), graph), {"neg": 0, write: 1, "asked": 0}

    gm, where = graph_with("add_")
    assert len(sk.split(gm, where).parts) == 2
    assert sk.split_module(gm, None, lambda n: where[n.name])(torch.ones(2))[0].tolist() == [0.0, 0.0]
    if make is not getattr:  # a shape that nobody else reads is asked again where it is wanted
        gm, where = graph_with("unsqueeze_")  # which changes the size
        with pytest.raises(sk.SplitError, match="SK203"):
            sk.split(gm, where)
