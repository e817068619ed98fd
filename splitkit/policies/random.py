"""A random legal plan: random labels, random nodes left in the host, random copies."""

from __future__ import annotations

import random
from dataclasses import dataclass

from splitkit.checks import count, fraction, settle, whole
from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import HOST
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine, rematerialize


@dataclass(frozen=True)
class Random:
    """Any legal plan, to try an engine, a runtime or a cost model on. The same seed gives the same plan.

    Attributes:
        n: at most this many labels.
        seed: which plan.
        host: the share of nodes left in the host.
        copies: the share of labels into which what they read is copied.
    """

    n: int = 4
    seed: int = 0
    host: float = 0.1
    copies: float = 0.3

    def __post_init__(self) -> None:
        settle(self, "n", count)
        settle(self, "seed", whole)
        for share in ("host", "copies"):
            settle(self, share, fraction)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Label, copy, refine."""
        dice = random.Random(self.seed)
        labels = {n: HOST if dice.random() < self.host else dice.randrange(self.n) for n in flow.nodes}
        plan = Plan.of(labels, note=f"random plan {self.seed}")
        for key in plan.parts:
            if dice.random() < self.copies:
                keep = [n for n in flow.nodes if dice.random() < 0.5]
                plan = rematerialize(flow, plan, key, keep)
        return refine(flow, plan)
