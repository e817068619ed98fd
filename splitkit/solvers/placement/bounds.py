"""Lower bounds on the greatest load that need no search."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.contract import tightened
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import InfeasibleError

_HALVINGS = 14


def simple(core: Core) -> int:
    """The greater of the longest unit, each on its quickest class, and all work shared out among all devices."""
    longest = int(core.least_work.max(initial=0))
    quickness = 0.0  # least work done by all devices together in one unit of time
    for kind, work, barred in zip(core.kinds, core.work, core.barred, strict=True):
        counted = ~barred & (core.least_work > 0)
        ratio = (core.least_work[counted] / np.maximum(work[counted], 1)).max(initial=0.0)
        quickness += float(ratio) * len(kind.devices)
    shared = int(core.least_work.sum() / quickness * (1 - 1e-12)) if quickness else 0
    return max(longest, shared)


def in_seconds(core: Core) -> float:
    """`simple`, in seconds of the problem, without what rounding to whole numbers may have added."""
    return max(0.0, simple(core) - core.slack) / core.scale


def by_joining(core: Core, low: int, high: int, *, acyclic: bool, filled: int = 0) -> int:
    """The greatest load below which units would have to be joined that then do not fit the devices any more.

    Args:
        core: whose units.
        low: a bound that is known.
        high: a value that is reached.
        acyclic: units that depend on each other in a cycle are joined too.
        filled: devices that must not be empty.
    """
    for _ in range(_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        joined = tightened(core, middle, acyclic=acyclic)
        if joined.size < filled or max(simple(joined), _shared(joined, middle)) >= middle:
            low = middle
        else:
            high = middle
    return low


def _shared(core: Core, limit: int) -> int:
    """A bound by counting, from the units that only some classes of devices can take below a limit.

    Such units share these k devices: all of their work, and of the longest ``q * k + 1`` some device has ``q + 1``.
    """
    work = np.where(core.barred, BIG, core.work)
    for row, kind in zip(work, core.kinds, strict=True):
        row[core.nbytes > kind.capacity] = BIG
    able = work < limit
    if not able.any(axis=0).all():
        return BIG
    patterns = np.unique(able.T, axis=0)
    least = 0
    for classes in [*patterns, np.ones(len(core.kinds), np.bool_)]:
        only = ~able[~classes].any(axis=0)
        devices = sum(len(kind.devices) for kind, taken in zip(core.kinds, classes, strict=True) if taken)
        longest = np.sort(work[:, only].min(axis=0))[::-1]
        least = max(least, -(-int(longest.sum()) // devices))
        for more in range(1, (len(longest) - 1) // devices + 1):
            last = more * devices
            least = max(least, int(longest[last - more : last + 1].sum()))
    return least


def check(problem: Problem, core: Core) -> None:
    """Refuse a problem that has no placement whatever the order and the memory.

    Args:
        problem: what is placed.
        core: over the groups of units that share a device.
    """
    lonely = np.flatnonzero(core.barred.all(axis=0))
    if len(lonely):
        units = tuple(map(int, np.flatnonzero(core.group == lonely[0])))
        reason = f"no device supports all of the units {list(units)}, which must share one"
        raise InfeasibleError(reason, "support", units=units, exact=True)
    if problem.fill and core.size < len(problem.devices):
        reason = f"{len(problem.devices)} devices are to be filled, and only {core.size} groups of units can be apart"
        raise InfeasibleError(reason, "devices", devices=core.size, exact=True)
