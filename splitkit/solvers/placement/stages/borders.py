"""A lower bound on the greatest load of stages from the least that must cross each border between them.

Border *j* divides the units of the first *j* stages, an ideal, from the others. Below a limit on the loads it lies in
a window: a unit whose descendants are more work than the other stages take is before it, and one whose ancestors are
more than the first *j* take is after it. The least cost of the nets that cross between the two is a minimum cut (a
closure problem: Picard 1976). Whatever crosses is paid on both sides, which leaves less for work: the windows narrow,
the cuts grow, until nothing changes any more, or some unit would have to be on both sides: then no stages are below the
limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Bools, Ints
from splitkit.solvers.placement.stages.closure import BITS, Closures
from splitkit.solvers.placement.stages.ladder import ratios

MOST_UNITS = 4000
"""More units than these have too many pairs of units that depend on each other."""
_HALVINGS = 12
_ROUNDS = 8  # of narrower windows and greater cuts, for each limit


def by_borders(core: Core, low: int, high: int) -> int:
    """The greatest load below which windows show that there are no stages, or ``low``.

    Args:
        core: whose units.
        low: a bound that is known.
        high: a value that is reached.
    """
    if not applies(core):
        return low
    borders = Borders.of(core)
    for _ in range(_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        if borders.windows(middle) is None:
            low = middle
        else:
            high = middle
    return low


def applies(core: Core) -> bool:
    """Whether borders tell anything: a host pays for nothing, and may hold anything."""
    return 0 < core.size <= MOST_UNITS and not any(kind.host for kind in core.kinds)


@dataclass(frozen=True, eq=False)
class Borders:
    """What the windows below all limits have in common.

    Attributes:
        core: whose units (n), with nets (m).
        closed: (n, n) whether the second unit is the first or after it.
        cost: (m,) the least that each device pays for a net, counted as least work.
        before: (n,) the least work of each unit and all before it.
        after: (n,) of each unit and all after it.
        reach: (k + 1,) the least work that so many devices take at most in each unit of their load.
    """

    core: Core
    closed: Bools
    cost: Ints
    before: Ints
    after: Ints
    reach: list[float]

    @classmethod
    def of(cls, core: Core) -> Borders:
        """Of a core that `applies`."""
        speeds = ratios(core)
        # A device of a slow class takes less least work in its time, so what it pays for nets counts for less too.
        paid = [c if r >= 1 else np.floor(c * r).astype(np.int64) for c, r in zip(core.costs, speeds, strict=True)]
        devices = sorted((r for r, kind in zip(speeds, core.kinds, strict=True) for _ in kind.devices), reverse=True)
        reach = [0.0, *np.cumsum(devices).tolist()]
        closed = _descendants(core)
        before, after = _summed(closed.T, core.least_work), _summed(closed, core.least_work)
        return cls(core, closed, np.min(paid, axis=0), before, after, reach)

    def windows(self, limit: int) -> tuple[Bools, Bools] | None:
        """What is known of stages with all loads below a limit; None if there are none.

        Returns two arrays (k + 1, n) for k devices, where stages may be empty: the units that are in the first j stages
        for certain, and those that are in later ones.
        """
        room = [min(BIG, int(reach * (limit - 1) * (1 + 1e-12)) + 1) for reach in self.reach]
        total, last = int(self.core.least_work.sum()), len(room) - 1
        least = np.zeros(last + 1, np.int64)  # what crosses each border at least
        for _ in range(_ROUNDS):
            inside = self.after[None] + least[:, None] > np.array(room[::-1])[:, None]
            outside = self.before[None] + least[:, None] > np.array(room)[:, None]
            if (inside & outside).any():
                return None
            old = least.copy()
            for border in range(1, last):
                least[border] = max(least[border], self._crossing(inside[border], outside[border]))
                if total + 2 * int(least[border]) > room[border] + room[last - border]:
                    return None
            if (least == old).all():
                break
        return inside, outside

    def _crossing(self, inside: Bools, outside: Bools) -> int:
        """The least cost of nets that cross a border with some units before it and some after it, or a little less."""
        if not inside.any() or not outside.any():
            return 0
        shift = max(0, int(self.cost.sum()).bit_length() - BITS)
        return self._closures.least_cost(self.cost >> shift, inside, outside) << shift  # rounded down: lesser costs

    @cached_property
    def _closures(self) -> Closures:
        return Closures(self.core, self.closed)


def _descendants(core: Core) -> Bools:
    """(n, n) whether the second is the first or after it."""
    after: list[list[int]] = [[] for _ in range(core.size)]
    missing = np.zeros(core.size, np.int64)
    before: list[list[int]] = [[] for _ in range(core.size)]
    for unit, then in core.edges.tolist():
        after[unit].append(then)
        before[then].append(unit)
        missing[unit] += 1
    closed: Bools = np.eye(core.size, dtype=np.bool_)
    ready = np.flatnonzero(missing == 0).tolist()
    while ready:
        unit = ready.pop()
        for then in after[unit]:
            closed[unit] |= closed[then]
        for first in before[unit]:
            missing[first] -= 1
            if not missing[first]:
                ready.append(first)
    return closed


def _summed(closed: Bools, work: Ints) -> Ints:
    """(n,) the work of all that each row has."""
    return np.array([work[row].sum() for row in closed], np.int64)
