"""Pairs whose saved values wait on the host: exact bytes on both sides, equal numbers, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from jointgraphs import Hand
from torch import nn

import splitkit as sk
from splitkit.engine.pair import divide
from splitkit.errors import FileError, PlanError
from splitkit.frontends.joint_capture import DividedStep
from splitkit.memory.storage_watch import StorageWatch
from splitkit.plans.parts import Offloaded
from splitkit.policies import Budget, SaveAll


class Net(nn.Module):
    """Layers with views, a tuple, dropout and a value that is saved and returned."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x):
        for _ in range(3):
            h = self.norm(torch.nn.functional.gelu(self.first(x)))
            x = torch.nn.functional.dropout(self.second(h), 0.1).sin()
        return x.transpose(0, 1).exp().mean()


@cache
def made():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(48, 32)
    joint = sk.capture_joint(model, x)
    return joint, x, sk.costs.roofline(joint.graph_module, "h100")


@cache
def offloaded(share):
    joint, _, costs = made()
    return joint.split(Budget(share, offload=20e9), costs)


def lives_of(pair, primals, tangents):
    """The lifetimes of storages of one run."""
    watch = StorageWatch()
    for tensor in (*primals, *tangents):
        watch.see(tensor, "input")
    with watch.watching():
        results = pair.run(primals, tangents)
    return watch, results


def peak_of(watch, *, host):
    """The most bytes of one side after any op; a copy to the host is known by the op that makes it."""
    held = [life for life in watch.lives if (life.made == "splitkit.to_host.default") is host]
    return max(sum(life.nbytes for life in held if life.born <= i < life.died) for i in range(len(watch.ops)))


@pytest.mark.parametrize("share", [0.8, 0.4, 0.1])
def test_bytes_are_exact_on_both_sides(share):
    joint, x, _ = made()
    pair = offloaded(share)
    primals, tangents = joint.primals(x), joint.tangents()
    watch, _ = lives_of(pair, list(primals), tangents)
    simulated = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert pair.offloaded and pair.host_bytes
    assert peak_of(watch, host=False) == simulated.peak
    assert peak_of(watch, host=True) == pair.host_bytes
    # the figures of the policy are those of the simulation
    assert f"The peak is at least {sk.extend.size(simulated.peak)} (within" in pair.plan.note
    assert f"{sk.extend.size(pair.host_bytes)} of it on the host in {len(pair.offloaded)} values" in pair.plan.note


def test_the_peak_is_lower_for_it():
    joint, _, costs = made()
    whole = joint.split(SaveAll(), costs)
    peaks = [
        sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak
        for pair in (whole, offloaded(0.8), offloaded(0.1))
    ]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def gradients(module, model, x):
    torch.manual_seed(1)
    model.zero_grad()
    loss = module(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_losses_and_gradients_are_those_of_eager_mode():
    joint, x, _ = made()
    expected = gradients(joint.model, joint.model, x)
    found = gradients(DividedStep(joint, offloaded(0.1)), joint.model, x)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.campaign)])
def test_apply_offloads(inner):
    joint, x, _ = made()
    model = joint.model.eval()
    policy = Budget(0.3, offload=20e9)
    applied = sk.apply(model, policy, x, inner=inner, costs=lambda gm: sk.costs.roofline(gm, "h100"))
    # Inductor draws other random numbers than eager mode
    expected = gradients(model if inner == "eager" else torch.compile(model), model, x)
    found = gradients(applied, model, x)
    joint.model.train()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))


def test_a_backend_has_pairs_that_offload():
    joint, x, _ = made()
    backend = sk.backend(Budget(0.3, offload=20e9), costs=lambda gm: sk.costs.roofline(gm, "h100"))
    torch.compile(joint.model, backend=backend)(x).backward()
    joint.model.zero_grad()
    assert backend.pairs[0].offloaded


def test_a_plan_file_carries_what_is_offloaded(tmp_path):
    joint, _, costs = made()
    pair, file = offloaded(0.1), str(tmp_path / "plan.json")
    pair.plan.save(file)
    loaded = sk.Plan.load(file, joint.graph_module.graph)
    assert loaded == pair.plan and loaded.offloaded == pair.plan.offloaded
    again = joint.split(loaded, costs)
    assert again.forward.code == pair.forward.code and again.backward.code == pair.backward.code
    data = pair.plan.to_dict()
    del data["offloaded"]  # a file that predates offload
    assert sk.Plan.from_dict(joint.graph_module.graph, data).offloaded == ()
    assert "offloaded" not in joint.split(SaveAll(), costs).plan.to_dict()


@pytest.mark.parametrize(
    "damage",
    [
        "all",
        [{"value": "gelu"}],
        [{"value": None, "release": None, "fetch": None}],
        [{"value": "gelu", "release": 3, "fetch": None}],
        [{"value": "gelu", "release": None, "fetch": None}] * 2,
    ],
)
def test_a_damaged_file_is_refused(damage):
    joint, _, costs = made()
    data = joint.split(SaveAll(), costs).plan.to_dict() | {"offloaded": damage}
    with pytest.raises(FileError, match="SK501.*offloaded"):
        sk.Plan.from_dict(joint.graph_module.graph, data)


def test_a_file_that_names_other_nodes_is_refused():
    joint, _, costs = made()
    entry = {"value": "no_such", "release": None, "fetch": None}
    data = joint.split(SaveAll(), costs).plan.to_dict() | {"offloaded": [entry]}
    with pytest.raises(FileError, match="SK502"):
        sk.Plan.from_dict(joint.graph_module.graph, data)


def hand():
    """A step with a value, a view of another, one that is returned, one that is recomputed, and an input."""
    h = Hand().inputs(x=1).gradients(g=1).op("a", 4, "x").op("b", 4, "a").view("w", "b").op("c", 2, "w")
    h.op("out", 1, "c").op("loss", 1, "out").back("b2", 1, "g", "out").back("b1", 1, "b2", "w", "a", "x")
    flow = h.flow("loss out", "b1")
    return h, flow, SaveAll().assign(flow, sk.costs.unit(flow.root))


def test_defaults_and_moments():
    h, flow, plan = hand()
    pair = divide(flow, replace(plan, offloaded=(Offloaded(h["a"]),)), sk.costs.unit(flow.root))
    names = [node.name for node in pair.forward.graph.nodes]
    assert names.index("a_on_host") == names.index("b") + 1 and "a_on_host" in pair.saved
    names = [node.name for node in pair.backward.graph.nodes]
    assert names[-4:-1] == ["copy_of_a_back", "a_back", "b1"]
    late = divide(flow, replace(plan, offloaded=(Offloaded(h["a"], h["c"], h["b2"]),)), sk.costs.unit(flow.root))
    names = [node.name for half in (late.forward, late.backward) for node in half.graph.nodes]
    assert names.index("a_on_host") == names.index("c") + 1 and names.index("copy_of_a_back") + 1 == names.index("b2")


@pytest.mark.parametrize(
    ("moved", "reason"),
    [
        (("c",), "backward does not take it"),
        (("x",), "the caller holds"),
        (("out",), "returned to the caller"),
        (("a", "x"), "cannot leave the device after x"),
        (("b", "a"), "backward does not take it"),
        (("a", None, "g"), "before it is fetched"),
        (("a", "b1"), "cannot leave the device"),
    ],
)
def test_refusals_name_the_reason(moved, reason):
    h, flow, plan = hand()
    one = Offloaded(*(name and h[name] for name in moved))
    with pytest.raises(PlanError, match="SK220") as refused:
        divide(flow, replace(plan, offloaded=(one,)), sk.costs.unit(flow.root))
    assert reason in str(refused.value), str(refused.value)


def test_a_base_moves_once():
    h = Hand().inputs(x=1).gradients(g=1).op("a", 4, "x").view("w", "a").op("loss", 1, "w")
    h.back("b1", 1, "g", "w").back("b2", 1, "b1", "a")
    flow = h.flow("loss", "b2")
    costs = sk.costs.unit(flow.root)
    both = replace(SaveAll().assign(flow, costs), offloaded=(Offloaded(h["a"]),))
    with pytest.raises(PlanError, match="SK220.*saved too, lies in the same memory"):
        divide(flow, both.place({h["w"]: ("forward",)}), costs)
    again = divide(flow, both.place({h["w"]: ("forward", "backward")}), costs)
    assert again.offloaded == ("a",) and again.saved == ("a_on_host",)
