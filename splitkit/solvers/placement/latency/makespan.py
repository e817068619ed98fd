"""The makespan of pieces on accelerators and units on CPUs, from the definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from splitkit.solvers.placement.problem import Problem

CPU = -1
"""The place of a unit on a CPU; all other places are pieces."""


@dataclass(frozen=True, eq=False)
class Timing:
    """A problem as lists, from which many makespans are computed.

    Attributes:
        work: the time of each unit in each piece, by piece; infinite where the device does not support it.
        cpu: the time of each unit on a CPU; infinite where no CPU supports it.
        before: the units before each unit.
        after: the units after each unit.
        nets: (cost, pins) of each net, each pin once, the maker first.
        of_unit: the nets of each unit.
        turns: for each device its pieces, in the order in which they run.
    """

    work: list[list[float]]
    cpu: list[float]
    before: list[list[int]]
    after: list[list[int]]
    nets: list[tuple[float, list[int]]]
    of_unit: list[list[int]]
    turns: list[list[int]]

    @classmethod
    def of(cls, problem: Problem, pieces: int) -> Timing:
        """Return the timing of a problem with so many pieces on each accelerator."""
        accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
        cpus = sorted({device.kind for device in problem.devices if device.cpu})
        before: list[list[int]] = [[] for _ in range(problem.units)]
        after: list[list[int]] = [[] for _ in range(problem.units)]
        for first, then in sorted({(a, b) for a, b in problem.edges.tolist() if a != b}):
            before[then].append(first)
            after[first].append(then)
        nets: list[tuple[float, list[int]]] = []
        of_unit: list[list[int]] = [[] for _ in range(problem.units)]
        for net, cost in enumerate(problem.net_costs.tolist()):
            pins = list(dict.fromkeys(problem.pins[problem.net_starts[net] : problem.net_starts[net + 1]].tolist()))
            if len(pins) > 1 and cost:
                for pin in pins:
                    of_unit[pin].append(len(nets))
                nets.append((cost, pins))
        return cls(
            work=[problem.seconds[problem.devices[d].kind].tolist() for d in accelerators for _ in range(pieces)],
            cpu=[min((float(problem.seconds[kind, v]) for kind in cpus), default=inf) for v in range(problem.units)],
            before=before,
            after=after,
            nets=nets,
            of_unit=of_unit,
            turns=[list(range(i * pieces, (i + 1) * pieces)) for i in range(len(accelerators))],
        )


def makespan(timing: Timing, place: list[int]) -> float:
    """Return when the last unit or piece ends; infinite if pieces wait for each other in a cycle.

    Args:
        timing: the times of the problem's units and transfers.
        place: `CPU` or a piece, for each unit.
    """
    takes, members = piece_times(timing, place)
    pieces = len(takes)
    missing = [0] * pieces
    for piece, units in enumerate(members):
        missing[piece] = sum(1 for unit in units for other in timing.before[unit] if place[other] != piece)
    following = _following(timing, members, missing)
    start = [0.0] * pieces
    begin = [0.0] * len(place)
    wanted = [len(units) for units in timing.before]
    ready = [unit for unit, count in enumerate(wanted) if not count and place[unit] == CPU]
    ready += [~piece for piece in range(pieces) if members[piece] and not missing[piece]]
    done, last = 0, 0.0
    while ready:
        item = ready.pop()
        if item >= 0:
            finish, units = begin[item] + timing.cpu[item], [item]
        else:
            finish, units = start[~item] + takes[~item], members[~item]
            then = following[~item]
            if then >= 0:
                start[then] = max(start[then], finish)
                missing[then] -= 1
                if not missing[then]:
                    ready.append(~then)
        done += len(units)
        last = max(last, finish)
        for unit in units:
            here = place[unit]
            for then in timing.after[unit]:
                there = place[then]
                if there == CPU:
                    begin[then] = max(begin[then], finish)
                    wanted[then] -= 1
                    if not wanted[then]:
                        ready.append(then)
                elif there != here:
                    start[there] = max(start[there], finish)
                    missing[there] -= 1
                    if not missing[there]:
                        ready.append(~there)
    return last if done == len(place) else inf


def piece_times(timing: Timing, place: list[int]) -> tuple[list[float], list[list[int]]]:
    """Return how long each piece takes, and its units."""
    takes = [0.0] * len(timing.work)
    members: list[list[int]] = [[] for _ in takes]
    for unit, piece in enumerate(place):
        if piece >= 0:
            members[piece].append(unit)
            takes[piece] += timing.work[piece][unit]
    for cost, pins in timing.nets:
        holders = {place[pin] for pin in pins}
        if len(holders) > 1:
            for piece in holders:
                if piece >= 0:
                    takes[piece] += cost
    return takes, members


def _following(timing: Timing, members: list[list[int]], missing: list[int]) -> list[int]:
    """Return the next piece on the device of each piece, -1 for none; that piece waits for one thing more."""
    following = [-1] * len(members)
    for turns in timing.turns:
        used = [piece for piece in turns if members[piece]]
        for piece, then in pairwise(used):
            following[piece] = then
            missing[then] += 1
    return following
