"""First placements for latency, by a dynamic program for the least sum of the times of pieces and CPU units.

With the pieces of each class of accelerators that are used up as the level::

    best[0, place 0] = 0
    best[level, j] = min(best[level, j - 1] + time of the unit on a CPU,
                         min over classes, and places i < j, of best[level less a piece, i] + load(i, j))
"""

from __future__ import annotations

from itertools import product

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.latency.makespan import CPU
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.device_steps import DeviceStep
from splitkit.solvers.placement.stages.order_dp import OrderDP

_MOST_LEVELS = 512


def chain_placements(core: Core) -> list[Ints]:
    """Return, for each of several orders, the accelerator's number or `CPU` for each unit; no result if
    nothing fits.
    """
    found = []
    for order in orders(core):
        device = _along(OrderDP(core, order))
        if device is not None:
            found.append(device)
    return found


def _along(line: OrderDP) -> Ints | None:
    """Return the placement with the least sum of the times of pieces and CPU units along an order."""
    core = line.core
    kinds = [kind for kind, spec in enumerate(core.kinds) if not spec.cpu]
    counts = [len(core.kinds[kind].devices) for kind in kinds]
    while int(np.prod([count + 1 for count in counts])) > _MOST_LEVELS:
        counts[int(np.argmax(counts))] -= 1
    cpu = _cpu_times(line)
    values: dict[tuple[int, ...], Ints] = {}
    came: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for level in product(*(range(count + 1) for count in counts)):
        value = np.full(len(line.places), BIG, np.int64)
        steps = [(-1, 0)] * len(value)
        if not any(level):
            value[0] = 0
        for at, kind in enumerate(kinds):
            if level[at]:
                below = values[(*level[:at], level[at] - 1, *level[at + 1 :])]
                total = below[:, None] + line.stretches(DeviceStep(0, 0, kind, 0), 0, len(value), 0, len(value))
                start = total.argmin(axis=0)
                least = total[start, np.arange(len(value))]
                for place in np.flatnonzero(least < value).tolist():
                    value[place], steps[place] = least[place], (at, int(start[place]))
        for place in range(1, len(value)):
            if value[place - 1] + cpu[place - 1] < value[place]:
                value[place], steps[place] = value[place - 1] + cpu[place - 1], (-1, place - 1)
        values[level], came[level] = value, steps
    level = min(values, key=lambda level: (int(values[level][-1]), level))
    if values[level][-1] >= BIG:
        return None
    return _device(line, kinds, came, level)


def _device(
    line: OrderDP, kinds: list[int], came: dict[tuple[int, ...], list[tuple[int, int]]], level: tuple[int, ...]
) -> Ints:
    device = np.full(line.core.size, CPU, np.int64)
    place = len(line.places) - 1
    while place:
        at, start = came[level][place]
        if at >= 0:
            units = line.order[line.places[start] : line.places[place]]
            device[units] = line.core.kinds[kinds[at]].devices[level[at] - 1]
            level = (*level[:at], level[at] - 1, *level[at + 1 :])
        place = start
    return device


def _cpu_times(line: OrderDP) -> Ints:
    """Return the time that a CPU takes from each place to the next."""
    core = line.core
    cpus = [kind for kind, spec in enumerate(core.kinds) if spec.cpu]
    if not cpus:
        return np.full(len(line.places) - 1, BIG, np.int64)
    work = np.where(core.barred, BIG // 4096, core.work)[cpus].min(axis=0)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(work[line.order])])[line.places]
    return np.diff(total)
