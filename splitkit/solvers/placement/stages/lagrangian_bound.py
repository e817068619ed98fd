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

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Floats, Ints
from splitkit.solvers.placement.stages.balanced_cut_bound import BalancedCutBound, BorderWindow
from splitkit.solvers.placement.stages.border_bound import BorderBound, borders_apply

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
