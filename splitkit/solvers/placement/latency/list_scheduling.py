"""List scheduling for a small makespan; the work of each device is divided into pieces by levels."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.latency.makespan import CPU, Timing
from splitkit.solvers.placement.problem import Ints, Problem
from splitkit.solvers.placement.sets.packing import pack_sets


def list_schedules(problem: Problem, timing: Timing, pieces: int, group: Ints) -> list[Ints]:
    """Return placements by list scheduling: each unit, in the order of the longest path from it, goes where it finishes
    first (HEFT: Topcuoglu et al. 2002). Pieces are levels: a new one starts where the device changes. Where a device
    has more levels than pieces, the last ones share a piece; pieces may then wait for each other in a cycle, which
    makes the makespan infinite.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        pieces: the number of pieces on each accelerator.
        group: (n,) units of the same group share a device.

    Returns:
        Few placements, or none if devices have no room for them: with devices chosen by time, and by memory alone.
    """
    core = core_of(problem, group)
    chosen = [_quickest(problem, timing, pieces, _by_rank(timing), group)]
    if (roomy := pack_sets(core, DeviceTable.of_problem(problem, core))) is not None:
        accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
        number = np.full(len(problem.devices), CPU, np.int64)
        number[accelerators] = np.arange(len(accelerators))
        chosen.append(number[roomy[group]])
    return [_in_pieces(timing, pieces, device) for device in chosen if device is not None]


def _in_pieces(timing: Timing, pieces: int, device: Ints) -> Ints:
    """Return places on the given devices, by levels."""
    level = np.zeros(len(device), np.int64)
    for unit in np.argsort(_position(timing)).tolist():
        level[unit] = max((level[u] + (device[u] != device[unit]) for u in timing.before[unit]), default=0)
    place = np.full(len(device), CPU, np.int64)
    for d in range(len(timing.turns)):
        here = np.flatnonzero(device == d)
        _, turn = np.unique(level[here], return_inverse=True)
        place[here] = d * pieces + np.minimum(turn, pieces - 1)
    return place


def _position(timing: Timing) -> list[int]:
    """Return the position of each unit in a topological order."""
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
    """Return the units by the longest chain that begins with them, the longest first, in topological order."""
    place = _position(timing)
    work = [min((row[unit] for row in timing.work), default=0.0) for unit in range(len(place))]
    longest = list(work)
    for unit in sorted(range(len(place)), key=place.__getitem__, reverse=True):
        longest[unit] += max((longest[then] for then in timing.after[unit]), default=0.0)
    return sorted(range(len(place)), key=lambda unit: (-longest[unit], place[unit]))


def _quickest(problem: Problem, timing: Timing, pieces: int, order: list[int], group: Ints) -> Ints | None:
    """Return the accelerator of each unit, or `CPU`, where it finishes first; a group goes where its first
    unit does.
    """
    room = [float(device.capacity) for device in problem.devices if not device.cpu]
    members = [np.flatnonzero(group == g) for g in range(int(group.max(initial=-1)) + 1)]
    work = [np.array(timing.work[d * pieces]) for d in range(len(room))]
    idle, done = [0.0] * len(room), [0.0] * problem.units
    device = np.full(problem.units, CPU, np.int64)
    chosen: dict[int, int] = {}
    for unit in order:
        its = int(group[unit])
        if its not in chosen:
            able = [d for d in range(len(room)) if np.isfinite(work[d][members[its]]).all()]
            held = float(problem.nbytes[members[its]].sum())
            places = [d for d in able if room[d] >= held]
            places += [CPU] if np.isfinite(np.array(timing.cpu)[members[its]]).all() else []
        else:
            places = [chosen[its]]
        sent = {u: done[u] + sum(timing.nets[net][0] for net in timing.of_unit[u]) for u in timing.before[unit]}
        choices = []
        for d in places:
            if d == CPU:
                choices.append((max([done[u] for u in sent], default=0.0) + timing.cpu[unit], CPU))
            else:
                there = max([done[u] if device[u] == d else sent[u] for u in sent], default=0.0)
                choices.append((max(idle[d], there) + float(work[d][unit]), d))
        if not choices:
            return None
        done[unit], best = min(choices)
        device[unit] = best
        if best != CPU:
            idle[best] = done[unit]
            room[best] -= held if its not in chosen else 0.0
        chosen[its] = best
    return device
