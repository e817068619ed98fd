"""Constants, repeated inputs and data-dependent sizes are simulated as they are measured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from campaigns import some_of_all, these_first
from handgraphs import captured
from torch import nn

import splitkit as sk
from splitkit.cli import main
from splitkit.policies import RoundRobin
from splitkit.training.peaks import Peaks


def test_a_constant_of_a_captured_graph_is_there_before_the_op_that_copies_it():
    """So the measured peak has it from the start on."""

    def forward(self, x):
        return (x @ torch.ones(16, 2000)).sum() + torch.tensor([1.0] * 1000)

    x = torch.ones(8, 16)
    gm = captured(forward, x)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    simulated = sk.simulate_memory(gm)
    assert simulated.baseline == measured.baseline == 8 * 16 * 4 + 4000
    assert simulated.peak == measured.peak


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids, labels=None, weights=None):
        y = self.head(self.embedding(input_ids)).flatten(0, 1)
        return F.cross_entropy(y, labels.flatten(), weights)


@pytest.mark.parametrize(("how", "by_name"), some_of_all(["export", "symbolic_trace"], [True, False], always=()))
def test_one_tensor_given_twice_counts_once(how, by_name):
    ids = torch.randint(0, 50, (8, 400))
    args, kwargs = ((), {"labels": ids, "input_ids": ids}) if by_name else ((ids, ids), {})
    gm = sk.capture(Tokens(), *args, how=how, **kwargs)
    whole = sk.split(gm, RoundRobin(2))
    for graph in (gm, whole):
        profile = sk.simulate_memory(graph)
        with torch.no_grad():
            measured = sk.measure_memory(graph, *args, **kwargs)
        assert (profile.baseline, profile.peak) == (measured.baseline, measured.peak)
    two = sk.simulate_memory(sk.capture(Tokens(), ids, ids.clone(), how=how))
    assert two.baseline == sk.simulate_memory(gm).baseline + ids.nbytes


def test_one_tensor_given_twice_to_a_training_step_counts_once():
    ids = torch.randint(0, 50, (2, 9))
    joint = sk.capture_joint(Tokens(), ids, labels=ids)
    for policy in (sk.policies.SaveAll(), sk.policies.Budget(10**9)):
        pair = joint.split(policy)
        primals = joint.primals(ids, labels=ids)
        held = list(primals)
        measured = sk.measure_memory(pair.run, primals, joint.tangents())
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        assert (profile.baseline, profile.peak) == (measured.baseline, measured.peak)
        assert Peaks(joint.flow).trace(pair.plan).peak == measured.peak
        del held


@pytest.mark.parametrize(
    "frozen", these_first([["a.weight", "a.bias"], ["a.bias", "b.weight"]], [["a.weight"], ["b.weight"]])
)
def test_a_none_among_the_outputs_of_forward_does_not_make_a_saved_value_the_callers(frozen):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
            for name in frozen:
                self.get_parameter(name).requires_grad_(False)

        def forward(self, x):
            return self.norm(self.b(self.a(x).relu())).square().sum()

    model, x = Net(), torch.randn(64, 16)
    joint = sk.capture_joint(model, x)
    pair = joint.split(sk.policies.SaveAll())
    primals = joint.primals(x)
    held = list(primals)
    measured = sk.measure_memory(pair.run, primals, joint.tangents())
    profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert (profile.peak, profile.end) == (measured.peak, measured.end)
    del held


class Found(nn.Module):
    def forward(self, x):
        return (x > 0).nonzero().float().sin()


def found():
    return Found(), (torch.ones(8, 4),)


def test_bytes_for_a_size_that_only_the_data_decides_are_printed_as_at_most(capsys):
    model, inputs = found()
    gm = sk.capture(model, *inputs)
    profile = sk.simulate_memory(gm)
    (bound,) = profile.bounds.values()
    assert bound == 32 and "peak at most 896 B" in str(profile) and "u0 = 32" in str(profile)
    assert profile.to_dict()["bounds"] == dict(profile.bounds)
    assert sk.measure_memory(gm, *inputs).peak == profile.peak  # all of it is found
    assert sk.measure_memory(gm, -inputs[0]).peak < profile.peak
    assert main(["profile", f"{__file__}:found", "--forward-only"]) == 0
    assert "at most 896 B" in capsys.readouterr().out
    known = sk.simulate_memory(sk.capture(nn.Tanh(), torch.ones(3)))
    assert not known.bounds and "at most" not in str(known)
