"""Lower bounds on the greatest load that need no search."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.contract import tightened_core
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import InfeasibleError

_HALVINGS = 14


def simple_bound(core: Core) -> int:
    """Return the greater of the longest unit on its quickest class and the total work divided among all devices."""
    longest = int(core.least_work.max(initial=0))
    quickness = 0.0  # least work done by all devices together in one unit of time
    for kind, work, barred in zip(core.kinds, core.work, core.barred, strict=True):
        counted = ~barred & (core.least_work > 0)
        ratio = (core.least_work[counted] / np.maximum(work[counted], 1)).max(initial=0.0)
        quickness += float(ratio) * len(kind.devices)
    shared = int(core.least_work.sum() / quickness * (1 - 1e-12)) if quickness else 0
    return max(longest, shared)


def simple_bound_seconds(core: Core) -> float:
    """Return `simple_bound` in seconds of the problem, less what rounding to whole numbers may have added."""
    return max(0.0, simple_bound(core) - core.slack) / core.scale


def joining_bound(core: Core, low: int, high: int, *, acyclic: bool, filled: int = 0) -> int:
    """Return the greatest load below which units would have to be joined that then no longer fit the devices.

    Args:
        core: the core.
        low: a lower bound that is already known.
        high: a value that is attained.
        acyclic: whether units that depend on each other in a cycle are joined too.
        filled: the number of devices that must not be empty.
    """
    for _ in range(_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        joined = tightened_core(core, middle, acyclic=acyclic)
        if joined.size < filled or max(simple_bound(joined), _shared(joined, middle)) >= middle:
            low = middle
        else:
            high = middle
    return low


def _shared(core: Core, limit: int) -> int:
    """Bound the load by counting the units that only some classes of devices can take below a limit.

    Such units share k devices: these do all of their work, and of the longest ``q * k + 1`` units some device has ``q +
    1``.
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


def check_placeable(problem: Problem, core: Core) -> None:
    """Raise `InfeasibleError` if a problem has no placement whatever the order and the memory.

    Args:
        problem: the problem.
        core: its core over the groups of units that share a device.
    """
    lonely = np.flatnonzero(core.barred.all(axis=0))
    if len(lonely):
        units = tuple(map(int, np.flatnonzero(core.group == lonely[0])))
        reason = f"no device supports all of the units {list(units)}, which must share one"
        raise InfeasibleError(reason, "support", units=units, exact=True)
    if problem.fill and core.size < len(problem.devices):
        reason = f"{len(problem.devices)} devices are to be filled, and only {core.size} groups of units can be apart"
        raise InfeasibleError(reason, "devices", devices=core.size, exact=True)
