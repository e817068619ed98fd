"""What stages of several devices pay over links: for values that cross, and for gradients that are added up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from splitkit.costs import Links
from splitkit.pipeline.replication import ring_seconds
from splitkit.search.placing import Travel
from splitkit.solvers.placement.problem import Floats


@dataclass(frozen=True, eq=False)
class ReplicaLinks:
    """Links between devices that are handed out in a row, so many to each stage.

    A message between stages of a and b replicas takes as long as the largest share that a device sends or receives,
    1 / min(a, b), over the slowest link between the two; a ring goes at the pace of its slowest link.

    Attributes:
        latency: (n, n) seconds.
        bandwidth: (n, n) bytes a second; infinite on the diagonal.
        again: how often a value crosses: twice in training.
    """

    latency: Floats
    bandwidth: Floats
    again: int = 1

    @classmethod
    def over(cls, links: Links, devices: Sequence[Hashable], *, training: bool) -> ReplicaLinks:
        """Links between these devices (SK322 if two have none)."""
        return cls(*links.to_arrays(devices), 2 if training else 1)

    def seconds(self, messages: Floats, before: int, left: int, right: int) -> Floats:
        """(p,) seconds of (2, p) numbers of messages and their bytes, over a border with so many devices before it,
        between stages of so many replicas.
        """
        here, there = slice(before - left, before), slice(before, before + right)
        wait, speed = self._slowest(here, there, min(left, right))
        total: Floats = self.again * (wait * messages[0] + messages[1] / speed)
        return total

    def ring(self, before: int, replicas: int, nbytes: Floats) -> Floats:
        """Seconds in which the replicas of a stage, with so many devices before them, add up so many bytes each."""
        own = np.arange(before, before + replicas)
        ahead = np.roll(own, -1)
        slowest = float(self.latency[own, ahead].max()), float(self.bandwidth[own, ahead].min())
        return np.array([ring_seconds(float(n), replicas, *slowest) for n in nbytes.tolist()])

    def travel(self, replicas: Sequence[int]) -> Travel:
        """What values cost between stages of so many replicas each, as if all took turns on one link."""
        ends = list(accumulate(replicas))
        places = [slice(end - count, end) for end, count in zip(ends, replicas, strict=True)]
        latency, bandwidth = np.zeros((len(ends),) * 2), np.full((len(ends),) * 2, np.inf)
        for i, here in enumerate(places):
            for j, there in enumerate(places):
                if i != j:
                    pair = self._slowest(here, there, min(replicas[i], replicas[j]))
                    latency[i, j], bandwidth[i, j] = pair
        return Travel(latency, bandwidth, self.again)

    def _slowest(self, here: slice, there: slice, shares: int) -> tuple[float, float]:
        return float(self.latency[here, there].max()), float(self.bandwidth[here, there].min()) * shares
