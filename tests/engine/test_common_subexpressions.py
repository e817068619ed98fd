"""Common subexpressions: what merges, what stays apart, and values that still say who shares memory."""

from __future__ import annotations

import math

import pytest
import torch
from campaigns import these_first
from smallnets import loss_or_sum
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from splitkit.engine.common_subexpressions import deduplicate
from splitkit.frontends.aot import joint_flow
from splitkit.frontends.compile.compile import apply, backend
from splitkit.frontends.joint_capture import _copied, capture_joint
from splitkit.graph.dataflow import analyze
from splitkit.graph.fake_runs import values_again
from splitkit.graph.storages import storage_key, tensors
from splitkit.policies import RecomputeAll, SaveAll
from splitkit.testing.models import build
from splitkit.training.flow import JointFlow

TINY = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "batch": 2, "seq": 8}


def merged(function, *args):
    """The names of the ops that are left of a function of one half."""
    gm = make_fx(lambda *given: (function(*given),), tracing_mode="fake")(*args)
    flow = JointFlow.of(analyze(gm), [], 1, [])
    before = list(gm.graph.nodes)
    result = deduplicate(flow)
    assert list(gm.graph.nodes) == before, "the graph itself stays as it is"
    torch.testing.assert_close(result(*args)[0], function(*args), rtol=0, atol=0, equal_nan=True)
    return [n.name for n in result.graph.nodes if n.op == "call_function"]


def count(gm, name):
    return sum(str(n.target).startswith(name) for n in gm.graph.nodes)


X = torch.randn(4, 4)


def test_equal_ops_on_equal_inputs_are_one():
    assert merged(lambda x: (x.sin() + x.sin()) * (x.sin() + x.sin()), X) == ["sin", "add", "mul"]


def test_members_of_equal_tuples_are_one():
    left = merged(lambda x: x.max(0)[0] + x.max(0)[0] + x.max(0)[1], X)
    assert sorted(name.rstrip("_0123456789") for name in left) == ["add", "add", "getitem", "getitem", "max"]


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("mul", lambda x: x.mul(1.0).sum() + x.mul(1).sum()),
        ("mul", lambda x: x.mul(0.0).reciprocal() - x.mul(-0.0).reciprocal()),
        ("sum", lambda x: x.sum(0) + x.sum(1)),
        ("rand_like", lambda x: torch.rand_like(x).mul(0) + torch.rand_like(x).mul(0)),
        ("bernoulli", lambda x: torch.bernoulli(x.sigmoid()).mul(0) + torch.bernoulli(x.sigmoid()).mul(0)),
    ],
    ids=["types", "signs", "arguments", "random", "drawn"],
)
def test_what_differs_stays_apart(op, function):
    assert sum(name.rstrip("_0123456789") == op for name in merged(function, X)) == 2


def test_equal_constants_merge_even_if_they_are_no_numbers():
    assert merged(lambda x: x.add(math.nan).sin() + x.add(math.nan).sin(), X) == ["add", "sin", "add_2"]


def test_what_is_written_stays_apart():
    def function(x):
        one, other = x.clone(), x.clone()
        one.add_(1)
        return one + other + x.clone()

    left = merged(function, X)
    assert "clone" in left and "clone_1" in left

    def rereads(x):
        y = x.clone()
        before = y.sin()
        y.add_(1)
        return before + y.sin()

    assert {"sin", "sin_1"} <= set(merged(rereads, X))


def test_outputs_keep_memory_of_their_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = (nn.Parameter(torch.ones(3)) for _ in range(2))

        def forward(self, x):
            return (x * self.w).sin(), (x * self.w).sin(), (self.w + self.v).sum()

    model = Twice()
    x = torch.randn(3)
    one, other, total = apply(model, SaveAll(), x)(x)
    with torch.no_grad():
        expected = other.clone()
        one.add_(1)
    assert torch.equal(other, expected)
    (total + other.sum()).backward()
    assert model.w.grad.data_ptr() != model.v.grad.data_ptr()


def test_halves_are_not_mixed():
    """Backward computes the cast again, as eager autograd does: a policy may still choose."""

    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.double().sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (grad * x.double().cos()).float()

    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (Cast.apply(y) + Cast.apply(y)).sum()

    joint = capture_joint(Model(4, 4), X, loss=loss_or_sum)
    assert count(joint.graph_module, "aten.cos") == 1
    (product,) = (n for n in joint.graph_module.graph.nodes if n.name == "addmm")
    assert [n.name for n in product.users] == ["_to_copy", "_to_copy_3"], "one cast in each half, for both calls"


def test_checkpoints_keep_what_is_theirs():
    class Model(nn.Linear):
        def forward(self, x):
            once = torch.sin(x)
            return (checkpoint(lambda t: torch.sin(t) * 2, x, use_reentrant=False) + super().forward(once)).sum()

    joint = capture_joint(Model(4, 4), X.clone().requires_grad_(), loss=loss_or_sum)
    assert count(joint.graph_module, "aten.sin") == 2


def _same_memory(gm: fx.GraphModule):
    """Whether the values of a graph share memory just as on a run of it."""
    there, back = {}, {}
    for node, value in values_again(gm).items():
        for one, other in zip(tensors(node.meta["val"]), tensors(value), strict=True):
            one, other = storage_key(one), storage_key(other)
            assert there.setdefault(one, other) == other and back.setdefault(other, one) == one, node.name


@pytest.mark.parametrize("name", these_first(["llama"], ["t5", "gpt2", "mixtral"]))
def test_models_compute_their_masks_once(name, monkeypatch):
    made = build(name, **TINY)
    short = capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum)
    monkeypatch.setattr("splitkit.frontends.aot.deduplicate", lambda flow: _copied(flow.root))
    whole = capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum)
    assert count(short.graph_module, "aten.where.self") < count(whole.graph_module, "aten.where.self")
    _same_memory(short.graph_module)
    twins = deduplicate(joint_flow(short.graph_module, short.signature.forward_outputs))
    assert len(twins.graph.nodes) == len(short.graph_module.graph.nodes), "once is enough"
    results = []
    for joint in (short, whole):
        torch.manual_seed(3)
        results.append(joint.run(*made.args, **made.kwargs))
    assert torch.equal(results[0].loss, results[1].loss)
    for name, gradient in results[0].gradients.items():
        assert torch.equal(gradient, results[1].gradients[name]), name


def test_symbolic_sizes_gain_no_guards():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            a, b = y.sin().view(-1), y.sin().view(-1)
            return (a[1:] * b[:-1]).sum() + b.view(-1, 2).sum(0)[0]

    model = Net(4, 4)
    for policy in (SaveAll(), RecomputeAll()):
        torch._dynamo.reset()
        divided = backend(policy)
        compiled = torch.compile(model, backend=divided)
        for rows in (4, 6, 8, 9):
            x = torch.randn(rows, 4)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(_gradient(model, compiled, x), _gradient(model, model, x))
        assert len(divided.pairs) == 1, "compiled once for all sizes"
        assert count(divided.pairs[0].forward, "aten.sin") == 1


def _twice_unique(x):
    first, second = ((x.detach() * 2).round().unique() for _ in range(2))
    return (x.sum() * first).sin().sum() + (x.sum() * second).cos().sum()


def _twice_an_item(x):
    first, second = ((x.detach() > 0).sum().item() for _ in range(2))
    return ((x * first).sin() + (x * second).cos()).sum()


APART = {_twice_unique: [2, 0, 3], _twice_an_item: [0, 1, 3]}


@pytest.mark.parametrize(
    ("function", "inner"),
    these_first(
        [(_twice_unique, "eager"), (_twice_an_item, "eager")],
        [(_twice_unique, "inductor"), (_twice_an_item, "inductor")],
    ),
)
def test_what_only_the_data_decides_is_not_merged(function, inner):
    """Inductor would see two ops bind one symbol: the ops before those, of which one was read twice, stay two."""
    torch._dynamo.reset()
    divided = backend(SaveAll(), inner)
    patch = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(patch):
        given = [torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
        for x, call in zip(given, (function, torch.compile(function, backend=divided)), strict=True):
            call(x).backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)
    assert [count(divided.pairs[0].forward, op) for op in ("aten.round", "aten.gt", "aten.sum")] == APART[function]


def _gradient(model, call, x):
    model.zero_grad()
    call(x).backward()
    return model.weight.grad.clone()
