"""The Pareto frontier of saved bytes and recompute time of a joint graph, by parametric minimum cuts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.search.recompute.network import CutNetwork, explained
from splitkit.solvers.cuts.parametric import Corner, NestedCuts, TwoCosts
from splitkit.training.choices import Choice, Savings


@dataclass(frozen=True, eq=False)
class Hull:
    """The lower convex hull of (saved bytes, recompute seconds) over all legal choices.

    Attributes:
        cutting: the network of cuts.
        network: the same with whole costs: bytes, and ticks of time.
        tick: seconds; time is rounded down to these, 2**-40 of all recompute together or so.
        corners: by rising bytes; the last recomputes nothing that it need not.
    """

    cutting: CutNetwork
    network: TwoCosts
    tick: float
    corners: tuple[Corner, ...]

    @classmethod
    def of(cls, problem: Savings) -> Hull:
        """Return the hull of a problem with about two cuts per corner, each smaller than the last.

        Raises:
            NoPlanError: SK303 when something that backward needs can be neither saved nor recomputed.
        """
        cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        network, tick = whole_network(cutting)
        with explained(cutting, problem.why):
            return cls(cutting, network, tick, tuple(network.corners()))

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The choice at each corner."""
        return tuple(self.cutting.choice(corner.side) for corner in self.corners)

    @cached_property
    def _chains(self) -> dict[int, NestedCuts]:
        return {}

    def within(self, nbytes: int) -> Choice | None:
        """Return the choice on the hull with the most saved bytes up to ``nbytes``, or ``None`` if there is none.

        Between two corners whole groups of ops switch one by one, such as the layers of a transformer, the last ones
        first: each of these choices lies on the hull too.
        """
        index = bisect_right([corner.first for corner in self.corners], nbytes) - 1
        if index < 0:
            return None
        if index + 1 == len(self.corners):
            return self.choices[index]
        if index not in self._chains:
            start, end = self.corners[index : index + 2]
            self._chains[index] = self.network.between(start, end, self.cutting.rank)
        return self.cutting.choice(self._chains[index].last_within(nbytes).side)

    def bound(self, nbytes: float) -> float:
        """Return a lower bound on the seconds of every choice that saves at most ``nbytes``; infinite if none does."""
        if nbytes < self.corners[0].first:
            return float("inf")
        firsts, seconds = [c.first for c in self.corners], [c.second * self.tick for c in self.corners]
        return float(np.interp(nbytes, firsts, seconds))


def whole_network(cutting: CutNetwork) -> tuple[TwoCosts, float]:
    """Return the network with whole costs, bytes and ticks of time, and the seconds of a tick."""
    return TwoCosts.of(cutting.size, cutting.tails, cutting.heads, (cutting.nbytes, cutting.seconds))
