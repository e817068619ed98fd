"""Where torch's min-cut partitioner goes wrong, silently: its outcome, and ours beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit.policies import Budget, MinCut, RecomputeAll
from splitkit.testing import models

RANDOM = torch.Tag.nondeterministic_seeded


def torchs(joint, budget):
    with functorch_config.patch(activation_memory_budget=budget):
        return joint.partition(min_cut_rematerialization_partition)


def run(joint, pair, *inputs):
    torch.manual_seed(0)
    outputs, gradients = pair.run(joint.primals(*inputs), joint.tangents())
    return joint.read([*outputs, *gradients])


def both(pair, wanted):
    """Names of nodes that both halves compute."""
    forward = {n.name for n in pair.forward.graph.nodes if n.op == "call_function" and wanted(n)}
    return forward & {n.name for n in pair.backward.graph.nodes if n.op == "call_function"}


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.first(x).relu()
        return self.second(y * torch.rand_like(y)).square().sum()


def is_random(node):
    return RANDOM in getattr(node.target, "tags", ())


def test_random_numbers_are_drawn_again_under_a_budget():
    """pytorch #190758 and #190717: wrong gradients, without a word."""
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(8, 16)
    joint = sk.capture_joint(model, x)
    torch.manual_seed(0)
    model(x).backward()
    wrong = torchs(joint, 0.0)
    assert both(wrong, is_random), "torch draws them only once now: tell the docs"
    gradient = run(joint, wrong, x).gradients["first.weight"]
    assert (gradient - model.first.weight.grad).abs().max() > 0.01 * gradient.abs().max()
    for policy in (RecomputeAll(), MinCut(0.0), Budget(0.9, of="saved")):
        pair = joint.split(policy)
        assert not both(pair, is_random)
        step = run(joint, pair, x)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(step.gradients[name], parameter.grad)


class Shifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(32))

    def forward(self, x):
        y = x * self.shift.sin()
        self.shift.add_(1.0)
        return y.sin().sum()


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_what_is_read_of_a_buffer_before_it_is_updated_is_read_again_after(budget):
    """pytorch #197039: the halves read the buffer that AOTAutograd has updated in between."""
    model, x = Shifting(), torch.randn(32, requires_grad=True)
    joint = sk.capture_joint(model, x)
    updated = set(joint.signature.updates.values())

    def reads_updated(pair):
        placeholders = [n for n in pair.backward.graph.find_nodes(op="placeholder") if n.name in updated]
        return [n for n in placeholders if n.users]

    assert reads_updated(torchs(joint, budget)), "torch saves what it read now: tell the docs"
    for policy in (RecomputeAll(), MinCut(0.0)):
        assert not reads_updated(joint.split(policy))
    before = model.shift.clone()
    model(x).backward()
    model.shift.copy_(before)
    y = x.detach().clone().requires_grad_()
    torch.compiler.reset()
    torch.compile(model, backend=sk.backend(RecomputeAll()), fullgraph=True)(y).backward()
    torch.testing.assert_close(y.grad, x.grad)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200_000, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)))

    def forward(self, ids):
        return self.layers(self.table(ids)).square().sum()


def test_a_budget_is_ignored_beside_a_large_embedding():
    joint = sk.capture_joint(Words(), torch.randint(0, 200_000, (64, 16)))

    def saved(pair):
        return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).saved

    whole = saved(torchs(joint, 1.0))
    assert saved(torchs(joint, 0.3)) == saved(torchs(joint, 0.1)) == whole, "torch keeps to it now: tell the docs"
    assert saved(joint.split(Budget(int(0.3 * whole), of="saved"))) <= 0.3 * whole


def test_a_collective_runs_again_at_budget_0(tmp_path):
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    class Reduced(nn.Module):
        def forward(self, x):
            return (all_reduce((x * x).detach(), "sum", dist.group.WORLD) * x.sin()).exp().sum()

    def is_collective(node):
        return "all_reduce" in str(node.target)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        joint = sk.capture_joint(Reduced(), torch.randn(8, requires_grad=True))
        assert both(torchs(joint, 0.0), is_collective), "torch runs it once now: tell the docs"
        for policy in (RecomputeAll(), MinCut(0.0)):
            assert not both(joint.split(policy), is_collective)
    finally:
        dist.destroy_process_group()


@pytest.mark.campaign  # shows what torch does, not what we do
def test_torchs_peak_rises_while_its_budget_falls():
    """The point of a budget of the peak: at the very peak that torch's plan has, less is computed again."""
    example = models.build("llama", layers=2, width=128, heads=4, vocab=100, batch=4, seq=128)
    joint = sk.capture_joint(example.model, **example.kwargs)
    costs = sk.costs.roofline(joint.graph_module, device="a100")

    def peak(pair):
        return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def again(pair):
        names = both(pair, lambda node: True)
        return sum(costs.seconds(n) for n in joint.graph_module.graph.nodes if n.name in names)

    theirs = {budget: torchs(joint, budget) for budget in (1.0, 0.5, 0.0)}
    assert peak(theirs[0.0]) > peak(theirs[0.5]), "torch's peak falls with its budget now: tell the docs"
    for budget, pair in theirs.items():
        own = joint.split(Budget(peak(pair)), costs)
        assert peak(own) <= peak(pair)
        if budget < 1:
            assert again(own) < again(pair)
