"""One test a bug, named after it: bugs of splitkit that were found and mended."""

from __future__ import annotations

import copy
import operator
import pickle
import threading

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import splitkit as sk
from splitkit import _torch
from splitkit.costs import unit
from splitkit.errors import GraphError
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
