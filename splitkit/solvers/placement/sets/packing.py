"""First placements: sets of units that the devices support and have room for."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.sets.set_program import SetProgram


def pack_sets(core: Core, places: DeviceTable) -> Ints | None:
    """Put each unit, the largest first, on the device with room whose load is then least; None if that fails."""
    device = np.zeros(core.size, np.int64)
    loads, held, count = (np.zeros(len(places.work)) for _ in range(3))
    work = np.where(np.isinf(places.work), 0.0, places.work).max(axis=0)
    for left, unit in zip(range(core.size, 0, -1), np.lexsort((-work, -core.nbytes)).tolist(), strict=True):
        after = loads + places.work[:, unit]
        after[held + places.nbytes[:, unit] > places.capacity] = np.inf
        if places.fill and (count == 0).sum() >= left:
            after[count > 0] = np.inf
        best = int(after.argmin())
        if not np.isfinite(after[best]):
            return None
        device[unit], loads[best] = best, after[best]
        held[best] += places.nbytes[best, unit]
        count[best] += 1
    return device


def find_sets(core: Core, places: DeviceTable, seconds: float, clock: Clock) -> tuple[Ints | None] | None:
    """Return some sets; ``(None,)`` if it is proven that there are none, None if none were found."""
    device = pack_sets(core, places)
    if device is not None:
        return (device,)
    most = float(np.where(np.isinf(places.work), 0.0, places.work).max(axis=0).sum() + places.costs.max(axis=0).sum())
    found, bound = SetProgram(core, places, most * 2 + 1).solve(seconds, clock, any_will_do=True)
    if found is None:
        return (None,) if np.isinf(bound) else None
    return (found,) if is_placeable(core, places, found) else None


def is_placeable(core: Core, places: DeviceTable, device: Ints) -> bool:
    """Return whether every device supports its units and has room for them."""
    unit = np.arange(core.size)
    held, count = np.zeros(len(places.work)), np.zeros(len(places.work))
    np.add.at(held, device, places.nbytes[device, unit])
    np.add.at(count, device, 1)
    supported = np.isfinite(places.work[device, unit]).all()
    return bool(supported and (held <= places.capacity).all() and (not places.fill or (count > 0).all()))
