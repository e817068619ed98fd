"""What ``torch.vmap`` takes, and what branches and loops take at most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splitkit._torch import functorch_depth
from splitkit.engine.split import split
from splitkit.errors import GraphError
from splitkit.frontends.joint_capture import capture
from splitkit.memory.kernels.vmap_batches import run_vmap
from splitkit.memory.measurement import measure_memory
from splitkit.memory.profile import simulate_memory
from splitkit.policies import Stages


class Mapped(nn.Module):
    """A function under vmap, of five sets of weights."""

    def __init__(self, function):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(5, 8, 3)), nn.Parameter(torch.zeros(5, 3))
        self.function = function

    def forward(self, x):
        return torch.vmap(lambda w, b: self.function(x, w, b))(self.w, self.b).mean(0)


FUNCTIONS = {
    "product": lambda x, w, b: (x @ w + b).tanh(),
    "linear": lambda x, w, b: nn.functional.gelu(nn.functional.linear(x, w.t(), b)),
    "norm": lambda x, w, b: nn.functional.layer_norm(x @ w, (3,)) + b,
    "softmax": lambda x, w, b: (x @ w).softmax(-1).square().sum(0) * b,
    "nested": lambda x, w, b: torch.vmap(lambda row: (row @ w).exp() + b)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_is_counted_whole(name):
    x = torch.randn(400, 8)
    gm = capture(Mapped(FUNCTIONS[name]), x)
    assert run_vmap(gm).values
    with torch.no_grad():
        measured = measure_memory(gm, x)
    profile = simulate_memory(gm)
    assert (profile.peak, profile.end) == (measured.peak, measured.end)


def test_parts_of_a_split_count_it_whole():
    x = torch.randn(400, 8)
    made = split(capture(Mapped(FUNCTIONS["product"]), x), Stages(2))
    with torch.no_grad():
        assert simulate_memory(made).peak == measure_memory(made, x).peak


@pytest.mark.parametrize("name", ["product", "linear", "norm", "softmax"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_part_that_is_cut_inside_is_counted_whole_alone(name, stages):
    x = torch.randn(400, 8)
    made = split(capture(Mapped(FUNCTIONS[name]), x), Stages(stages))
    alone = simulate_memory(made).parts
    assert functorch_depth() == 0
    for key, part in made.parts.items():
        taken = {n.target: n for n in part.graph.find_nodes(op="placeholder")}
        known = run_vmap(made.module).values
        inputs = sum(known[n].untyped_storage().nbytes() for n in taken.values())
        outputs = [known[n] for n in part.graph.output_node().all_input_nodes]
        assert alone[key].baseline == inputs + sum(p.nbytes for p in part.parameters())
        assert alone[key].peak >= alone[key].baseline
        if any(tuple(t.shape) == (5, 400, 3) for t in outputs):
            assert alone[key].peak >= alone[key].baseline + 5 * 400 * 3 * 4


def test_a_part_given_alone_that_begins_or_ends_inside_is_refused():
    made = split(capture(Mapped(FUNCTIONS["product"]), torch.randn(400, 8)), Stages(2))
    for part in made.parts.values():
        with pytest.raises(GraphError, match=r"SK109: .*inside a torch.vmap"):
            simulate_memory(part)
    assert functorch_depth() == 0


def test_a_run_that_fails_inside_leaves_no_level_open():
    gm = capture(Mapped(FUNCTIONS["product"]), torch.randn(4, 8))
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = lambda x: 1 / 0
    assert run_vmap(gm).values == {}
    assert not torch._C._functorch.get_interpreter_stack()


class Branch(nn.Module):
    """One of two branches, of which one takes more inside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.down(self.up(x).relu()), lambda x: x * 2, (x,)).sum()


def test_what_a_branch_takes_is_said_to_be_at_most():
    profile = simulate_memory(capture(Branch(), torch.randn(32, 16)))
    assert profile.at is not None and profile.at.name in profile.bounds
    assert str(profile).startswith("peak at most ") and f"{profile.at.name} takes up to" in str(profile)
    plain = simulate_memory(capture(nn.Linear(4, 4), torch.randn(2, 4)))
    assert not plain.bounds and "at most" not in str(plain)
