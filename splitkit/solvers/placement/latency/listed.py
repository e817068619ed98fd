"""A placement for the makespan by list scheduling, its devices' work cut into pieces by levels."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.latency.makespan import HOST, Timing
from splitkit.solvers.placement.problem import Ints, Problem


def listed(problem: Problem, timing: Timing, pieces: int) -> list[Ints]:
    """Places of the units: each unit, by how long the rest takes from it, where it is done first (Topcuoglu et al.,
    HEFT, 2002). Pieces are levels: one more wherever the device changes. Where a device has more levels than pieces,
    the last ones share a piece; pieces may then wait for each other in a cycle, which the makespan tells.

    Args:
        problem: what is placed; colours are not looked at.
        timing: how long units and messages of that problem take.
        pieces: on each accelerator.

    Returns:
        One placement, or none if the devices have no room for it.
    """
    order = _by_rank(timing)
    device = _quickest(problem, timing, pieces, order)
    if device is None:
        return []
    level = np.zeros(problem.units, np.int64)
    for unit in sorted(order, key=_position(timing).__getitem__):
        level[unit] = max((level[u] + (device[u] != device[unit]) for u in timing.before[unit]), default=0)
    place = np.full(problem.units, HOST, np.int64)
    for d in range(len(timing.turns)):
        here = np.flatnonzero(device == d)
        _, turn = np.unique(level[here], return_inverse=True)
        place[here] = d * pieces + np.minimum(turn, pieces - 1)
    return [place]


def _position(timing: Timing) -> list[int]:
    """The place of each unit in a topological order."""
    missing = [len(units) for units in timing.before]
    ready = [unit for unit, count in enumerate(missing) if not count]
    place = [0] * len(missing)
    for number in range(len(missing)):
        unit = ready.pop()
        place[unit] = number
        for then in timing.after[unit]:
            missing[then] -= 1
            if not missing[then]:
                ready.append(then)
    return place


def _by_rank(timing: Timing) -> list[int]:
    """Units by the longest chain that begins with them, the longest first; each after those that it waits for."""
    place = _position(timing)
    work = [min((row[unit] for row in timing.work), default=0.0) for unit in range(len(place))]
    longest = list(work)
    for unit in sorted(range(len(place)), key=place.__getitem__, reverse=True):
        longest[unit] += max((longest[then] for then in timing.after[unit]), default=0.0)
    return sorted(range(len(place)), key=lambda unit: (-longest[unit], place[unit]))


def _quickest(problem: Problem, timing: Timing, pieces: int, order: list[int]) -> Ints | None:
    """The accelerator of each unit, `HOST` for a host, where it is done first."""
    room = [float(device.capacity) for device in problem.devices if not device.host]
    idle, done = [0.0] * len(room), [0.0] * problem.units
    device = np.full(problem.units, HOST, np.int64)
    for unit in order:
        sent = {u: done[u] + sum(timing.nets[net][0] for net in timing.of_unit[u]) for u in timing.before[unit]}
        choices = []
        if np.isfinite(timing.host[unit]):
            choices.append((max([done[u] for u in sent], default=0.0) + timing.host[unit], HOST))
        for d, free in enumerate(idle):
            if room[d] >= problem.nbytes[unit] and np.isfinite(timing.work[d * pieces][unit]):
                there = max([done[u] if device[u] == d else sent[u] for u in sent], default=0.0)
                choices.append((max(free, there) + timing.work[d * pieces][unit], d))
        if not choices:
            return None
        done[unit], best = min(choices)
        device[unit] = best
        if best != HOST:
            idle[best] = done[unit]
            room[best] -= float(problem.nbytes[unit])
    return device
