"""The lower convex hull of saved bytes and recompute time of one stage, found only where it is asked for."""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np

from splitkit.search.recompute.network import CutNetwork, explained
from splitkit.search.recompute.pareto_cuts import whole_network
from splitkit.solvers.cuts.parametric import Corner
from splitkit.solvers.cuts.quick_cuts import QuickCuts
from splitkit.training.choices import Choice, Savings

_NEARLY = 1e-9
"""Relative: a corner so little below the line of its neighbours is none."""


class StageHull:
    """A hull between its two exact ends; corners between them are found by need, by quick cuts.

    Attributes:
        problem: the problem of the stage.
        tick: seconds of one unit of the corners' second cost.
        corners: those found so far, by rising bytes.
    """

    def __init__(self, problem: Savings) -> None:
        self.problem = problem
        self.cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        self._network, self.tick = whole_network(self.cutting)
        with explained(self.cutting, problem.why):
            start, end = self._network.ends()
        self.corners = [start, end] if end.second < start.second else [start]
        self._quick = QuickCuts(self._network) if len(self.corners) > 1 else None
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}
        """First bytes of two corners between which there is none -> rate, and the bound at that rate."""

    def _settle(self, index: int) -> bool:
        """Look for a corner between two neighbours; return whether there is one."""
        low, high = self.corners[index : index + 2]
        key = (low.first, high.first)
        if key in self._lines or self._quick is None:
            return False
        rate = (high.first - low.first) / (low.second - high.second)
        found = self._quick.cut(rate)
        inside = low.first < found.first < high.first and high.second < found.second < low.second
        if inside and found.first + rate * found.second < (low.first + rate * low.second) * (1 - _NEARLY):
            insort(self.corners, Corner(found.side, found.first, found.second), key=lambda c: c.first)
            return True
        self._lines[key] = rate, min(found.bound, low.first + rate * low.second)
        return False

    def _segment(self, nbytes: float) -> int:
        """Return the index of the corner below so many bytes, -1 if there is none; its segment has no corner inside."""
        while True:
            index = bisect_right([c.first for c in self.corners], nbytes) - 1
            if index < 0 or index + 1 == len(self.corners) or not self._settle(index):
                return index

    def bound(self, nbytes: float) -> float:
        """Return a lower bound on the seconds of every choice that saves at most ``nbytes``; infinite if none does."""
        index = self._segment(nbytes)
        if index < 0:
            return float("inf")
        low = self.corners[index]
        if index + 1 == len(self.corners):
            return low.second * self.tick
        rate, least = self._lines[low.first, self.corners[index + 1].first]
        return max(self.corners[-1].second, (least - nbytes) / rate) * self.tick

    def least(self, price: float, weight: float) -> tuple[float, Corner]:
        """Return a lower bound on ``price * bytes + weight * seconds`` of every choice, and the best corner.

        The bound is a weighted sum of the lines left and right of the corner. Both lines hold for all choices, so a sum
        with positive weights does too.
        """
        ticks = weight * self.tick
        while True:
            index = min(
                range(len(self.corners)), key=lambda k: price * self.corners[k].first + ticks * self.corners[k].second
            )
            if not any(self._settle(k) for k in (index, index - 1) if 0 <= k < len(self.corners) - 1):
                break
        best = self.corners[index]
        if not price or not ticks or len(self.corners) == 1:  # one of the two exact ends
            return price * self.corners[0].first + ticks * self.corners[-1].second, best
        low_rate, low_least = 0.0, float(self.corners[0].first)
        if index:
            low_rate, low_least = self._lines[self.corners[index - 1].first, best.first]
        if index + 1 == len(self.corners):
            rest = max(0.0, ticks - price * low_rate)
            return price * low_least + rest * self.corners[-1].second, best
        high_rate, high_least = self._lines[best.first, self.corners[index + 1].first]
        rate = min(max(ticks / price, low_rate), high_rate)
        share = (rate - low_rate) / (high_rate - low_rate) if high_rate > low_rate else 0.0
        return price * ((1 - share) * low_least + share * high_least), best

    def around(self, nbytes: float) -> list[Choice]:
        """Return the choices at the corners around so many bytes, and those between them on the hull."""
        index = self._segment(nbytes)
        if index < 0:
            return []
        found = [self.choice(self.corners[index])]
        if index + 1 < len(self.corners):
            start, end = self.corners[index : index + 2]
            try:
                chain = self._network.between(start, end, self.cutting.rank)
            except AssertionError:  # the corners are not quite on the hull
                chain = None
            found += [] if chain is None else [self.choice(chain.corner(s)) for s in range(1, len(chain) - 1)]
            found.append(self.choice(end))
        return found

    def all_corners(self) -> list[Choice]:
        """Return the choices at all corners."""
        index = 0
        while index + 1 < len(self.corners):
            if not self._settle(index):
                index += 1
        return [self.choice(corner) for corner in self.corners]

    def choice(self, corner: Corner) -> Choice:
        """Return the choice at a corner."""
        return self.cutting.choice(corner.side)
