"""Pieces and host units one after another along an order: a dynamic program for the least sum, where latency starts."""

from __future__ import annotations

from itertools import product

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.latency.makespan import HOST
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.along import Along
from splitkit.solvers.placement.stages.ladder import Step

_MOST_LEVELS = 512


def chained(core: Core) -> list[Ints]:
    """(n,) an accelerator's number, or `HOST`, for each unit, for each of several orders; none if nothing fits."""
    found = []
    for order in orders(core):
        device = _along(Along(core, order))
        if device is not None:
            found.append(device)
    return found


def _along(line: Along) -> Ints | None:
    """The least sum of the times of pieces and host units along an order."""
    core = line.core
    kinds = [kind for kind, spec in enumerate(core.kinds) if not spec.host]
    counts = [len(core.kinds[kind].devices) for kind in kinds]
    while int(np.prod([count + 1 for count in counts])) > _MOST_LEVELS:
        counts[int(np.argmax(counts))] -= 1
    host = _host_times(line)
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
                total = below[:, None] + line.stretches(Step(0, 0, kind, 0), 0, len(value), 0, len(value))
                start = total.argmin(axis=0)
                least = total[start, np.arange(len(value))]
                for place in np.flatnonzero(least < value).tolist():
                    value[place], steps[place] = least[place], (at, int(start[place]))
        for place in range(1, len(value)):
            if value[place - 1] + host[place - 1] < value[place]:
                value[place], steps[place] = value[place - 1] + host[place - 1], (-1, place - 1)
        values[level], came[level] = value, steps
    level = min(values, key=lambda level: (int(values[level][-1]), level))
    if values[level][-1] >= BIG:
        return None
    return _device(line, kinds, came, level)


def _device(
    line: Along, kinds: list[int], came: dict[tuple[int, ...], list[tuple[int, int]]], level: tuple[int, ...]
) -> Ints:
    device = np.full(line.core.size, HOST, np.int64)
    place = len(line.places) - 1
    while place:
        at, start = came[level][place]
        if at >= 0:
            units = line.order[line.places[start] : line.places[place]]
            device[units] = line.core.kinds[kinds[at]].devices[level[at] - 1]
            level = (*level[:at], level[at] - 1, *level[at + 1 :])
        place = start
    return device


def _host_times(line: Along) -> Ints:
    """The time that a host takes from each place to the next."""
    core = line.core
    hosts = [kind for kind, spec in enumerate(core.kinds) if spec.host]
    if not hosts:
        return np.full(len(line.places) - 1, BIG, np.int64)
    work = np.where(core.barred, BIG // 4096, core.work)[hosts].min(axis=0)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(work[line.order])])[line.places]
    return np.diff(total)
