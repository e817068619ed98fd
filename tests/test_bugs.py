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


def test_a_pipe_of_torchs_pipelining_gave_a_tensor_whose_first_row_was_taken_for_the_output(monkeypatch):
    from torch.distributed.pipelining import _IR, SplitPoint, pipeline

    monkeypatch.setattr(_IR, "split_module", sk.split_module)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(5, 4)
    expected = model(x)
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    out = pipe(x)
    assert type(out) is tuple and len(out) == 1
    torch.testing.assert_close(out[0], expected)
# ---------------------------------------------------------------- what capture loses, and models as people call them


class _Scaled(torch.autograd.Function):
    """A backward that is not that of its forward."""

    @staticmethod
    def forward(ctx, x, by=100.0):
        ctx.by = by
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.by, None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(x, w, k=2):
        return x @ w, (x @ w).relu() * k, None

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, a, b, _):
        x, w = ctx.saved_tensors
        return a @ w.t() + 3 * b, x.t() @ b, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 7


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        ctx.mask = (torch.rand_like(x) > options["p"]).float()
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask * 5, None


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


class _Net(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(4, 4), nn.Linear(4, 4), f

    def forward(self, x):
        return self.b(self.f(self, self.a(x))).sum()


def _checkpointed(net, h):
    return torch.utils.checkpoint.checkpoint(lambda t: _Scaled.apply(net.b(t)), h, use_reentrant=False)


def _reentrant(net, h):
    return torch.utils.checkpoint.checkpoint(lambda t: net.b(t).tanh(), h, use_reentrant=True)


_BACKWARDS = {
    "scaled": lambda net, h: _Scaled.apply(h, 3.0),
    "pair": lambda net, h: sum(_Pair.apply(h, net.a.weight)[:2]),
    "in_place": lambda net, h: _InPlace.apply(h * 1),
    "noisy": lambda net, h: _Noisy.apply(h, {"p": 0.5}),
    "checkpointed": _checkpointed,
    "reentrant": _reentrant,
}


@pytest.mark.parametrize("name", _BACKWARDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_capture_lost_custom_backwards(name, dynamic):
    net, x = _Net(_BACKWARDS[name]), torch.randn(4, 4)
    gm = sk.capture(net, x, dynamic=dynamic)
    sk.compare(net, gm, x).raise_if_different()
    sk.compare(net, sk.split(gm, sk.policies.RoundRobin(3), on_cycle="refine"), x).raise_if_different()
    sk.compare(net, copy.deepcopy(gm), x).raise_if_different()


def test_symbolic_trace_lost_custom_backwards():
    net, x = _Net(_BACKWARDS["scaled"]), torch.randn(4, 4)
    gm = sk.capture(net, x, how="symbolic_trace")
    sk.compare(net, gm, x).raise_if_different()


def test_a_kept_function_says_what_its_forward_does():
    gm = sk.capture(_Net(_BACKWARDS["in_place"]), torch.randn(4, 4))
    node = next(n for n in gm.graph.nodes if n.name.startswith("_inplace"))
    effects = sk.ops.effects_of(node, gm)
    assert [n.name for n in effects.writes] == ["mul"] and effects.known and not effects.random
    noisy = sk.capture(_Net(_BACKWARDS["noisy"]), torch.randn(4, 4))
    effects = sk.ops.effects_of(next(n for n in noisy.graph.nodes if n.name.startswith("_noisy")), noisy)
    assert effects.random and not effects.writes and not effects.aliases


def test_a_function_that_no_node_can_call_is_refused_with_its_line():
    x = torch.randn(4, 4)
    with pytest.raises(sk.CaptureError, match=r"(?s)SK404: the backward of _Through .*a Linear.*test_bugs.py:\d+"):
        sk.capture(_Net(lambda net, h: _Through.apply(h, net.b)), x)

    def closes_over(net, h):
        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t * h

            @staticmethod
            def backward(ctx, g):
                return g

        return Inner.apply(h * 2)

    with pytest.raises(sk.CaptureError, match=r"SK404: .*closes over"):
        sk.capture(_Net(closes_over), x)
    with pytest.raises(sk.CaptureError, match=r"SK404: .*torch.func"):
        sk.capture(_Net(lambda net, h: torch.vmap(lambda t: _Pair.apply(t[None], net.a.weight)[0])(h)), x)
    quiet = _Net(lambda net, h: torch.no_grad()(_Through.apply)(h, net.b) + h)  # no gradient, nothing to lose
    sk.compare(quiet, sk.capture(quiet, x), x).raise_if_different()


def test_capture_lost_hooks_on_gradients():
    def hooked(net, h):
        h = h * 1
        h.register_hook(lambda g: g * 2)
        return h

    def packed(net, h):
        with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda t: t):
            return h.sin()

    x = torch.randn(4, 4)
    for f in (hooked, packed):
        with pytest.raises(sk.CaptureError, match=r"(?s)SK405.*test_bugs.py:\d+"):
            sk.capture(_Net(f), x)
    net = _Net(lambda net, h: h)
    handle = net.a.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    with pytest.raises(sk.CaptureError, match=r"SK405: a \(Linear\) has a backward hook"):
        sk.capture(net, x)
    handle.remove()
    sk.compare(net, sk.capture(net, x), x).raise_if_different()


def test_compare_blames_the_step_that_differs():
    net, x = _Net(_BACKWARDS["scaled"]), torch.randn(4, 4)
    program = torch.export.export(net, (x,))  # without the backward
    found = sk.compare(net, sk.split(sk.capture(program), sk.policies.Stages(2)), x)
    assert found.wrong_step == "capture" and found.steps["split"].same
    assert len(str(found).splitlines()) < 12 and "the capture changed it" in str(found)
    with pytest.raises(sk.errors.CheckError, match=r"SK702(?s:.*)gradient of a.weight"):
        found.raise_if_different()

    made = sk.split(sk.capture(net, x), sk.policies.Stages(2))
    part = next(iter(made.parts.values()))
    part.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0].args[0].replace_all_uses_with
    node = part.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    with part.graph.inserting_after(node):
        doubled = part.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
    node.replace_all_uses_with(doubled, lambda user: user is not doubled)
    part.recompile()
    found = sk.compare(net, made, x)
    assert found.wrong_step == "split"
    with pytest.raises(sk.errors.CheckError, match="SK701"):
        found.raise_if_different()

    fickle = _Net(lambda net, h: h * next(net.count))
    fickle.count = itertools.count(1)
    found = sk.compare(fickle, sk.split(sk.capture(fickle, x), sk.policies.Stages(2)), x)
    assert found.wrong_step == "model"
    with pytest.raises(sk.errors.CheckError, match="SK703"):
        found.raise_if_different()


def test_a_comparison_prints_a_few_lines():
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), torch.randn(2, 4)
    found = sk.compare(net, sk.capture(net, x), x)
    assert str(found).startswith("same: 1 outputs, 40 gradients") and len(str(found)) < 200
    assert len(str(sk.compare(net, nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), x)).splitlines()) == 10


class _Object:
    def __init__(self, h):
        self.h, self.more, self.note = h, [h * 2, {"k": h + 1}], "kept"


class _Slots:
    __slots__ = ("inner", "size")

    def __init__(self, h):
        self.inner, self.size = _Object(h), h.shape


class _Items(dict):
    pass


class _Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        return self.kind(self.linear(x))


@pytest.mark.parametrize(
    "kind", [_Object, _Slots, lambda h: _Items(a=h), lambda h: (torch.distributions.Cauchy(h, 1, False),)]
)
def test_an_output_of_a_class_that_nobody_registered_was_refused(kind):
    model, x = _Returns(kind), torch.randn(2, 4)
    gm = sk.capture(model, x)
    made = sk.split(gm, sk.policies.Stages(2))
    assert type(made(x)) is type(model(x))
    sk.compare(model, made, x).raise_if_different()
    sk.compare(model, copy.deepcopy(gm), x).raise_if_different()


def test_an_output_registered_without_paths_could_not_be_compared():
    class Out:
        def __init__(self, h):
            self.h = h

    torch.utils._pytree.register_pytree_node(Out, lambda o: ([o.h], None), lambda leaves, _: Out(*leaves))
    model, x = _Returns(Out), torch.randn(2, 4)
    made = sk.split(sk.capture(model, x), sk.policies.Stages(2))
    sk.compare(model, made, x).raise_if_different()
    assert not sk.compare(model, _Returns(Out), x).same


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["gpt_neox", "opt", "bart", "qwen3"])
def test_a_transformers_model_that_returns_its_cache_was_refused(family, training):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "ffn_dim", "word_embed_proj_dim"), 16),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
        **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_attention_heads"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
        **{"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    auto = transformers.AutoModelForSeq2SeqLM if family == "bart" else transformers.AutoModelForCausalLM
    model, ids = auto.from_config(config).train(training), torch.randint(3, 40, (2, 6))
    gm = sk.capture(model, input_ids=ids, labels=ids)
    made = sk.split(gm, sk.policies.Stages(2))
    result = made(input_ids=ids, labels=ids)
    assert type(result.past_key_values).__name__ in ("DynamicCache", "EncoderDecoderCache")
    assert result.past_key_values.get_seq_length() == 6
    sk.compare(model, made, input_ids=ids, labels=ids).raise_if_different()


def test_requires_grad_of_an_input_was_refused():
    class Audio(nn.Module):
        def __init__(self, prepare, frozen=False):
            super().__init__()
            self.embed, self.linear, self.prepare = nn.Linear(4, 4), nn.Linear(4, 4), prepare
            self.embed.requires_grad_(not frozen)

        def forward(self, x):
            return self.linear(self.prepare(self, x).tanh()).sum()

    def flagged(h):
        h.requires_grad = True
        return h

    x = torch.randn(2, 4)
    for model in (
        Audio(lambda m, x: flagged(x)),
        Audio(lambda m, x: flagged(x[None])),
        Audio(lambda m, x: (x / 255).requires_grad_()),
        Audio(lambda m, x: m.embed(x).requires_grad_()),
        Audio(lambda m, x: m.embed(x).requires_grad_(), frozen=True),
        Audio(lambda m, x: x + torch.zeros(4).requires_grad_(requires_grad=True)),
    ):
        sk.compare(model, sk.capture(model, x), x).raise_if_different()
    for prepare in (
        lambda m, x: m.embed(x).detach().requires_grad_(),
        lambda m, x: x * m.embed.weight.data.sum().requires_grad_(),
    ):
        with pytest.raises(sk.CaptureError, match=r"(?s)SK401: the model calls requires_grad_.*test_bugs.py:\d+"):
            sk.capture(Audio(prepare), x)


class _Lazily(nn.Module):
    """Changes itself at its first call."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.seen, self.mask = nn.Linear(4, 4), how, False, None

    def forward(self, x):
        if not self.seen:
            self.seen = True
            if self.how == "parameter":
                self.scale = nn.Parameter(torch.full((4,), 2.0))
            elif self.how == "buffer":
                self.register_buffer("scale", torch.full((4,), 2.0))
            elif self.how == "attribute":
                self.scale = torch.full((4,), 2.0)
            else:
                self.linear = nn.Linear(4, 4)
        return (self.linear(x) * getattr(self, "scale", 1.0)).sum()


@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute", "module"])
def test_a_model_that_was_never_called_is_called_once(how):
    model, x = _Lazily(how), torch.randn(2, 4)
    before = torch.get_rng_state()
    gm = sk.capture(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    tensors = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    assert not any("Fake" in type(t).__name__ for t in (*tensors, *model.parameters(), *model.buffers()))
    sk.compare(model, gm, x).raise_if_different()
    joint = sk.capture_joint(_Lazily(how), x)
    assert joint.run(x).gradients


def test_capture_joint_of_a_transformers_model_that_was_never_called():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2])
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=4)
    model = transformers.SegformerForSemanticSegmentation(config)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "labels": torch.randint(0, 4, (1, 32, 32))}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    joint = sk.capture_joint(model, **inputs)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert joint.run(**inputs).loss.isfinite()


def test_a_failed_capture_left_fake_tensors_in_the_model():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), []

        def forward(self, x):
            self.kept.append(self.linear(x))
            return x if x.sum() > 0 else -x

    model = Keeps()
    with pytest.raises(sk.CaptureError, match="SK401"):
        sk.capture(model, torch.randn(2, 4))
    assert not any("Fake" in type(t).__name__ for t in model.kept)


def test_the_advice_of_sk401_is_what_helps():
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            if self.training and torch.rand(()) < 0.1:  # layer drop
                return x
            return h

    x, model = torch.randn(2, 4), Trains()
    with pytest.raises(sk.CaptureError, match=r"model.eval\(\) first") as caught:
        sk.capture(model, x)
    assert model.training and model.linear.training
    assert "symbolic_trace" not in caught.value.remedy and "strict" not in caught.value.remedy
    sk.capture(model.eval(), x)
    with pytest.raises(sk.CaptureError, match="Called without capture, the model raises RuntimeError: mat1"):
        sk.capture(nn.Linear(4, 4), torch.randn(2, 3))
    with pytest.raises(sk.CaptureError, match="Call the model once on real inputs"), torch.device("meta"):
        sk.capture(Trains(), torch.randn(2, 4))
