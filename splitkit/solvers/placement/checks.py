"""What excludes every placement before any search: units that no device supports, more devices than groups."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import InfeasibleError


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
