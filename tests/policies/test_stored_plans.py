"""Plans of two small models by policies with all their options, as they are stored: places, claims, notes, refusals.

A change may make one of them better, and leaves the others as they are: ``SPLITKIT_STORE=1`` stores them again.
"""

from __future__ import annotations

import pytest
from storedmodels import chain, forward, joint
from storedtexts import assert_stored_row

from splitkit import costs
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import SplitError
from splitkit.frontends.joint_capture import Joint
from splitkit.policies import (
    Best,
    Budget,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    Precompute,
    SaveAll,
    SplitBackward,
    Stages,
)

KIB = 1024
SLOW = costs.Links.uniform(1e9, 1e-6)
UNEQUAL = costs.Links.matrix([[0, 1e9, 4e9], [2e9, 0, 1e9], [4e9, 1e9, 0]], latency=1e-6)
FORWARD = {
    **{f"stages {n}": Stages(n) for n in (1, 2, 3, 5, 9)},
    "stages links": Stages(3, links="pcie4"),
    "stages slow links": Stages(3, links=SLOW),
    "stages exact": Stages(4, tolerance=0.0),
    "stages even": Stages(4, tolerance=0.2),
    **{f"stages {s}": Stages(3, schedule=s, microbatches=6, memory="400KiB", links=SLOW) for s in ("gpipe", "1f1b")},
    "stages zbv": Stages(4, schedule="zbv", microbatches=4, links=SLOW),
    "stages interleaved": Stages(4, schedule="Interleaved1F1B", microbatches=4, links="nvlink4"),
    "stages replicas": Stages(4, replicas=(1, 2), links="nvlink4"),
    "devices": Devices(["h100", "h100", "a100"], links="pcie4"),
    "devices slow": Devices(["h100", "l4", "a100"], links=UNEQUAL),
    "devices free": Devices(["h100", "a100"], links=SLOW, pieces=None),
    "devices latency": Devices({"cuda:0": "h100", "cuda:1": "l4"}, links="pcie4", objective="latency"),
    "devices latency slow": Devices(["h100", "h100"], links=costs.Links.uniform(1e12, 1e-9), objective="latency"),
    "devices together": Devices(["h100", "a100"], links=SLOW, together=["left.*"], only={"head": [1]}),
    "expert": Expert(3),
    "best": Best([Stages(3), Expert(3)], schedule="1f1b", microbatches=4, links=SLOW),
    "best of 3": Best(3, schedule="gpipe", microbatches=4, links="nvlink4", memory="1MiB"),
}  # fmt: skip
MEMORY = {
    **{f"stages {size} KiB": Stages(3, memory=size * KIB) for size in (64, 40, 34, 31, 8)},
    "stages sizes": Stages(3, memory=["34KiB", None, "20KiB"], links=SLOW),
    "stages adam": Stages(3, optimizer="adam", memory="40KiB"),
    **{f"stages 1f1b {m} KiB": Stages(3, schedule="1f1b", microbatches=6, memory=m * KIB) for m in (80, 60, 50, 45)},
    "stages gpipe": Stages(2, schedule="gpipe", microbatches=3, memory="90KiB", links=SLOW),
    "stages interleaved": Stages(4, schedule="Interleaved1F1B", microbatches=4, memory="80KiB"),
    "stages zbv": Stages(4, schedule="zbv", microbatches=4, memory="80KiB", links=SLOW),
    "stages replicas": Stages(4, replicas=(1, 2), links=SLOW, memory="60KiB", schedule="1f1b", microbatches=4),
    "devices": Devices({"cuda:0": "h100", "cpu": "cpu"}, links="pcie4", memory=16 * KIB),
    "devices sizes": Devices(["h100", "h100", "l4"], links=SLOW, memory=["12KiB", "8KiB", None]),
    "devices free": Devices(["h100", "l4"], links=SLOW, memory="14KiB", pieces=None),
    "devices latency": Devices(["h100", "l4"], links=SLOW, memory="19KiB", objective="latency"),
    "devices little": Devices(["h100", "a100"], memory="2KiB"),
    **{f"budget {size} KiB": MemoryBudget(size * KIB) for size in (54, 44, 36, 29, 14)},
    "budget inference": MemoryBudget(16 * KIB, optimizer=None),
    "stages inference": Stages(3, memory=12 * KIB, optimizer=None, links=SLOW),
    "budget parts": MemoryBudget(34 * KIB, parts=4),
    "budget adam": MemoryBudget("80KiB", schedule="1f1b", microbatches=4, optimizer="adam"),
    "budget sizes": MemoryBudget(["34KiB", "60KiB", "32KiB"]),
}
JOINT = {
    **{f"budget {share} {of}": Budget(share, of) for share in (0.3, 0.6, 0.9) for of in ("saved", "peak")},
    **{f"budget {word} {of}": Budget(word, of) for word in ("least",) for of in ("saved", "peak")},
    "budget fused": Budget(0.6, "saved", price="fused"),
    "budget card": Budget(card="110KiB", optimizer="adam"),
    "budget little card": Budget(card="80KiB", optimizer="sgd"),
    "budget offload": Budget(0.6, offload=1e12),
    "budget slow offload": Budget(0.7, offload=1e9),
    "budget host": Budget(0.6, offload=1e12, host="2KiB"),
    "cut": MinCut(),
    "cut fused": MinCut("fused"),
    "cut free": MinCut(0.0),
    "precompute": Precompute(),
    "split": SplitBackward(),
    "split price": SplitBackward(price=1e10),
    "split cut": SplitBackward(policy=MinCut()),
    "save all": SaveAll(),
}  # fmt: skip
PIPELINES = {
    **{f"pipeline {s}": Pipeline(2, s, microbatches=4, links="nvlink4") for s in ("gpipe", "1f1b", "zbv")},
    "pipeline interleaved": Pipeline(4, "Interleaved1F1B", microbatches=4, links=SLOW),
    **{f"pipeline {m} KiB": Pipeline(2, "1f1b", 4, f"{m}KiB", SLOW) for m in (70, 50, 40, 34, 20)},
    "pipeline saves": Pipeline(2, "1f1b", microbatches=4, memory="40KiB", recompute=False),
    "pipeline adam": Pipeline(2, "1f1b", microbatches=2, memory="40KiB", optimizer="adam"),
    "pipeline offload": Pipeline(2, "gpipe", microbatches=4, memory="46KiB", offload=1e12),
    "pipeline zbv memory": Pipeline(2, "zbv", microbatches=4, memory="50KiB"),
    "pipeline split": SplitBackward(policy=Pipeline(4, "zbv", microbatches=4, links="nvlink4")),
}  # fmt: skip


def row_of(graph, flow, prices, policy):
    """All that a plan says; the text of the refusal where there is none."""
    try:
        plan = policy.assign(flow, prices)
    except SplitError as error:
        return {"refused": str(error), "nodes": list(error.nodes)}
    parts = {}
    for node in flow.nodes:
        parts.setdefault(", ".join(map(str, plan.places.get(node, ()))), []).append(node.name)
    found = {"parts": {key: " ".join(names) for key, names in parts.items()}, "note": plan.note}
    found["described"] = [[str(p.key), str(p.device), p.call, p.replicas] for p in plan.parts.values()]
    if plan.claim is not None:
        claim = plan.claim
        found["claim"] = [claim.objective, claim.value, claim.bound, claim.solver, str(claim.limiting), claim.evenness]
        found["told"] = [str(claim), claim.optimal]
    if isinstance(graph, Joint) and isinstance(step := graph.split(plan, prices), StagedStep):
        found["stages"] = [[s.forward, s.backward, s.saved_bytes, s.temporary_bytes] for s in step.stage_costs(prices)]
    return found


LONG = ("devices slow", "devices free", "devices latency slow", "stages zbv", "pipeline 34 KiB", "pipeline offload")


def names(table):
    """Names of plans, of which those that take long are campaigns."""
    return [pytest.param(name, marks=pytest.mark.campaign if name in LONG else ()) for name in table]


@pytest.mark.parametrize("name", names(FORWARD))
def test_a_plan_of_a_model(name):
    assert_stored_row("policies/plans.json", name, row_of(*forward(), FORWARD[name]))


@pytest.mark.parametrize("name", names(MEMORY))
def test_a_plan_within_memory(name):
    assert_stored_row("policies/memory plans.json", name, row_of(*chain(), MEMORY[name]))


@pytest.mark.parametrize("name", names(JOINT))
def test_a_plan_of_a_training_step(name):
    assert_stored_row("policies/joint plans.json", name, row_of(*joint(64, 16, 32), JOINT[name]))


@pytest.mark.parametrize("name", names(PIPELINES))
def test_a_pipeline_of_a_training_step(name):
    assert_stored_row("policies/pipelines.json", name, row_of(*joint(32), PIPELINES[name]))
