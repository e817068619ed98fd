"""The door to AOTAutograd against eager: every hard case under every policy that divides forward from backward."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from campaigns import every_third, some_of_all, these_first
from smallnets import loss_or_sum
from torch import nn
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from splitkit.costs import unit
from splitkit.engine.pair import divide
from splitkit.errors import CycleError, PlanError, PolicyError
from splitkit.frontends.aot import joint_flow, partition_fn
from splitkit.frontends.compile.compile import apply, backend
from splitkit.frontends.joint_capture import capture_joint
from splitkit.graph.ops import effects_of
from splitkit.plans.record import Plan
from splitkit.policies import Budget, MinCut, Precompute, RecomputeAll, Remat, SaveAll
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan


class Early:
    """Forward computes all that needs no gradient, also what eager autograd computes in backward."""

    def assign(self, flow, costs):
        late, plan = set(flow.backward_inputs), save_all_plan(flow)
        for node in flow.index:
            if any(read in late for read in node.all_input_nodes):
                late.add(node)
        return plan.place({n: (FORWARD,) for n in plan if n not in late and n not in flow.once})


POLICIES = {
    "SaveAll": SaveAll(),
    "RecomputeAll": RecomputeAll(),
    "Remat": Remat(["aten.mm", "aten.sin"]),
    "rule": Remat(lambda node: len(node.name) % 2),
    "Early": Early(),
    "MinCut": MinCut(),
    "fewest bytes": MinCut(0.0),
    "Precompute": Precompute(),
    "Budget": Budget(1.0),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CASES = {}


BREAKS = ("metadata_mutation", "data_and_metadata_mutation")
"""Dynamo runs these lines itself, between two graphs."""


def case(*shapes, prepare=lambda *leaves: leaves, module=None, grads=True, dynamic=None):
    """Registers a function with the shapes of its leaves; ``prepare`` makes the arguments of them."""

    def register(function):
        CASES[function.__name__] = (function, shapes, prepare, module, grads, dynamic)
        return function

    return register


def clones(*leaves):
    return tuple(leaf.clone() for leaf in leaves)


@case((3, 4))
def plain(x):
    return (x.sin() * x.cos()).exp()


@case((3, 4), (3, 4), grads=(True, False))
def mutated_without_grad(x, y):
    y.mul_(2)
    return x * y.clone()


@case((3, 4), prepare=clones)
def mutated_non_leaf(x):
    x.mul_(2)
    return x.sin()


@case((3, 4), prepare=clones)
def mutated_and_not_returned(x):
    x.mul_(3).sin_()
    return (x + 1).cos()


@case((4, 4), prepare=clones)
def mutated_view_of_input(x):
    x[1].add_(1)
    x.view(-1)[::2].mul_(2)
    return x.sin()


@case((3, 4))
def mutated_leaf_under_no_grad(x):
    y = x.sin()
    with torch.no_grad():
        y.add_(1)
    return y * 2


@case((3, 4), (3, 4), grads=(True, False))
def buffer_read_and_then_updated(x, buffer):
    scale = (buffer * 2).cos()
    with torch.no_grad():
        buffer.add_(1)
    return x * scale


@case((4, 4), (4, 4), grads=(True, False))
def buffer_read_through_a_view_and_then_updated(x, buffer):
    scale = buffer.t()[1:].exp()
    y = x[1:] * scale
    buffer.mul_(0.5)
    return y.sin()


@case((4, 4), (4, 4), grads=(True, False))
def buffer_updated_read_and_updated(x, buffer):
    buffer.add_(1)
    scale = buffer.exp()
    buffer.copy_(x.detach())
    return x.sin() * scale


@case((3, 4), prepare=clones)
def metadata_mutation(x):
    x.t_()
    return x.sin()


@case((3, 4), prepare=clones)
def data_and_metadata_mutation(x):
    x.mul_(2)
    x.unsqueeze_(0)
    return x.cos()


@case((3, 4), (3, 4))
def output_is_input(x, y):
    return x, (x * y).sin()


@case((3, 4), (3, 4))
def output_is_view_of_input(x, y):
    return x.view(-1), x.t(), x * y


@case((3, 4), prepare=clones)
def output_is_mutated_input(x):
    x.add_(1)
    return x, x.view(-1), x.sin()


@case((3, 4))
def output_aliases_intermediate(x):
    return (x * 2).sin().view(-1)


@case((3, 4))
def outputs_alias_one_intermediate(x):
    y = x.sin()
    return y.view(-1), y.t(), y[0]


@case((3, 4))
def base_is_returned_too(x):
    y = x.exp()
    return y, y.view(-1), y.detach()


@case((4, 4), prepare=lambda x: (lambda base: (base.view(-1), base))(x.clone()))
def mutated_inputs_alias_each_other(a, b):
    a.mul_(2)
    return (a.sum() * b).sin()


@case((5, 4), prepare=lambda x: (lambda base: (base[:3], base[2:]))(x.clone()))
def mutated_inputs_overlap(a, b):
    a.mul_(2)
    return a.sin() + b.cos()


@case((4, 4), prepare=lambda x: (lambda base: (base.view(-1), base))(x.clone()))
def alias_of_a_mutated_input_is_read_before(a, b):
    scale = (b.detach() * 2).cos().exp()
    a.mul_(2)
    return (a.view(4, 4) * scale).sin()


@case((5, 4), (5, 4), grads=(True, False), prepare=lambda x, y: (x, y[:3], y[1:]))
def aliases_without_grad_read_and_mutated(x, a, b):
    scale = (b[:3] * 2).cos().exp()
    a.mul_(2)
    return (x[:3] * scale).sin() + x[0]


@case((3, 4), prepare=lambda x: (x, x))
def duplicate_arguments(a, b):
    return a * b.sin()


@case((3, 4), prepare=lambda x: (lambda y: (y, y))(x.clone()))
def duplicate_mutated_arguments(a, b):
    a.add_(1)
    return b.sin() * a


@case((8, 8))
def random_numbers(x):
    y = F.dropout(x.sin(), 0.5) * torch.rand_like(x)
    y = y + torch.randn(8, 8) * x.cos()
    return y * torch.bernoulli(torch.full((8, 8), 0.5)) + torch.normal(0.0, 1.0, (8,)) * x


@case((8, 8))
def random_numbers_in_place(x):
    y = torch.empty(8, 8).uniform_() * x
    return F.dropout2d(y.sin()[None, None]) * F.rrelu(x, training=True)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.scale = 3.0
        return (x * w).sin()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * (x * w).cos() * ctx.scale, grad * x


@case((3, 4), (3, 4))
def custom_function(x, w):
    return Double.apply(x, w).exp()


class Stash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp()
        ctx.save_for_backward(x.sin())
        count = torch.arange(4)
        ctx.mark_non_differentiable(count)
        return x * 2, count

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.kept + ctx.saved_tensors[0]


@case((3, 4))
def custom_function_that_stashes_tensors(x):
    y, count = Stash.apply(x.cos())
    return y.sin(), count


@case((3, 4))
def outputs_without_grad(x):
    return x.sin(), x.detach() * 2, (x > 0), x.argmax(dim=1), torch.arange(3)


@case((3, 4))
def constants_and_trees(x):
    return {"a": x.sin(), "b": [None, 3, (x.cos(), "word")]}


@case((3, 4))
def detached_outputs(x):
    y = x.sin()
    return y.detach(), y * y.detach()


@case((3, 4), (3, 4), grads=(True, False), prepare=lambda x, y: (x, y.clone()))
def set_data(x, y):
    y.data = y.sin() * 2
    return x * y


@case((3, 4), (4, 4))
def grad_mode_regions(x, w):
    with torch.no_grad():
        scale = (x @ w).sin()
    y = (x * scale).exp()
    with torch.no_grad(), torch.enable_grad():
        z = y.cos()
    return y + z, scale


@case((3, 4), (4, 4))
def autocast_region(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x.sin() @ w
    return y.float().sin() + z


@case((3, 4), (3, 4), (3, 4))
def unused_inputs_and_outputs(x, unused, w):
    used, _ = torch.max(x * w, dim=1)
    return used


@case((6, 4))
def conditional(x):
    y = x.sin()
    return torch.cond(x.sum() > 0, lambda y: y.cos() * 2, lambda y: y.exp(), (y,)) * y


@case((3, 4), (4, 4))
def checkpointed(x, w):
    def block(x):
        return F.dropout((x @ w).sin(), 0.5) @ w

    return checkpoint(block, checkpoint(block, x, use_reentrant=False).cos(), use_reentrant=False)


@case((3, 4), (3, 4), grads=(True, False))
def in_place_on_intermediates(x, y):
    z = x.sin()
    z.mul_(2)
    z[0].add_(y[0])
    z.view(-1)[1] = 5.0
    return z.exp_()


@case((2, 3, 4), (2, 3, 4), (2, 3, 4))
def attention(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)


@case((3, 4))
def complex_numbers(x):
    z = torch.complex(x, x.sin())
    return (z * z.conj()).real, torch.fft.fft(x)


@case((5, 4), (4, 4), dynamic=True)
def dynamic_shapes(x, w):
    y = (x @ w).sin()
    return y.reshape(x.shape[0] * 2, -1) * x.shape[0], y.sum(0).expand(x.shape[0], -1), x.shape[0] + 1


@case((5, 4), (5, 4), dynamic=True, prepare=clones)
def dynamic_shapes_and_mutation(x, y):
    x.mul_(2)
    return torch.cat([x.sin(), y])[: x.shape[0] + 1] * y.shape[0]


class Net(nn.Module):
    """Buffers that are updated, an unused parameter, dropout, tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return F.dropout(self.second(torch.relu(self.norm(self.first(x)))), 0.3) * self.steps.cos()


@case((6, 4), module=Net)
def batch_norm_and_tied_weights(module, x):
    return module(x)


def observe(call, leaves, prepare, module, seed):
    """All that a caller sees of a step."""
    torch.manual_seed(seed)
    arguments = prepare(*leaves)
    outputs = call(*arguments)
    flat = torch.utils._pytree.tree_leaves(outputs)
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    seen = {
        "outputs": [(t.detach().clone(), t.requires_grad, t.shape, t.stride()) for t in tensors],
        "others": repr([v for v in flat if not isinstance(v, torch.Tensor)]),
        "is an input": [[t is a for a in arguments] for t in tensors],
        "shares memory": [[same_memory(t, a) for a in (*arguments, *tensors)] for t in tensors],
        "arguments": [(a.detach().clone(), a.requires_grad, a.shape) for a in arguments],
        "draw": torch.rand(1),
    }
    loss = sum(weighted(t) for t in (*tensors, *arguments) if t.requires_grad)
    loss.backward()
    parameters = list(module.parameters()) if module else []
    seen["gradients"] = [t.grad for t in (*leaves, *parameters)]
    seen["buffers"] = [b.clone() for b in module.buffers()] if module else []
    return seen


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


def weighted(t):
    t = torch.view_as_real(t) if t.is_complex() else t
    return (t.float() * torch.arange(t.numel()).reshape(t.shape).cos()).sum()


def assert_alike(found, expected):
    assert found.pop("others") == expected.pop("others")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def leaves_of(shapes, grads, seed=0):
    torch.manual_seed(seed)
    grads = (grads,) * len(shapes) if isinstance(grads, bool) else grads
    return [torch.randn(shape).requires_grad_(grad) for shape, grad in zip(shapes, grads, strict=True)]


def assert_case(name, compile_):
    """Two steps, the second on other values (and sizes, if they may vary), against eager."""
    function, shapes, prepare, module, grads, dynamic = CASES[name]
    torch.manual_seed(5)
    ours = module() if module else None
    theirs = copy.deepcopy(ours)
    compiled = compile_(partial(function, ours) if ours else function, dynamic=dynamic)
    for step in range(2):
        wider = [(s[0] + step * bool(dynamic), *s[1:]) if s != (4, 4) else s for s in shapes]
        expected = observe(
            partial(function, theirs) if theirs else function, leaves_of(wider, grads, step), prepare, theirs, step
        )
        assert_alike(observe(compiled, leaves_of(wider, grads, step), prepare, ours, step), expected)


@pytest.mark.parametrize(("name", "policy"), some_of_all(CASES, POLICIES, ()))
def test_like_eager(name, policy):
    divided = backend(POLICIES[policy])
    assert_case(
        name, lambda f, dynamic: torch.compile(f, backend=divided, dynamic=dynamic, fullgraph=name not in BREAKS)
    )
    assert divided.pairs
    for pair in divided.pairs:
        twice = [n for n, keys in pair.plan.items() if len(keys) > 1]
        assert not [n for n in twice if effects_of(n, pair.forward).random]


@pytest.mark.parametrize("policy", every_third(POLICIES, 1))
def test_tensor_subclasses(policy):
    from torch.testing._internal.two_tensor import TwoTensor

    def function(x, w):
        y = (x * w.clone()).sin()
        w.detach().mul_(2)
        return y.cos(), x * 2

    def leaves():
        torch.manual_seed(3)
        a, b, c, d = (torch.randn(3, 4) for _ in range(4))
        return TwoTensor(a, b).requires_grad_(), TwoTensor(c, d).requires_grad_()

    def step(call):
        x, w = leaves()
        outputs = call(x, w)
        sum(o.sum() for o in outputs).backward()
        return [(t.a, t.b) for t in (*outputs, x.grad, w.grad, w)]

    divided = backend(POLICIES[policy])
    found = step(torch.compile(function, backend=divided, fullgraph=True))
    torch.testing.assert_close(found, step(function))
    assert len(divided.pairs) == 1


@pytest.mark.parametrize("policy", every_third(POLICIES, 2))
def test_one_of_several_outputs_takes_part_in_backward(policy):
    def function(x, w):
        return (x @ w).sin(), (x * 2).exp()

    for chosen in (0, 1):
        grads = []
        for call in (torch.compile(function, backend=backend(POLICIES[policy])), function):
            x, w = leaves_of([(3, 4), (4, 4)], True)
            call(x, w)[chosen].sum().backward()
            grads.append((x.grad, torch.zeros_like(w) if w.grad is None else w.grad))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("policy", every_third(POLICIES, 0))
def test_backward_twice_over_one_graph(policy):
    def function(x):
        return F.dropout((x.sin() * x).exp(), 0.5)

    grads = []
    for call in (torch.compile(function, backend=backend(POLICIES[policy])), function):
        (x,) = leaves_of([(3, 4)], True)
        torch.manual_seed(0)
        y = call(x)
        y.sum().backward(retain_graph=True)
        y.cos().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("policy", every_third(POLICIES, 1))
def test_graph_breaks_divide_each_graph(policy):
    def function(x):
        y = F.dropout(x.sin(), 0.5)
        torch._dynamo.graph_break()
        return (y * y).exp()

    divided = backend(POLICIES[policy])
    grads = []
    for call in (torch.compile(function, backend=divided), function):
        (x,) = leaves_of([(3, 4)], True)
        torch.manual_seed(0)
        call(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    assert len(divided.pairs) == 2


@pytest.mark.parametrize("policy", every_third(POLICIES, 2))
def test_graphs_inside_higher_order_ops_are_divided_too(policy):
    @torch.compiler.nested_compile_region
    def block(x, w):
        return (x @ w).sin() * x

    def function(x, w):
        return block(block(x, w), w).exp()

    divided = backend(POLICIES[policy])
    grads = []
    for call in (torch.compile(function, backend=divided, fullgraph=True), function):
        x, w = leaves_of([(4, 4), (4, 4)], True)
        call(x, w).sum().backward()
        grads.append((x.grad, w.grad))
    torch.testing.assert_close(*grads)
    assert len(divided.pairs) > 1


class Counting(torch.autograd.Function):
    """Counts in a buffer how often its backward ran."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return grad * 2, None


@pytest.mark.parametrize("policy", every_third(POLICIES, 0))
def test_memory_written_in_backward(policy):
    def function(x, count):
        return Counting.apply(x, count).exp()

    seen = []
    for call in (torch.compile(function, backend=backend(POLICIES[policy]), fullgraph=True), function):
        (x,), count = leaves_of([(3, 4)], True), torch.zeros(())
        y = call(x, count)
        assert count == 0
        y.sum().backward()
        seen.append((x.grad, count))
    torch.testing.assert_close(*seen)


LOG = []


@torch.library.custom_op("splitkit_test::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    LOG.append(float(x.sum()))
    return x * 2


noted.register_fake(lambda x: torch.empty_like(x))
noted.register_autograd(lambda ctx, grad: grad * 2)


@contextmanager
def effectful(op):
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    handle = _register_effectful_op(op, _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


@pytest.mark.parametrize("policy", every_third(POLICIES, 1))
def test_effects_happen_once(policy):
    def function(x):
        return noted(noted(x.sin()).cos()).exp()

    with effectful(torch.ops.splitkit_test.noted.default):
        seen = []
        for call in (torch.compile(function, backend=backend(POLICIES[policy]), fullgraph=True), function):
            LOG.clear()
            (x,) = leaves_of([(3, 4)], True)
            call(x).sum().backward()
            seen.append((x.grad, tuple(LOG)))
    torch.testing.assert_close(*seen)
    assert len(seen[0][1]) == 2


def sorted_out(node_policy):
    """A checkpoint whose ops are saved or not as ``node_policy`` says, by name of the op."""

    def choose(ctx, op, *args, **kwargs):
        return node_policy.get(op, CheckpointPolicy.PREFER_RECOMPUTE)

    return partial(create_selective_checkpoint_contexts, choose)


ATEN = torch.ops.aten


class Selective(nn.Module):
    def __init__(self, wishes):
        super().__init__()
        self.linear, self.contexts = nn.Linear(4, 4, bias=False), sorted_out(wishes)

    def forward(self, x):
        def block(x):
            return (self.linear(x).sin() * x).exp()

        return checkpoint(block, x.tanh(), use_reentrant=False, context_fn=self.contexts).exp()


def twice(pair):
    """How often each op is computed, over both halves."""
    graphs = (pair.forward.graph, pair.backward.graph)
    return Counter(n.target for graph in graphs for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize(
    ("wish", "times"),
    [
        (CheckpointPolicy.MUST_SAVE, {"SaveAll": 1, "RecomputeAll": 1, "Remat": 1}),
        (CheckpointPolicy.PREFER_SAVE, {"SaveAll": 1, "RecomputeAll": 2, "Remat": 1}),
        (CheckpointPolicy.PREFER_RECOMPUTE, {"SaveAll": 2, "RecomputeAll": 2, "Remat": 1}),
        (CheckpointPolicy.MUST_RECOMPUTE, {"SaveAll": 2, "RecomputeAll": 2, "Remat": 2}),
    ],
)
@pytest.mark.parametrize("policy", these_first(["SaveAll", "Remat"], ["RecomputeAll"]))
def test_checkpoint_tags_are_honoured(policy, wish, times):
    torch.manual_seed(0)
    model, x = Selective({ATEN.sin.default: wish}), torch.randn(3, 4)
    divided = backend(POLICIES[policy])
    out = torch.compile(model, backend=divided, fullgraph=True)(x)
    out.sum().backward()
    found = model.linear.weight.grad
    expected = torch.autograd.grad(model(x).sum(), model.linear.weight)[0]
    torch.testing.assert_close(found, expected)
    (pair,) = divided.pairs
    assert twice(pair)[ATEN.sin.default] == times[policy]


def test_what_must_be_saved_is_computed_in_forward_with_all_that_it_needs():
    class Chain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.tan().exp())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return Chain.apply(self.weight * x).sin()

    joint = capture_joint(Model(), torch.randn(3, 4), loss=loss_or_sum)
    plan = joint.split(RecomputeAll()).plan
    left = [
        n for n in save_all_plan(joint.flow) if save_all_plan(joint.flow)[n] == (FORWARD,) and plan[n] == (BACKWARD,)
    ]
    assert [n.target for n in left] == [ATEN.tan.default, ATEN.exp.default]
    left[1].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    pair = joint.split(RecomputeAll())
    assert [pair.plan[n] for n in left] == [(FORWARD,), (FORWARD,)] and left[1].name in pair.saved


def test_random_numbers_in_a_checkpoint_are_saved_although_it_wants_them_recomputed():
    def function(x):
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x, use_reentrant=False)

    divided = backend(SaveAll())
    (x,) = leaves_of([(3, 4)], True)
    torch.compile(function, backend=divided)(x).sum().backward()
    counted = twice(divided.pairs[0])
    assert all(
        times == 1 for op, times in counted.items() if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    )
    assert counted[ATEN.exp.default] == 2


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin()


def test_partition_tags_are_honoured():
    joint = capture_joint(Sine(), torch.randn(2, 4), loss=loss_or_sum)
    (cosine,) = joint.graph_module.graph.find_nodes(op="call_function", target=ATEN.cos.default)  # needs no gradient
    (sine,) = joint.graph_module.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    for tag, half in [("is_backward", BACKWARD), ("must_be_in_forward", FORWARD), ("must_be_in_backward", BACKWARD)]:
        cosine.meta["partitioner_tag"] = tag
        plan = save_all_plan(joint_flow(joint.graph_module, joint.signature.forward_outputs))
        assert plan[cosine] == (half,) and plan[sine] == (FORWARD,)
    sine.meta["partitioner_tag"] = "must_be_in_backward"
    with pytest.raises(CycleError, match="SK203"):
        divide(joint_flow(joint.graph_module, joint.signature.forward_outputs), SaveAll(), unit(joint.graph_module))


def test_collectives_are_never_recomputed(tmp_path):
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def function(x):
            return (all_reduce((x * x).detach(), "sum", dist.group.WORLD) * x.sin()).exp()

        for policy in POLICIES.values():
            torch.compiler.reset()  # eight compilations of one function are all that torch allows
            divided = backend(policy)
            (x,), (y,) = leaves_of([(3, 4)], True), leaves_of([(3, 4)], True)
            torch.compile(function, backend=divided, fullgraph=True)(x).sum().backward()
            ((y * y).detach() * y.sin()).exp().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
            counted = twice(divided.pairs[0])
            reduces = [op for op in counted if "c10d" in str(op)]
            assert reduces and all(counted[op] == 1 for op in reduces)
    finally:
        dist.destroy_process_group()


class Updates(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.randn(4, 4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        scale = (self.scale.t() * 2).cos()
        self.scale.add_(1)
        return (x * self.weight * scale).sin()


def test_readers_of_updated_buffers_are_never_recomputed():
    joint = capture_joint(Updates(), torch.randn(4, 4), loss=loss_or_sum)
    flow, plan = joint.flow, joint.split(RecomputeAll()).plan
    (buffer,) = flow.updated
    (view,) = (n for n in buffer.users if n.target in (ATEN.t.default, ATEN.permute.default, ATEN.transpose.int))
    readers = {*buffer.users, *view.users}
    assert len(readers) == 3 and all(plan[n] == (FORWARD,) for n in readers)
    assert any(plan[n] == (FORWARD, BACKWARD) or plan[n] == (BACKWARD,) for r in view.users for n in r.users)


def test_a_plan_that_recomputes_random_numbers_is_refused():
    class Wrong:
        def assign(self, flow, costs):
            plan = save_all_plan(flow)
            random = [n for n in flow.nodes if flow.effects[n].random]
            return plan.place(dict.fromkeys(random, (FORWARD, BACKWARD)))

    (x,) = leaves_of([(3, 4)], True)
    with pytest.raises(Exception, match="SK202") as caught:
        torch.compile(lambda x: F.dropout(x, 0.5).sin(), backend=backend(Wrong()))(x)
    assert isinstance(caught.value.inner_exception, PlanError)


def test_a_plan_that_moves_an_effect_is_refused():
    class Wrong:
        def assign(self, flow, costs):
            plan = save_all_plan(flow)
            writes = [n for n in flow.nodes if flow.effects[n].writes]
            assert [plan[n] for n in writes] == [(BACKWARD,)]
            return plan.place(dict.fromkeys(writes, (FORWARD,)))

    (x,) = leaves_of([(3, 4)], True)
    with pytest.raises(Exception, match="SK210"):
        torch.compile(lambda x, n: Counting.apply(x, n).exp(), backend=backend(Wrong()))(x, torch.zeros(()))


def test_partition_fn_for_functorch():
    from functorch.compile import aot_function, nop

    def function(x, w):
        return (x @ w).sin().exp()

    grads = []
    for partition in (partition_fn(SaveAll()), partition_fn(RecomputeAll()), default_partition):
        x, w = leaves_of([(3, 4), (4, 4)], True)
        aot_function(function, fw_compiler=nop, partition_fn=partition)(x, w).sum().backward()
        grads.append((x.grad, w.grad))
    assert_close_all = torch.testing.assert_close
    assert_close_all(grads[0], grads[2])
    assert_close_all(grads[1], grads[2])


def test_a_graph_that_takes_no_gradient_is_not_divided():
    divided = backend(SaveAll())
    x = torch.randn(3)
    assert torch.equal(torch.compile(torch.sin, backend=divided)(x), x.sin())
    assert not divided.pairs


def test_fewer_bytes_are_held_between_forward_and_backward():
    x, w = leaves_of([(64, 64), (64, 64)], True)

    def held(policy):
        out = torch.compile(lambda x, w: (x @ w).sin().exp().tanh().cos(), backend=backend(policy))(x, w)
        return sum(t.untyped_storage().nbytes() for t in out.grad_fn.saved_tensors if t.data_ptr() not in leaves)

    leaves = {x.data_ptr(), w.data_ptr()}
    assert held(RecomputeAll()) == 0 < held(SaveAll())


plain_kernels = torch._inductor.config.patch("cpp.simdlen", 0)
"""Kernels without vectors, whose headers take the C++ compiler half as long: what is saved is the same."""


COMPILED = [("buffer_read_and_then_updated", "SaveAll"), ("dynamic_shapes", "RecomputeAll")]
LATER = [
    *(("plain", policy) for policy in ("RecomputeAll", "SaveAll")),
    *(("checkpointed_calmly", policy) for policy in ("RecomputeAll", "SaveAll")),
    ("buffer_read_and_then_updated", "RecomputeAll"),
    ("dynamic_shapes", "SaveAll"),
]


@pytest.mark.parametrize(("name", "policy"), these_first(COMPILED[:1], [*COMPILED[1:], *LATER]))
@plain_kernels
def test_inductor(name, policy):
    CASES["checkpointed_calmly"] = (calm, ((3, 4), (4, 4)), lambda *leaves: leaves, None, True, None)
    divided = backend(POLICIES[policy], inner="inductor")
    assert_case(name, lambda f, dynamic: torch.compile(f, backend=divided, dynamic=dynamic, fullgraph=True))
    assert divided.pairs


def calm(x, w):
    return checkpoint(lambda x: (x @ w).sin() @ w, x.cos(), use_reentrant=False).exp()


@pytest.mark.parametrize("policy", these_first(["RecomputeAll"], ["SaveAll"]))
@plain_kernels
def test_inductor_draws_the_same_numbers_in_both_halves(policy):
    call = torch.compile(lambda x: F.dropout(x.sin(), 0.5).exp().log(), backend=backend(POLICIES[policy], "inductor"))
    (x,) = leaves_of([(32, 32)], True)
    out = call(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(out.abs() > 1e-5, 2 * x.detach().cos(), 0.0))


@plain_kernels
def test_inductor_takes_nothing_that_another_policy_divided_from_its_cache():
    x, w = leaves_of([(3, 4), (4, 4)], True)
    for policy in (SaveAll(), RecomputeAll(), SaveAll()):
        torch._dynamo.reset()
        divided = backend(policy, inner="inductor")
        torch.compile(lambda x, w: (x @ w).sin().exp(), backend=divided)(x, w).sum().backward()
        assert len(divided.pairs) == 1


@plain_kernels
@pytest.mark.parametrize("policy", these_first([SaveAll()], [Remat(["aten.sin", "aten.t", "aten.view"])]), ids=type)
def test_inductor_writes_over_no_saved_value_whose_memory_another_one_shares(policy):
    """Its backward reuses saved buffers; torch's own default_partition goes wrong here as a custom partitioner."""

    def function(x, w, k, z):
        y = (x * w).sin()
        b, a = y.t() @ k, y * z
        return a.exp().sum() + b.sum()

    def gradients(call):
        torch.manual_seed(0)
        given = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
        call(*given).backward()
        return [x.grad for x in given]

    compiled = torch.compile(function, backend=backend(policy, "inductor"))
    before = torch._functorch.config.donated_buffer
    for found, expected in zip(gradients(compiled), gradients(function), strict=True):
        torch.testing.assert_close(found, expected)
    assert torch._functorch.config.donated_buffer == before


def test_no_such_inner_compiler():
    with pytest.raises(PolicyError, match="SK302"):
        backend(SaveAll(), inner="jit")


def trained(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("policy", every_third(POLICIES, 2))
def test_apply_trains_like_the_model(policy):
    torch.manual_seed(0)
    model = Net()
    plain_ = copy.deepcopy(model)
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    applied = apply(model, POLICIES[policy], torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), seed)
    assert type(applied) is Net and list(applied.state_dict()) == list(state)
    assert all(a is b for a, b in zip(applied.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(trained(applied), trained(plain_), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), applied.state_dict(), rtol=0, atol=0)


def test_apply_gives_a_module_of_its_own():
    model = Net()
    applied = apply(model, SaveAll())
    copied = copy.deepcopy(applied)
    with torch.no_grad():
        copied.first.weight.zero_()
    assert model.first.weight.any()
    assert copied(torch.randn(6, 4)).shape == (6, 4)
    assert isinstance(pickle.loads(pickle.dumps(applied)), Net)
    assert model._compiled_call_impl is None


class Stack(nn.Module):
    """Layers in a list, a buffer that is bound anew in each call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).exp()
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x.sum()


def test_modules_go_by_the_same_names_through_apply_and_backend():
    x, policy = torch.randn(3, 4), Remat(modules="layers.*")
    model = Stack()
    assert apply(model, policy, x)(x).item() == model(x).item()
    divided = backend(policy)
    torch.compile(model, backend=divided)(x)
    names = {n.name.split("_")[0] for n in divided.pairs[0].backward.graph.nodes if n.op == "call_function"}
    assert "tanh" in names


def test_apply_puts_back_a_buffer_that_is_bound_anew():
    model = Stack()
    before = model.mean
    apply(model, SaveAll(), torch.randn(3, 4))
    assert model.mean is before and not before.any()


def test_apply_leaves_the_example_inputs_alone():
    class Writes(nn.Linear):
        def forward(self, x):
            x.mul_(2)
            return super().forward(x)

    x = torch.ones(3, 4)
    apply(Writes(4, 4), SaveAll(), x)
    assert torch.equal(x, torch.ones(3, 4))


def test_apply_many_policies_to_one_model():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    backends = [apply(model, Remat(lambda n, i=i: i % 2)) for i in range(12)]  # over Dynamo's limit of recompilations
    for applied in backends:
        applied(x).sum().backward()
    assert all(a is b for a, b in zip(backends[0].parameters(), model.parameters(), strict=True))


def test_apply_refuses_now_what_would_fail_later():
    class Nowhere:
        def assign(self, flow, costs):
            return Plan.of(dict.fromkeys(flow.nodes, 7))

    with pytest.raises(PlanError, match="SK206"):
        apply(Net(), Nowhere(), torch.randn(6, 4))


def test_apply_warns_of_several_graphs():
    class Broken(nn.Linear):
        def forward(self, x):
            y = super().forward(x).sin()
            torch._dynamo.graph_break()
            return super().forward(y)

    with pytest.warns(UserWarning, match="2 graphs"):
        apply(Broken(4, 4), SaveAll(), torch.randn(3, 4))


def test_apply_to_a_transformer():
    from splitkit.testing.models import build

    made = build("gpt2", layers=2, width=32, heads=4, vocab=64, batch=2, seq=8)
    theirs = copy.deepcopy(made.model)
    applied = apply(made.model, Remat(modules="*.attn"))
    losses = []
    for model in (applied, theirs):
        torch.manual_seed(0)
        output = model(**made.kwargs)
        output.loss.backward()
        losses.append(output.loss.detach())
    torch.testing.assert_close(*losses)
    for a, b in zip(applied.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
