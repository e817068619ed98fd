"""Draws the pictures of docs/policies.md: one small GPT-2 under each policy. ``python docs/gallery.py`` stores them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import splitkit as sk
from splitkit.extend import Plan
from splitkit.plans.policy import Policy
from splitkit.policies import (
    AroundOps,
    Buckets,
    Budget,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    RecomputeAll,
    Remat,
    SaveAll,
    Stages,
)
from splitkit.testing import models

FOLDER = Path(__file__).parent / "gallery"

FORWARD: dict[str, Policy] = {
    "stages": Stages(4, links="nvlink4"),
    "devices": Devices(["h200", "a100"], links="nvlink4"),
    "memory_budget": MemoryBudget("1MiB"),
    "expert": Expert(4),
    "around_ops": AroundOps(["aten.scaled_dot_product_attention"]),
    "buckets": Buckets("300KiB"),
}
"""Policies for a graph of forward, by the names of their files."""

TRAINING: dict[str, Policy] = {
    "save_all": SaveAll(),
    "min_cut": MinCut(),
    "budget": Budget(0.6),
    "least": Budget("least"),
    "remat": Remat(keep=["aten.mm", "aten.addmm"]),
    "recompute_all": RecomputeAll(),
}
"""Policies for a training step."""


def plans(names: frozenset[str] = frozenset({*FORWARD, *TRAINING})) -> Iterator[tuple[str, Plan]]:
    """Yield the plans with these names."""
    example = models.build("gpt2", layers=4, width=64, heads=4, vocab=2000, batch=2, seq=32)
    if names & FORWARD.keys():
        gm = sk.capture(example.model, **example.kwargs)
        costs = sk.costs.roofline(gm, device="h200")
        yield from ((name, sk.plan(gm, policy, costs)) for name, policy in FORWARD.items() if name in names)
    if names & TRAINING.keys():
        joint = sk.capture_joint(example.model, **example.kwargs)
        prices = sk.costs.roofline(joint.graph_module, "h200")
        yield from ((name, joint.split(policy, prices).plan) for name, policy in TRAINING.items() if name in names)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, plan in plans():
        plan.to_svg(FOLDER / f"{name}.svg")
        print(f"{name}: {plan.note}")
