"""A lower bound on the greatest load of stages, by dividing the cost of each net among the borders (Lagrangian prices).

A net that crosses any border is paid for at least twice, however many borders it crosses, so its cost is divided among
the borders. With these shares as prices, each border costs at least as much as the cheapest border that has the amount
of work before it that a limit on the loads asks for (`BalancedCutBound`). All stages together have all the work, and
twice the sum of these costs. The work before a border, with the shares of the borders up to it, must fit the devices
before it, and likewise behind it, so the windows of the borders narrow as the bounds grow. The shares are improved by
subgradient steps, which move the cost of a net to the borders that it crosses (Held, Wolfe and Crowder 1974; the step
length is Polyak's, 1969).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.stages.border_bound import BITS, BorderBound, Closures, borders_apply

# Lower bounds on the cost of the nets that cross a border with a given amount of work before it.
#
# Work gets a price (a Lagrangian relaxation). For any price of a unit of work, over all ideals with at least ``least``
# work::
#
#     cost(ideal) >= min over all ideals of (cost + price * work outside) - price * (all work - least work)
#
# and likewise for the ideals with at most a given amount; the minimum is a minimum cut. The best price is found by
# Newton's method along the convex hull of costs over work. Where the hull leaves a gap, the window is divided by
# branching on a unit: it is before the border together with everything before it, or behind the border together with
# everything after it. Either way, the limits on work then decide more units.


_PRICES = 12  # prices tried for one window
_ROUNDS = 3  # times that a window is narrowed
_CLOSE = 64  # differences in cost that do not matter, out of 2 ** 28


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


MOST_UNITS = 1500
"""In larger cores a minimum cut takes too long."""
_DIVISIONS, _EACH = 6, 8  # the most divisions of a border's window; about how many minimum cuts each takes
_LIMITS, _STEPS = 5, 10  # limits, and subgradient steps for each
_LENGTH = 0.7  # factor on the length of Polyak's step
_NEAR = 0.3  # of the mean work of a stage: so near a border is a net that may cross it
_LITTLE = 5e-4  # relative; where there is less to gain, another limit is tried
_TRIALS = 2  # steps in a row that may fail to improve the bound
_MARGIN = 1e-9  # relative; larger than the rounding errors of sums of floats


def lagrangian_bound(core: Core, low: int, high: int, rank: Ints, flows: int, clock: Clock) -> int:
    """Return the greatest load below which the shares prove that no stages exist, or ``low``.

    Args:
        core: the core, with its units (n).
        low: a lower bound that is already known.
        high: a value that some stages attain.
        rank: (n,) stages that attain it, from which the first shares are made.
        flows: the number of minimum cuts after which the search ends.
        clock: the deadline.
    """
    devices = sum(len(kind.devices) for kind in core.kinds)
    if devices < 2 or not borders_apply(core) or core.size > MOST_UNITS or not core.costs.any():
        return low
    return LagrangianBound(core, rank).bound(low, high, flows, clock)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known about all borders (k - 1) under some limit.

    Attributes:
        windows: the window of each border.
        before: (k - 1,) a lower bound on what the devices before each border pay for nets.
        behind: (k - 1,) a lower bound on what the devices behind it pay.
        least: a lower bound on the greatest load, from what all devices pay.
    """

    windows: tuple[BorderWindow, ...]
    before: Floats
    behind: Floats
    least: float = 0.0


class LagrangianBound:
    """The shares of the borders in the cost of the nets.

    Args:
        core: the core, with its units (n) and nets (m), on k devices; none is a CPU.
        rank: (n,) stages from which the first shares are made.

    Attributes:
        costs: (k - 1, m) whole numbers; their sum over the borders is at most the cost of each net.
    """

    def __init__(self, core: Core, rank: Ints) -> None:
        borders = BorderBound.of(core)
        self._core = core
        self._balanced = BalancedCutBound(core, borders.cost, borders.closed)
        self._reach = np.array(borders.reach)
        self.costs: Ints = self._whole(self._first(rank) * self._balanced.cost)

    def bound(self, low: int, high: int, flows: int, clock: Clock) -> int:
        """Compute the bound; see `lagrangian_bound`."""
        known, most = self._nothing(), high
        for _ in range(_LIMITS):
            limit = (low + most + 1) // 2
            if limit <= low or self._balanced.flows >= flows or clock.is_over():
                break
            found = self._below(limit, low, known, flows, clock)
            if found is None:
                low, known = limit, self._nothing()
                continue
            # Either the optimum is below the limit, and then at least what shares say, or it is not.
            low, most, known = max(low, min(limit, int(found.least))), limit, found
            if most - low < _LITTLE * most:
                break
        return low

    def _below(self, limit: int, low: int, known: _Known, flows: int, clock: Clock) -> _Known | None:
        """Return what is known about stages with all loads below a limit; None if there are none.

        Args:
            limit: at most the limit for which ``known`` holds.
            low: a lower bound; subgradient steps that stay below it are soon given up.
            known: what was known before; it is extended.
            flows: the number of minimum cuts after which the search ends.
            clock: the deadline.
        """
        for step in range(1, _STEPS + 1):
            was = known.least
            left = (flows - self._balanced.flows) // (_EACH * len(self.costs))
            found = self._stepped(limit, known, max(0, min(_DIVISIONS, left)))
            if found is None:
                return None
            known = found
            if step == _TRIALS and known.least < low:
                break
            if self._balanced.flows >= flows or clock.is_over() or known.least < was * (1 + _LITTLE):
                break
        return known

    def _stepped(self, limit: int, known: _Known, divisions: int) -> _Known | None:
        """Take one subgradient step; return None if no stages are below the limit."""
        balanced, count = self._balanced, len(self.costs)
        room = np.minimum(self._reach * (limit / balanced.unit), BIG) * (1 + _MARGIN) + 1
        windows, costs = list(known.windows), np.zeros(count)
        crossing = np.zeros(self.costs.shape)
        for border in sorted(range(count), key=lambda border: abs(2 * border + 1 - count)):
            least = balanced.total + known.behind[border] - room[count - border]
            most = room[border + 1] - known.before[border]
            window = balanced.narrowed(replace(windows[border], least=float(least), most=float(most)))
            cut = None if window is None else balanced.least(self.costs[border], window, divisions)
            if window is None or cut is None or cut.bound == np.inf:
                return None
            windows[border], costs[border], crossing[border] = window, max(0.0, cut.bound), cut.crossing
        paid = balanced.total + 2 * float(costs.sum())
        if paid * (1 - _MARGIN) > room[-1]:
            return None
        before = np.maximum(known.before, np.cumsum(costs))
        behind = np.maximum(known.behind, np.cumsum(costs[::-1])[::-1])
        least = max(known.least, paid * (1 - _MARGIN) / self._reach[-1] * balanced.unit)
        self._move(crossing, (float(room[-1]) - paid) / 2)
        return _Known(tuple(windows), before, behind, least)

    def _move(self, crossing: Floats, lacking: float) -> None:
        """Move shares to the borders that nets cross, from the borders that they do not cross."""
        direction = crossing - crossing.mean(axis=0)
        square = float(np.square(direction).sum())
        if square > 0:
            self.costs = self._whole(self.costs + _LENGTH * lacking / square * direction)

    def _whole(self, wanted: Floats) -> Ints:
        """Round the wanted shares to whole numbers, none negative, with sums of at most the costs."""
        # The nearest point of a simplex (Held, Wolfe, Crowder 1974): what is above a threshold, one for each net.
        sinking = -np.sort(-wanted, axis=0)
        number = np.arange(1, len(wanted) + 1)[:, None]
        excess = (np.cumsum(sinking, axis=0) - self._balanced.cost) / number
        last = np.maximum((sinking > excess).sum(axis=0) - 1, 0)
        near: Ints = np.floor(np.maximum(0.0, wanted - excess[last, np.arange(wanted.shape[1])])).astype(np.int64)
        near[:, near.sum(axis=0) > self._balanced.cost] -= 1
        return np.maximum(near, 0)

    def _nothing(self) -> _Known:
        """Return a record in which nothing is known."""
        count = len(self.costs)
        return _Known((self._balanced.open(),) * count, np.zeros(count), np.zeros(count))

    def _first(self, rank: Ints) -> Floats:
        """Return (k - 1, m) first shares: equal for the borders that a net crosses, else by their distance."""
        core, balanced = self._core, self._balanced
        borders = np.arange(1, len(self._reach) - 1)[:, None]
        place = balanced.places(rank)
        ends = np.array([balanced.work[rank < border].sum() for border in borders[:, 0]])
        low, high = np.full((2, core.costs.shape[1]), np.inf), np.full((2, core.costs.shape[1]), -np.inf)
        for row, at in enumerate((rank, place)):
            np.minimum.at(low[row], core.pin_nets, at[core.pins])
            np.maximum.at(high[row], core.pin_nets, at[core.pins])
        crossed = ((low[0] < borders) & (high[0] >= borders)).astype(np.float64)
        apart = np.abs((low[1] + high[1]) / 2 - ends[:, None]) / (balanced.total / len(self._reach))
        near = np.exp(-np.square(np.minimum(apart - apart.min(axis=0), 10 * _NEAR) / _NEAR))
        weight = np.where(crossed.any(axis=0), crossed, near)
        first: Floats = weight / weight.sum(axis=0)
        return first
