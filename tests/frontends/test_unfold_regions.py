"""Inlined regions compute what the region ops computed, and leave the ambient state as it was."""

import copy

import pytest
import torch
from torch import fx, nn

from splitkit import _torch
from splitkit.engine.split import split
from splitkit.frontends.capture.unfold_regions import WRAP_GRAD, inline_regions, is_wrapped
from splitkit.frontends.joint_capture import capture
from splitkit.graph import scope
from splitkit.graph.dataflow import analyze
from splitkit.plans.record import Plan
from splitkit.policies import RoundRobin, Stages
from splitkit.testing import assert_same, models
from splitkit.view.data.report import report


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
        return self.a(x) * y


class Nested(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                z = self.a(y)
            with torch.enable_grad():
                w = self.a(z.float())
        return w + y


class Whole(NoGrad):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            left, right = self.a(x).split([1, 3], 1)
            with torch.autocast("cpu", enabled=False):
                exact = self.a(x)
        return left, right, exact, x


class Cond(NoGrad):
    def forward(self, x):
        with torch.no_grad():
            y = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
        return self.a(y)


class Counts(NoGrad):
    """A region that is only there for what it writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0))
        return y * self.mean


MODELS = [NoGrad, Nested, Whole, Counts]


def run(model, x):
    model.zero_grad()
    out = torch.utils._pytree.tree_leaves(model(x))
    loss = sum(o.float().square().sum() for o in out)
    if loss.requires_grad:
        loss.backward()
    return out, {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def gm_with_region_ops(model, x):
    return torch.export.export(model, (x,), strict=False).module()


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients(kind):
    model, x = kind(), torch.randn(3, 4)
    gm = capture(copy.deepcopy(model), x)
    assert not any(is_wrapped(node) for node in gm.graph.nodes)
    (want, want_grads), (got, got_grads) = run(model, x), run(gm, x)
    assert len(want) == len(got) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert want_grads.keys() == got_grads.keys()
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad)
    for (name, mine), (_, theirs) in zip(model.named_buffers(), gm.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert [o.requires_grad for o in got] == [o.requires_grad for o in want]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("grad", [True, False])
def test_ambient_state_is_left_alone(kind, grad):
    x = torch.randn(3, 4)
    gm = capture(kind(), x)
    with torch.set_grad_enabled(grad):
        gm(x)
        assert torch.is_grad_enabled() is grad
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", MODELS)
def test_scopes_read_the_regions(kind):
    gm = capture(kind(), torch.randn(3, 4))
    scopes, final = scope.scopes(gm.graph)
    assert final == scope.NEUTRAL
    assert any(s != scope.NEUTRAL for s in scopes.values())


def outer_region(body):
    """A graph whose one node runs ``body`` without gradients."""
    root, graph = nn.Module(), fx.Graph()
    root.body, root.true_graph_0 = body, nn.Identity()  # a name that the body's branch would like to have
    x = graph.placeholder("x")
    graph.output(graph.call_function(WRAP_GRAD, (False, graph.get_attr("body"), x)))
    return fx.GraphModule(root, graph)


def test_autocast_ends_where_its_block_ends():
    gm = inline_regions(gm_with_region_ops(Nested(), torch.randn(3, 4)))
    entered, ended = (
        gm.graph.find_nodes(op="call_function", target=target)
        for target in (_torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST)
    )
    assert entered and [node.args[0] for node in ended] == entered


def test_an_empty_region_leaves_nothing():
    empty = fx.Graph()
    empty.output((empty.placeholder("x"),))
    gm = inline_regions(outer_region(fx.GraphModule(nn.Module(), empty)))
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]


def test_meta_of_the_body_is_kept_and_the_body_is_gone():
    x = torch.randn(3, 4)
    gm = capture(Nested(), x)
    assert [name for name, _ in gm.named_children()] == ["a"]
    linears = [n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(linears) == 3
    assert [n.meta["val"].dtype for n in linears] == [torch.float32, torch.bfloat16, torch.float32]
    for node in linears:
        assert {"val", "nn_module_stack", "stack_trace"} <= node.meta.keys()


def test_a_body_with_branches_keeps_them_under_free_names():
    x = torch.randn(3, 4)
    body = capture(Cond(), x)
    body.graph.set_codegen(fx.graph.CodeGen())  # bodies take and return flat tuples
    body.recompile()
    gm = outer_region(body)
    (want,) = gm(x)
    inline_regions(gm)
    assert torch.equal(gm(x)[0], want)
    (cond,) = [n for n in gm.graph.nodes if n.target is torch.ops.higher_order.cond]
    for branch in cond.args[1:3]:
        assert isinstance(gm.get_submodule(branch.target), fx.GraphModule)


def test_a_body_that_two_calls_share():
    class Twice(NoGrad):
        def forward(self, x):
            with torch.no_grad():
                x = x + 1
            return self.a(x)

    x = torch.randn(3, 4)
    gm = gm_with_region_ops(Twice(), x)
    (wrapped,) = [n for n in gm.graph.nodes if is_wrapped(n)]
    with gm.graph.inserting_before(next(iter(wrapped.users))):  # a second call of the same body
        again = gm.graph.node_copy(wrapped, lambda n: n)
    reader = next(iter(wrapped.users))
    reader.args = (again, 0)
    want = gm(x)
    assert inline_regions(gm) is gm
    assert torch.equal(gm(x), want)
    assert len([n for n in gm.graph.nodes if n.target is torch.is_grad_enabled]) == 2


@pytest.mark.parametrize("kind", [*MODELS, Cond])
def test_a_graph_that_was_exported_elsewhere_is_opened_in_a_copy(kind):
    model, x = kind(), torch.randn(3, 4)
    gm = gm_with_region_ops(model, x)
    before = gm.print_readable(print_output=False, include_stride=False)
    opened = capture(gm)
    assert gm.print_readable(print_output=False, include_stride=False) == before
    assert not any(is_wrapped(node) for node in opened.graph.nodes)
    assert len(opened.graph.nodes) >= len(gm.graph.nodes) and opened.meta == gm.meta
    assert {id(p) for p in opened.parameters()} == {id(p) for p in model.parameters()}
    assert_same(gm, opened, x, tolerance=1e-2)
    assert_same(gm, split(opened, RoundRobin(3)), x, tolerance=1e-2)
    with pytest.raises(AssertionError, match="Guard failed"):  # its checks of inputs came along
        opened(torch.randn(3, 5))


def test_a_report_tells_of_nodes_that_are_hidden():
    gm = gm_with_region_ops(Whole(), torch.randn(3, 4))
    plan = Plan.of(dict.fromkeys(analyze(gm).nodes, 0), note="one part")
    assert report(gm, plan).note.startswith("one part; 2 nodes are hidden ")
    assert "splitkit.capture(gm)" in report(gm, plan).note
    opened = capture(gm)
    assert report(opened, Plan.of(dict.fromkeys(analyze(opened).nodes, 0))).note == ""


def test_an_exported_program_keeps_its_bodies():
    program = torch.export.export(Nested(), (torch.randn(3, 4),), strict=False)
    bodies = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    before = [m.code for m in bodies]
    capture(program)
    capture(program.module())
    assert len(bodies) > 2 and [m.code for m in bodies] == before


def test_a_language_model_under_autocast_that_was_exported_elsewhere_can_be_split():
    example = models.build("llama", layers=2, width=32, heads=4, vocab=64, batch=2, seq=8)

    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = example.model

        def forward(self, input_ids):
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(input_ids, use_cache=False).logits

    ids = example.kwargs["input_ids"]
    gm = torch.export.export(Autocast(), (ids,), strict=False).module()
    computed = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    assert len(computed) < 20
    opened = capture(gm)
    flow = analyze(opened)
    assert len(flow.nodes) > 150
    made = split(opened, Stages(4))
    assert len(made.parts) == 4
    assert_same(gm, made, ids, tolerance=5e-2)


def test_a_result_that_is_used_as_a_tuple():
    x = torch.randn(3, 4)
    gm = gm_with_region_ops(Whole(), x)
    (wrapped,) = [n for n in gm.graph.nodes if is_wrapped(n)]
    output = gm.graph.output_node()
    output.args = ((wrapped, *output.args[0][1:]),)
    gm.graph.eliminate_dead_code()
    inline_regions(gm)
    assert isinstance(gm.graph.output_node().args[0][0], tuple)


def test_a_graph_without_regions_is_not_touched():
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    nodes = list(gm.graph.nodes)
    assert list(inline_regions(gm).graph.nodes) == nodes
