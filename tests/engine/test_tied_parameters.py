"""A tensor that several parts use stays one tensor, whatever is done to the split."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.policies import RoundRobin


def test_a_buffer_that_one_part_writes_and_another_reads_stays_one_after_double():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.register_buffer("fixed", torch.ones(3))

        def forward(self, x):
            self.count.add_(x)
            return x.sin() + self.count + self.fixed

    gm = fx.symbolic_trace(Counting())
    made = sk.split(gm, {"add_": 0, "sin": 1, "add": 1, "add_1": 1}).module
    assert sorted(made.state_dict()) == ["count", "submod_1.fixed"]
    x = torch.ones(3, dtype=torch.double)
    assert torch.equal(copy.deepcopy(gm).double()(x), copy.deepcopy(made).double()(x))


def test_a_buffer_of_a_called_module_that_another_part_reads_stays_one_after_double():
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


def test_tied_weights_in_the_parent_are_not_shared_between_parts():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    gm = sk.capture(model, torch.ones(1, 3))
    assert sk.split(gm, RoundRobin(2), parameters="hoist").shared == ()
    assert len(sk.split(gm, RoundRobin(2)).shared) == 1


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
def test_a_tied_parameter_stays_one_whatever_changes_the_split(change, lazy):
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
