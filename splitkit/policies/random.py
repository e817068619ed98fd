"""The policy `Random`: a random legal plan, for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from splitkit.checks import count, fraction, settle, whole
from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan, keep_books
from splitkit.plans.rewrite import refine, rematerialize


@dataclass(frozen=True)
class Random:
    """Make a random legal plan, to test an engine, a runtime or a cost model. The same seed gives the same plan.

    Attributes:
        n: the most labels that are used.
        seed: the seed of the random choices.
        parent: the share of nodes left in the parent.
        copies: the share of labels that get copies of the nodes that they read.
    """

    n: int = 4
    seed: int = 0
    parent: float = 0.1
    copies: float = 0.3

    def __post_init__(self) -> None:
        settle(self, "n", count)
        settle(self, "seed", whole)
        for share in ("parent", "copies"):
            settle(self, share, fraction)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Label nodes at random, add random copies, and remove cycles."""
        rng = random.Random(self.seed)
        labels = {n: PARENT if rng.random() < self.parent else rng.randrange(self.n) for n in flow.nodes}
        plan = Plan.of(labels, note=f"random plan {self.seed}")
        for key in plan.parts:
            if rng.random() < self.copies:
                keep = [n for n in flow.nodes if rng.random() < 0.5]
                plan = rematerialize(flow, plan, key, keep)
        return keep_books(flow, refine(flow, plan))
