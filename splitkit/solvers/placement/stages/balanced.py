"""The least cost of nets that cross a border with so much work before it, from below.

Work is priced (a Lagrangian relaxation). Whatever the price of a unit of work, of all ideals with at least so much::

    cost(ideal) >= min over all ideals of (cost + price * work outside) - price * (all work - least work)

and likewise of those with at most so much; the minimum is a minimum cut. The best price is found by Newton's method
along the hull of costs over work. What the hull leaves open is divided: some unit is before the border with all before
it, or behind it with all after it, and for the work of either there are more units that have no choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.stages.closure import BITS, Closures

_PRICES = 12  # that are tried for one window
_ROUNDS = 3  # of narrower windows
_CLOSE = 64  # costs that do not matter, of 2 ** 28
_MARGIN = 1e-9  # relative: more than sums of floats are off


@dataclass(frozen=True, eq=False)
class Window:
    """What is known of a border.

    Attributes:
        inside: (n,) the units that are before it for certain.
        outside: (n,) those that are behind it for certain.
        least: work before it, at least.
        most: work before it, at most.
    """

    inside: Bools
    outside: Bools
    least: float
    most: float


@dataclass(frozen=True, eq=False)
class LeastCut:
    """What nets that cross a border cost.

    Attributes:
        bound: at least; infinite if there is no such border.
        crossing: (m,) what part of each net crosses a border, or a mean of two, that costs about so little.
    """

    bound: float
    crossing: Floats


@dataclass(frozen=True, eq=False)
class _End:
    """An ideal at an end of a piece of the hull."""

    ideal: Bools
    work: float
    cost: float


@dataclass(frozen=True, eq=False)
class _Piece:
    """A window, a bound on what its borders cost, and the piece of the hull at the work that they must have."""

    window: Window
    bound: float
    ends: tuple[_End, _End]
    share: float  # of the first end


class Balanced:
    """Borders of a core, measured in units so great that all costs together are below 2 ** 28.

    Args:
        core: whose units (n), with nets (m).
        cost: (m,) what each side pays for a net.
        closed: (n, n) whether the second unit is the first or after it.

    Attributes:
        unit: how much of the core one is here.
        work: (n,) least work.
        cost: (m,) whole numbers, rounded down.
        total: all work.
        margin: more than sums of work are off.
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
        """How many minimum cuts were made."""
        return self._closures.flows

    def open(self) -> Window:
        """A window in which nothing is known."""
        nothing = np.zeros(self._core.size, np.bool_)
        return Window(nothing, nothing, 0.0, self.total)

    def places(self, rank: Ints) -> Floats:
        """(n,) the work before the middle of each unit, in an order of stages, and in each of what is before units."""
        before, after = self._with(*(np.zeros(self._core.size, np.bool_),) * 2)
        order = np.lexsort((before - after, rank))
        found = np.empty(self._core.size)
        found[order] = np.cumsum(self.work[order]) - self.work[order] / 2
        return found

    def narrowed(self, window: Window) -> Window | None:
        """With the units that work leaves no choice for; None if there is no such border."""
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

    def least(self, cost: Ints, window: Window, divisions: int) -> LeastCut:
        """The least cost of nets that cross a border in a window, or less.

        Args:
            cost: (m,) of each net, up to ``self.cost``.
            window: where the border is.
            divisions: of what is open, at most.
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
        """(n,) the work inside and of each unit and all before it; that outside and of each unit and all after it."""
        before = (self.work * ~inside) @ self._after + float(self.work[inside].sum())
        return before, self._after @ (self.work * ~outside) + float(self.work[outside].sum())

    def _halves(self, piece: _Piece) -> tuple[Window, ...]:
        """The window with a unit before the border, and with it behind: one that makes much known either way."""
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

    def _piece(self, cost: Ints, window: Window) -> _Piece | None:
        """What prices of work tell of a window; None if there is no border in it."""
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

    def _priced(self, cost: Ints, window: Window, price: float) -> tuple[float, Bools]:
        """What borders in a window cost at least, by a price of work, and the ideal that is best then.

        A price above 0 is for work behind the border, of which there is at most all but the least; one below 0 is for
        work before it. Prices of units are rounded down, which makes the minimum no greater.
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
        """(m,) 1 for nets with a pin inside and a pin outside."""
        if not len(self._sizes):
            return np.zeros(0)
        pins = np.add.reduceat(ideal[self._core.pins].astype(np.int64), self._core.starts[:-1])
        return ((pins > 0) & (pins < self._sizes)).astype(np.float64)
