"""A lower bound on the greatest load of stages, from what all borders together cost: each has its share of each net.

A net that crosses some border is paid for at least twice, however many it crosses. So its cost is shared out among the
borders. By its shares each costs at least what the cheapest border costs that has as much work before it as a limit on
the loads asks for (`Balanced`); and all stages together have all work, and twice the sum of these. Work before a
border, with the shares of the borders up to it, must fit the devices before it, and likewise behind it: so windows
narrow as shares tell more. Shares are improved by subgradient steps, which move the cost of a net to the borders that
it crosses (Held, Wolfe, Crowder 1974; their length is Polyak's, 1969).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Floats, Ints
from splitkit.solvers.placement.stages.balanced import Balanced, Window
from splitkit.solvers.placement.stages.borders import Borders, applies

MOST_UNITS = 1500
"""With more units, a minimum cut takes too long."""
_DIVISIONS, _EACH = 6, 8  # of the window of each border, at most, and minimum cuts that each takes, about
_LIMITS, _STEPS = 5, 10  # limits, and subgradient steps for each
_LENGTH = 0.7  # of Polyak's step
_NEAR = 0.3  # of the mean work of a stage: so near a border is a net that may cross it
_LITTLE = 5e-4  # relative: where there is less to gain, another limit is tried
_TRIALS = 2  # steps that may tell less than was known
_MARGIN = 1e-9  # relative: more than sums of floats are off


def by_shares(core: Core, low: int, high: int, rank: Ints, flows: int, clock: Clock) -> int:
    """The greatest load below which shares show that there are no stages, or ``low``.

    Args:
        core: whose units (n).
        low: a bound that is known.
        high: a value that is reached.
        rank: (n,) stages that reach it, from which the first shares are made.
        flows: minimum cuts, after which it ends.
        clock: told if time ends it.
    """
    devices = sum(len(kind.devices) for kind in core.kinds)
    if devices < 2 or not applies(core) or core.size > MOST_UNITS or not core.costs.any():
        return low
    return Shares(core, rank).bound(low, high, flows, clock)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of all borders (k - 1) below some limit.

    Attributes:
        windows: of each border.
        before: (k - 1,) what the devices before each border pay for nets, at least.
        behind: (k - 1,) what those behind it pay.
        least: the least load by what all pay.
    """

    windows: tuple[Window, ...]
    before: Floats
    behind: Floats
    least: float = 0.0


class Shares:
    """The shares of borders in the cost of nets.

    Args:
        core: whose units (n), with nets (m), on k devices; none is a host.
        rank: (n,) stages from which the first shares are made.

    Attributes:
        costs: (k - 1, m) whole numbers, together up to the cost of each net.
    """

    def __init__(self, core: Core, rank: Ints) -> None:
        borders = Borders.of(core)
        self._core = core
        self._balanced = Balanced(core, borders.cost, borders.closed)
        self._reach = np.array(borders.reach)
        self.costs: Ints = self._whole(self._first(rank) * self._balanced.cost)

    def bound(self, low: int, high: int, flows: int, clock: Clock) -> int:
        """See `by_shares`."""
        known, most = self._nothing(), high
        for _ in range(_LIMITS):
            limit = (low + most + 1) // 2
            if limit <= low or self._balanced.flows >= flows or clock.is_over():
                break
            found = self._below(limit, low, known, flows, clock)
            if found is None:
                low, known = limit, self._nothing()
                continue
            if found.least < low:
                break
            # Either the optimum is below the limit, and then at least what shares say, or it is not.
            low, most, known = max(low, min(limit, int(found.least))), limit, found
            if most - low < _LITTLE * most:
                break
        return low

    def _below(self, limit: int, low: int, known: _Known, flows: int, clock: Clock) -> _Known | None:
        """What is known of stages with all loads below a limit; None if there are none.

        Args:
            limit: up to the one for which ``known`` holds.
            low: a bound; where steps stay below it, there are few.
            known: before; it is added to.
            flows: minimum cuts, after which it ends.
            clock: told if time ends it.
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
        """One subgradient step; None if there are no stages below the limit."""
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
        """Shares to the borders that nets cross, from those that they do not cross."""
        direction = crossing - crossing.mean(axis=0)
        square = float(np.square(direction).sum())
        if square > 0:
            self.costs = self._whole(self.costs + _LENGTH * lacking / square * direction)

    def _whole(self, wanted: Floats) -> Ints:
        """Whole shares, none below 0, together up to the costs, as near as can be to those that are wanted."""
        # The nearest point of a simplex (Held, Wolfe, Crowder 1974): what is above a threshold, one for each net.
        sinking = -np.sort(-wanted, axis=0)
        number = np.arange(1, len(wanted) + 1)[:, None]
        excess = (np.cumsum(sinking, axis=0) - self._balanced.cost) / number
        last = np.maximum((sinking > excess).sum(axis=0) - 1, 0)
        near: Ints = np.floor(np.maximum(0.0, wanted - excess[last, np.arange(wanted.shape[1])])).astype(np.int64)
        near[:, near.sum(axis=0) > self._balanced.cost] -= 1
        return np.maximum(near, 0)

    def _nothing(self) -> _Known:
        """Nothing is known."""
        count = len(self.costs)
        return _Known((self._balanced.open(),) * count, np.zeros(count), np.zeros(count))

    def _first(self, rank: Ints) -> Floats:
        """(k - 1, m) the share of each border: of those that a net crosses, or by how near they are to its pins."""
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
