"""Lower bounds on the cost of the nets that cross a border with a given amount of work before it.

Work gets a price (a Lagrangian relaxation). For any price of a unit of work, over all ideals with at least ``least``
work::

    cost(ideal) >= min over all ideals of (cost + price * work outside) - price * (all work - least work)

and likewise for the ideals with at most a given amount; the minimum is a minimum cut. The best price is found by
Newton's method along the convex hull of costs over work. Where the hull leaves a gap, the window is divided by
branching on a unit: it is before the border together with everything before it, or behind the border together with
everything after it. Either way, the limits on work then decide more units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.stages.closure import BITS, Closures

_PRICES = 12  # prices tried for one window
_ROUNDS = 3  # times that a window is narrowed
_CLOSE = 64  # differences in cost that do not matter, out of 2 ** 28
_MARGIN = 1e-9  # relative; larger than the rounding errors of sums of floats


@dataclass(frozen=True, eq=False)
class BorderWindow:
    """What is known about the place of a border.

    Attributes:
        inside: (n,) the units that are certainly before the border.
        outside: (n,) the units that are certainly behind the border.
        least: the least work before the border.
        most: the most work before the border.
    """

    inside: Bools
    outside: Bools
    least: float
    most: float


@dataclass(frozen=True, eq=False)
class LeastCut:
    """A lower bound on the cost of the nets that cross a border.

    Attributes:
        bound: the bound; infinite if there is no such border.
        crossing: (m,) how much of each net crosses in the cheapest border found, or in a mean of two such borders.
    """

    bound: float
    crossing: Floats


@dataclass(frozen=True, eq=False)
class _End:
    """An ideal at one end of a segment of the hull."""

    ideal: Bools
    work: float
    cost: float


@dataclass(frozen=True, eq=False)
class _Piece:
    """A window, a lower bound on the cost of its borders, and the segment of the hull at the work they must have."""

    window: BorderWindow
    bound: float
    ends: tuple[_End, _End]
    share: float  # of the first end


class BalancedCutBound:
    """Bounds on the borders of a core, with costs scaled so that their sum is below 2 ** 28.

    Args:
        core: the units (n) and the nets (m).
        cost: (m,) what each side pays for a net.
        closed: (n, n) whether the second unit is the first one or a descendant of it.

    Attributes:
        unit: how many units of the core's costs are one unit here.
        work: (n,) the least work of each unit.
        cost: (m,) whole numbers, rounded down.
        total: the sum of all work.
        margin: larger than the rounding errors of sums of work.
    """

    def __init__(self, core: Core, cost: Ints, closed: Bools) -> None:
        self._core, self._closures = core, Closures(core, closed)
        self._closed = closed
        self._after = closed.astype(np.float64)  # for products
        self._sizes = np.diff(core.starts)
        self.unit = 1 << max(0, int(cost.sum()).bit_length() - BITS)
        self.cost: Ints = cost // self.unit
        self.work: Floats = core.least_work / self.unit
        self.total = float(self.work.sum())
        self.margin = _MARGIN * max(1.0, self.total)

    @property
    def flows(self) -> int:
        """The number of minimum cuts computed so far."""
        return self._closures.flows

    def open(self) -> BorderWindow:
        """Return a window in which nothing is known."""
        nothing = np.zeros(self._core.size, np.bool_)
        return BorderWindow(nothing, nothing, 0.0, self.total)

    def places(self, rank: Ints) -> Floats:
        """Return (n,) the work before the middle of each unit, averaged over an order of stages and its ancestors."""
        before, after = self._with(*(np.zeros(self._core.size, np.bool_),) * 2)
        order = np.lexsort((before - after, rank))
        found = np.empty(self._core.size)
        found[order] = np.cumsum(self.work[order]) - self.work[order] / 2
        return found

    def narrowed(self, window: BorderWindow) -> BorderWindow | None:
        """Return the window with the units decided that the limits on work decide; None if no border is possible."""
        inside, outside = window.inside, window.outside
        if window.least > window.most + self.margin:
            return None
        for _ in range(_ROUNDS):
            before, after = self._with(inside, outside)
            in_too = inside | (self.total - after < window.least - self.margin)
            out_too = outside | (before > window.most + self.margin)
            if (in_too & out_too).any():
                return None
            if (in_too == inside).all() and (out_too == outside).all():
                break
            inside, outside = in_too, out_too
        return replace(window, inside=inside, outside=outside)

    def least(self, cost: Ints, window: BorderWindow, divisions: int) -> LeastCut:
        """Return a lower bound on the cost of the nets that cross a border in a window.

        Args:
            cost: (m,) the cost of each net, at most ``self.cost``.
            window: where the border can be.
            divisions: how often the window may be divided, at most.
        """
        number = count()
        first = self._piece(cost, window)
        heap = [] if first is None else [(first.bound, next(number), first)]
        while heap:
            bound, _, piece = heap[0]
            halves = self._halves(piece) if divisions else ()
            if not halves:
                parts = zip(piece.ends, (piece.share, 1 - piece.share), strict=True)
                return LeastCut(bound, np.sum([share * self._crossing(end.ideal) for end, share in parts], axis=0))
            divisions -= 1
            heappop(heap)
            for half in halves:
                found = self._piece(cost, half)
                if found is not None:
                    heappush(heap, (max(bound, found.bound), next(number), found))
        return LeastCut(np.inf, np.zeros(len(cost)))

    def _with(self, inside: Bools, outside: Bools) -> tuple[Floats, Floats]:
        """Return two arrays (n,): the work inside with each unit and its ancestors, and outside with each unit and its
        descendants.
        """
        before = (self.work * ~inside) @ self._after + float(self.work[inside].sum())
        return before, self._after @ (self.work * ~outside) + float(self.work[outside].sum())

    def _halves(self, piece: _Piece) -> tuple[BorderWindow, ...]:
        """Branch on the unit that decides most either way: it is before the border, or behind it."""
        window, (one, other) = piece.window, piece.ends
        free = np.flatnonzero(one.ideal != other.ideal)
        if not len(free):
            return ()
        before, after = self._with(window.inside, window.outside)
        gained = np.minimum(before - self.work[window.inside].sum(), after - self.work[window.outside].sum())
        unit = int(free[gained[free].argmax()])
        return (
            replace(window, inside=window.inside | self._closed[:, unit]),
            replace(window, outside=window.outside | self._closed[unit]),
        )

    def _piece(self, cost: Ints, window: BorderWindow) -> _Piece | None:
        """Bound the borders in a window by prices of work; None if there is no border in it."""
        known = self.narrowed(window)
        if known is None:
            return None
        bound, ideal = self._priced(cost, known, 0.0)
        one = self._end(cost, ideal)
        if known.least <= one.work <= known.most:
            return _Piece(known, bound, (one, one), 1.0)
        aim, last = (known.least, ~known.outside) if one.work < known.least else (known.most, known.inside)
        other = self._end(cost, last)
        if abs(other.work - one.work) < abs(aim - one.work) - self.margin:
            return None
        for _ in range(_PRICES):
            if abs(other.work - one.work) <= self.margin:
                break
            price = (other.cost - one.cost) / (other.work - one.work)
            value, ideal = self._priced(cost, known, price)
            bound, end = max(bound, value), self._end(cost, ideal)
            if end.cost >= one.cost + price * (end.work - one.work) - _CLOSE:  # no ideal is below the line
                break
            one, other = (end, other) if (end.work - aim) * (one.work - aim) > 0 else (one, end)
        apart = other.work - one.work
        share = (other.work - aim) / apart if abs(apart) > self.margin else 1.0
        return _Piece(known, bound, (one, other), min(1.0, max(0.0, share)))

    def _priced(self, cost: Ints, window: BorderWindow, price: float) -> tuple[float, Bools]:
        """Return a lower bound on the cost of borders in a window for one price of work, and the ideal that attains it.

        A positive price is for work behind the border, which is at most all work but the least; a negative one is for
        work before it. The prices of units are rounded down, which never raises the minimum.
        """
        paid = np.minimum(abs(price) * self.work * (1 - _MARGIN), 2.0**BITS).astype(np.int64)
        nothing = np.zeros_like(paid)
        within, without = (nothing, paid) if price > 0 else (paid, nothing)
        flow, ideal = self._closures.least(cost, window.inside, window.outside, within, without)
        if price > 0:
            most = self.total - window.least - float(self.work[window.outside].sum())
        else:
            most = window.most - float(self.work[window.inside].sum())
        return flow - abs(price) * (most + self.margin) if price else float(flow), ideal

    def _end(self, cost: Ints, ideal: Bools) -> _End:
        return _End(ideal, float(self.work[ideal].sum()), float(cost @ self._crossing(ideal)))

    def _crossing(self, ideal: Bools) -> Floats:
        """Return (m,) 1 for each net with a pin inside and a pin outside."""
        if not len(self._sizes):
            return np.zeros(0)
        pins = np.add.reduceat(ideal[self._core.pins].astype(np.int64), self._core.starts[:-1])
        return ((pins > 0) & (pins < self._sizes)).astype(np.float64)
