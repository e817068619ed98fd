"""The price of links for replicated stages: transfers of values, and the all-reduce of gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from splitkit.costs import Links
from splitkit.pipeline.replication_costs import ring_seconds
from splitkit.search.placement_model import TransferTimes
from splitkit.solvers.placement.problem import Floats


@dataclass(frozen=True, eq=False)
class ReplicaLinks:
    """Links between devices that are assigned to stages in a row.

    A message between stages of a and b replicas takes as long as the largest share that one device sends or receives,
    1 / min(a, b), over the slowest link between the two stages; a ring runs at the pace of its slowest link.

    Attributes:
        latency: (n, n) seconds.
        bandwidth: (n, n) bytes per second; infinite on the diagonal.
        again: how often a value crosses: twice in training.
    """

    latency: Floats
    bandwidth: Floats
    again: int = 1

    @classmethod
    def over(cls, links: Links, devices: Sequence[Hashable], *, training: bool) -> ReplicaLinks:
        """Return the links between these devices (SK322 if two have none)."""
        return cls(*links.to_arrays(devices), 2 if training else 1)

    def seconds(self, messages: Floats, before: int, left: int, right: int) -> Floats:
        """Return (p,) seconds of (2, p) message counts and bytes over a border behind ``before`` devices, between
        stages with ``left`` and ``right`` replicas.
        """
        here, there = slice(before - left, before), slice(before, before + right)
        wait, speed = self._slowest(here, there, min(left, right))
        total: Floats = self.again * (wait * messages[0] + messages[1] / speed)
        return total

    def ring(self, before: int, replicas: int, nbytes: Floats) -> Floats:
        """Return the seconds in which the replicas of a stage behind ``before`` devices all-reduce ``nbytes`` each."""
        own = np.arange(before, before + replicas)
        ahead = np.roll(own, -1)
        slowest = float(self.latency[own, ahead].max()), float(self.bandwidth[own, ahead].min())
        return np.array([ring_seconds(float(n), replicas, *slowest) for n in nbytes.tolist()])

    def travel(self, replicas: Sequence[int]) -> TransferTimes:
        """Return the price of values between stages with these replicas, as if all took turns on one link."""
        ends = list(accumulate(replicas))
        places = [slice(end - count, end) for end, count in zip(ends, replicas, strict=True)]
        latency, bandwidth = np.zeros((len(ends),) * 2), np.full((len(ends),) * 2, np.inf)
        for i, here in enumerate(places):
            for j, there in enumerate(places):
                if i != j:
                    pair = self._slowest(here, there, min(replicas[i], replicas[j]))
                    latency[i, j], bandwidth[i, j] = pair
        return TransferTimes(latency, bandwidth, self.again)

    def _slowest(self, here: slice, there: slice, shares: int) -> tuple[float, float]:
        return float(self.latency[here, there].max()), float(self.bandwidth[here, there].min()) * shares
