"""A lower bound on the greatest load of stages, from the least cost of crossing each border between them.

Border *j* divides the units of the first *j* stages, an ideal, from the rest. Under a limit on the loads, the border
lies in a window: a unit whose descendants have more work than the later stages can take is before it, and a unit whose
ancestors have more work than the first *j* stages can take is behind it. The least cost of the nets that cross
somewhere in the window is a minimum cut (a closure problem: Picard 1976). Both sides pay for the nets that cross, which
leaves them less room for work, so the windows narrow and the cuts grow. This is repeated until nothing changes, or
until some unit would have to be on both sides, which proves that no stages keep to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Bools, Ints
from splitkit.solvers.placement.stages.closure import BITS, Closures
from splitkit.solvers.placement.stages.device_steps import class_speeds

MOST_UNITS = 4000
"""Larger cores have too many pairs of units that depend on each other: the closure is an n x n matrix."""
_HALVINGS = 12
_ROUNDS = 8  # times that windows are narrowed and cuts recomputed, for each limit


def border_bound(core: Core, low: int, high: int) -> int:
    """Return the greatest load below which the windows prove that no stages exist, or ``low``.

    Args:
        core: the core whose units are placed.
        low: a lower bound that is already known.
        high: a value that some stages attain.
    """
    if not borders_apply(core):
        return low
    borders = BorderBound.of(core)
    for _ in range(_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        if borders.windows(middle) is None:
            low = middle
        else:
            high = middle
    return low


def borders_apply(core: Core) -> bool:
    """Return whether borders give a bound: a CPU pays for no nets and may hold anything, so with one there is none."""
    return 0 < core.size <= MOST_UNITS and not any(kind.cpu for kind in core.kinds)


@dataclass(frozen=True, eq=False)
class BorderBound:
    """The data that the windows for all limits share.

    Attributes:
        core: the units (n) and the nets (m).
        closed: (n, n) whether the second unit is the first one or a descendant of it.
        cost: (m,) the least that each device pays for a net, in units of least work.
        before: (n,) the least work of each unit and its ancestors.
        after: (n,) the least work of each unit and its descendants.
        reach: (k + 1,) the most least work that the first 0 to k devices can do per unit of their load.
    """

    core: Core
    closed: Bools
    cost: Ints
    before: Ints
    after: Ints
    reach: list[float]

    @classmethod
    def of(cls, core: Core) -> BorderBound:
        """Return the data for a core for which `borders_apply`."""
        speeds = class_speeds(core)
        # A device of a slow class takes less least work in its time, so what it pays for nets counts for less too.
        paid = [c if r >= 1 else np.floor(c * r).astype(np.int64) for c, r in zip(core.costs, speeds, strict=True)]
        devices = sorted((r for r, kind in zip(speeds, core.kinds, strict=True) for _ in kind.devices), reverse=True)
        reach = [0.0, *np.cumsum(devices).tolist()]
        closed = _descendants(core)
        before, after = _summed(closed.T, core.least_work), _summed(closed, core.least_work)
        return cls(core, closed, np.min(paid, axis=0), before, after, reach)

    def windows(self, limit: int) -> tuple[Bools, Bools] | None:
        """Return the windows of stages with all loads below a limit; None if no such stages exist.

        The result is two arrays (k + 1, n) for k devices, where stages may be empty: the units that are certainly in
        the first j stages, and the units that are certainly in later ones.
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
        """Return a lower bound on the cost of the nets that cross a border between the given units."""
        if not inside.any() or not outside.any():
            return 0
        shift = max(0, int(self.cost.sum()).bit_length() - BITS)
        return self._closures.least_cost(self.cost >> shift, inside, outside) << shift  # rounded down: lesser costs

    @cached_property
    def _closures(self) -> Closures:
        return Closures(self.core, self.closed)


def _descendants(core: Core) -> Bools:
    """Return (n, n) whether the second unit is the first one or a descendant of it."""
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
    """Return (n,) the work of all units that each row marks."""
    return np.array([work[row].sum() for row in closed], np.int64)
