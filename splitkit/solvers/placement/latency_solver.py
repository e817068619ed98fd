"""The search for the least makespan of one sample: pieces of the graph on accelerators, all other units on CPUs.

Each accelerator runs a few pieces one after another. A piece starts when all its inputs are there, takes the work of
its units and the cost of each net that enters or leaves it, and delivers everything at its end. A CPU runs each unit
separately as soon as its inputs are there, any number at a time. (Latency in Tarnawski et al., NeurIPS 2020.)

Measured on four published workloads, by switching off one at a time: without the dynamic program along orders, 3 of 4
plans are 47 to 743 % worse; without annealing, one is 1.5 % worse; without the bound by chains, 3 of 4 bounds are 2.4
to 84 % weaker. List scheduling wins on none of them; on 160 random graphs with little memory, 18 plans are worse
without it, by up to 101 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf, log

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable, cooling
from splitkit.solvers.placement.contract import check_placeable
from splitkit.solvers.placement.core import BIG, Core, acyclic_groups, colour_groups, core_of, order_by_key, orders
from splitkit.solvers.placement.makespan import CPU, Timing, chain_bound, makespan, piece_times
from splitkit.solvers.placement.packing import pack_sets
from splitkit.solvers.placement.problem import GRACE, BadProblemError, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution, cycles, faults
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.solvers.placement.stages.order_dp import DeviceStep, OrderDP

SECONDS = 60.0  # of callers that name none; policies have their own
_MOVES = 0.4  # share of the time
_FEW = 20_000  # up to this many placements, all are tried
_CLOSE = 2e-6  # relative; what is this near its bound is the best


def latency(problem: Problem, *, seconds: float = SECONDS, pieces: int = 1, clock: Clock | None = None) -> Solution:
    """Return a placement with a small makespan, and a lower bound on the least makespan.

    The best chain of pieces along nine orders is annealed; small problems are searched completely. The bound comes from
    the longest path through the graph, or from some paths, each divided optimally into pieces (`chain_bound`).

    Args:
        problem: the problem. All of its ``edges`` count; ``in_flight``, ``ordered`` and ``fill`` do not matter. Its
            CPUs are of one kind, and together run any number of units at a time; units on a CPU are assigned to the
            first one.
        seconds: the time for the search.
        pieces: the most pieces that each accelerator may run.
        clock: the clock of the whole search that this is a part of; it ends this search too.

    Raises:
        InfeasibleError: no placement was found.
        BadProblemError: the graph has a cycle, there are CPUs of several kinds, or links that differ.
    """
    problem = replace(problem, in_flight=(), ordered=False, fill=False)
    _refuse(problem)
    core = core_of(problem, colour_groups(problem))
    check_placeable(problem, core)
    timing, clock = Timing.of(problem, pieces), Clock(seconds + GRACE, clock)
    order = order_by_key(core_of(problem, np.arange(problem.units)), np.zeros(problem.units))
    place = _first(problem, timing, core.group, order, seconds, clock)
    moves = PieceAnnealing(problem, timing, core.group, place)
    bound, proved_by = critical_path(problem, timing, order), "path"
    whole = (len(timing.work) + 1) ** problem.units <= _FEW and _searched(problem, timing, order, moves, core.group)
    if whole:
        bound, proved_by = moves.value, "all"
    elif not clock.is_over():
        bound, proved_by = max((bound, "path"), (chain_bound(problem, timing, core.group, order, moves.value), "chain"))
    if bound < moves.value:
        moves.run(cooling(moves.rounds(seconds * _MOVES), clock), bound)
        if bound < moves.value * (1 - _CLOSE) and _searched(problem, timing, order, moves, core.group):
            bound, proved_by = moves.value, "all"
    found = _solution(problem, timing, moves, pieces, bound, proved_by)
    return replace(found, timed_out=clock.timed_out)


def critical_path(problem: Problem, timing: Timing, order: Ints) -> float:
    """Return the longest path through the graph when every unit is where it is quickest."""
    quickest = np.min(np.array([*timing.work, timing.cpu]), axis=0).tolist()
    end = [0.0] * problem.units
    for unit in order.tolist():
        end[unit] = quickest[unit] + max((end[u] for u in timing.before[unit]), default=0.0)
    return max(end, default=0.0)


def _searched(problem: Problem, timing: Timing, order: Ints, moves: PieceAnnealing, group: Ints) -> bool:
    """Search all placements if they are few enough; return whether none can be better than the annealed one."""
    tree = BranchAndBound(problem, timing, group, order, moves.value)
    tree.run()
    if tree.best is not None:
        moves.take(tree.best)
    return tree.closed


def _refuse(problem: Problem) -> None:
    if problem.links is not None and (problem.links[~np.eye(len(problem.links), dtype=np.bool_)] != 1).any():
        raise BadProblemError("links that differ are not known to the makespan", "links")
    if len({device.kind for device in problem.devices if device.cpu}) > 1:
        raise BadProblemError("CPUs are of several kinds", "devices")
    edges = problem.edges[problem.edges[:, 0] != problem.edges[:, 1]]
    if cycles(edges, problem.units):
        raise BadProblemError("units depend on each other in a cycle", "edges")


def _first(problem: Problem, timing: Timing, group: Ints, order: Ints, seconds: float, clock: Clock) -> Ints:
    """Return first placements: the best chain, CPUs only, list schedules, or the best stages; if there are none, the
    first placement that branch and bound finds.
    """
    core = core_of(problem, acyclic_groups(problem))
    accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
    pieces = max(map(len, timing.turns), default=1)
    number = np.full(len(problem.devices) + 1, CPU, np.int64)  # of the first piece; the last entry is for `CPU`
    number[accelerators] = np.arange(len(accelerators)) * pieces
    found = (
        [number[device[core.group]] for device in chain_placements(core)] if not core.barred.all(axis=0).any() else []
    )
    if np.isfinite(timing.cpu).all():
        found.append(np.full(problem.units, CPU, np.int64))
    found += list_schedules(problem, timing, pieces, group, order)
    found = [place for place in found if np.isfinite(makespan(timing, place.tolist()))]
    if not found:
        try:
            stages = contiguous(problem, seconds=seconds / 4, clock=clock)
            clock.timed_out |= stages.timed_out
            found = [number[stages.device]]
        except InfeasibleError:
            if pieces == 1 and len(accelerators) == len(problem.devices):  # all that there is are stages
                raise
            found = [_any_place(BranchAndBound(problem, timing, group, order))]
    return min(found, key=lambda place: makespan(timing, place.tolist()))


def _any_place(tree: BranchAndBound) -> Ints:
    """Return the place of each unit in any placement.

    Raises:
        InfeasibleError: no placement was found.
    """
    tree.run(any_will_do=True)
    if tree.best is None:
        raise InfeasibleError("no placement was found", "devices" if tree.closed else "unknown")
    return np.array(tree.best, np.int64)


def _solution(
    problem: Problem, timing: Timing, moves: PieceAnnealing, pieces: int, bound: float, proved_by: str
) -> Solution:
    place = np.array(moves.best, np.int64)
    accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
    cpus = [d for d, device in enumerate(problem.devices) if device.cpu]
    of_place = np.array([*np.repeat(accelerators, pieces), *(cpus[:1] or [0])], np.int64)
    device = of_place[place]
    wrong = faults(problem, device)
    assert not wrong, wrong
    taken = np.zeros(len(problem.devices))
    np.add.at(taken, of_place[:-1], piece_times(timing, moves.best)[0])
    return Solution(
        device=device,
        order=(),
        value=moves.value,
        bound=min(moves.value, bound),
        solver=f"moves, {proved_by}" if proved_by != "all" else "all",
        loads=taken,
        tolerance=_CLOSE,
        turn=np.where(place == CPU, 0, place % pieces),
    )


# First placements for latency, by a dynamic program for the least sum of the times of pieces and CPU units.
#
# With the pieces of each class of accelerators that are used up as the level::
#
#     best[0, place 0] = 0
#     best[level, j] = min(best[level, j - 1] + time of the unit on a CPU,
#                          min over classes, and places i < j, of best[level less a piece, i] + load(i, j))


_MOST_LEVELS = 512  # beyond, devices are left out; with 32 to 4,096, three requests had the same plans


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


# List scheduling for a small makespan; the work of each device is divided into pieces by levels.


def list_schedules(problem: Problem, timing: Timing, pieces: int, group: Ints, order: Ints) -> list[Ints]:
    """Return placements by list scheduling: each unit, in the order of the longest path from it, goes where it finishes
    first (HEFT: Topcuoglu et al. 2002). Pieces are levels: a new one starts where the device changes. Where a device
    has more levels than pieces, the last ones share a piece; pieces may then wait for each other in a cycle, which
    makes the makespan infinite.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        pieces: the number of pieces on each accelerator.
        group: (n,) units of the same group share a device.
        order: (n,) the units in topological order.

    Returns:
        Few placements, or none if devices have no room for them: with devices chosen by time, and by memory alone.
    """
    core = core_of(problem, group)
    chosen = [_quickest(problem, timing, pieces, _by_rank(timing, order.tolist()), group)]
    if (roomy := pack_sets(core, DeviceTable.of_problem(problem, core))) is not None:
        accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
        number = np.full(len(problem.devices), CPU, np.int64)
        number[accelerators] = np.arange(len(accelerators))
        chosen.append(number[roomy[group]])
    return [_in_pieces(timing, pieces, device, order) for device in chosen if device is not None]


def _in_pieces(timing: Timing, pieces: int, device: Ints, order: Ints) -> Ints:
    """Return places on the given devices, by levels."""
    level = np.zeros(len(device), np.int64)
    for unit in order.tolist():
        level[unit] = max((level[u] + (device[u] != device[unit]) for u in timing.before[unit]), default=0)
    place = np.full(len(device), CPU, np.int64)
    for d in range(len(timing.turns)):
        here = np.flatnonzero(device == d)
        _, turn = np.unique(level[here], return_inverse=True)
        place[here] = d * pieces + np.minimum(turn, pieces - 1)
    return place


def _by_rank(timing: Timing, order: list[int]) -> list[int]:
    """Return the units by the longest chain that begins with them, the longest first, in topological order."""
    longest = [min((row[unit] for row in timing.work), default=0.0) for unit in range(len(order))]
    for unit in reversed(order):
        longest[unit] += max((longest[then] for then in timing.after[unit]), default=0.0)
    return sorted(order, key=lambda unit: -longest[unit])


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


# Simulated annealing of pieces and units on CPUs: a unit moves to another place, or a group to another device.


_HOT, _COLD = 3e-3, 3e-5  # temperatures, as fractions of the makespan
_ROUND = 64  # moves between two checks of the clock
_ITEM_SECONDS = 5e-7  # what a makespan takes, about, for each unit and edge
_RETURNS = 8  # how often the search goes back to the best


class PieceAnnealing:
    """The state of one annealing run.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device; if it runs several pieces, they may be in different ones.
        place: the places of the units at the start; they must fit.
    """

    def __init__(self, problem: Problem, timing: Timing, group: Ints, place: Ints) -> None:
        self._timing = timing
        self._group: list[int] = group.tolist()
        self._groups = [np.flatnonzero(group == g).tolist() for g in range(int(group.max()) + 1)]
        one_each = max(map(len, timing.turns), default=1) == 1  # so that a group on a device is in one piece
        self._items = self._groups if one_each else [[unit] for unit in range(problem.units)]
        self._all_room = [float(device.capacity) for device in problem.devices if not device.cpu]
        self._device = [d for d, turns in enumerate(timing.turns) for _ in turns]
        self._bytes = [int(problem.nbytes[units].sum()) for units in self._groups]
        self._place: list[int] = []
        self._room: list[float] = []
        self._now = inf
        self._go(place.tolist())
        self.best, self.value = list(self._place), self._now
        self._near = [self._neighbours(units) for units in self._items]
        self._random = np.random.default_rng(0)

    def rounds(self, seconds: float) -> int:
        """Return about how many rounds fit in some seconds."""
        size = len(self._place) + sum(map(len, self._timing.after))
        return max(1, int(seconds / (_ITEM_SECONDS * size * _ROUND)))

    def take(self, place: list[int]) -> None:
        """Continue from a placement that fits and beats the best so far."""
        self._go(place)
        self.best, self.value = list(place), self._now

    def run(self, schedule: Iterator[float], enough: float) -> None:
        """Anneal until the schedule (`cooling`) ends or the makespan is at most ``enough``."""
        pieces = len(self._timing.work)
        returns = 0
        while self.value > enough and (done := next(schedule, None)) is not None:
            heat = _HOT * (_COLD / _HOT) ** ((done * _RETURNS) % 1) * self.value
            if int(done * _RETURNS) > returns:
                returns += 1
                self._go(self.best)  # back to the best
            chosen = self._random.integers(len(self._items), size=_ROUND).tolist()
            anywhere = self._random.integers(-1, pieces, size=_ROUND).tolist()
            draws = self._random.random((_ROUND, 2)).tolist()
            for item, other, (which, luck) in zip(chosen, anywhere, draws, strict=True):
                near = self._near[item]
                pick = int(which * len(near) * 1.25)
                target = self._place[near[pick]] if pick < len(near) else other
                self._move(item, target, self._now - heat * log(max(luck, 1e-300)))

    def _move(self, item: int, target: int, most: float) -> None:
        """Move an item if the makespan stays at most ``most``; its group follows it to another device."""
        first = self._items[item][0]
        source, group = self._place[first], self._group[first]
        there = CPU if target == CPU else self._device[target]
        here = CPU if source == CPU else self._device[source]
        if source == target or (there not in (CPU, here) and self._room[there] < self._bytes[group]):
            return
        then = dict.fromkeys(self._items[item], target)
        if here != there:
            for unit in self._groups[group]:
                then.setdefault(unit, self._beside(self._place[unit], target))
        before = {unit: self._place[unit] for unit in then}
        self._put(then)
        now = makespan(self._timing, self._place)
        if now > most or now == inf:
            self._put(before)
            return
        if here != CPU:
            self._room[here] += self._bytes[group]
        if there != CPU:
            self._room[there] -= self._bytes[group]
        self._now = now
        if now < self.value:
            self.best, self.value = list(self._place), now

    def _beside(self, place: int, target: int) -> int:
        """Return where a unit goes whose group moves to a target's device: the same turn there, if it exists."""
        if CPU in (place, target):
            return target
        own, its = (self._timing.turns[self._device[where]] for where in (place, target))
        return its[own.index(place)]

    def _put(self, places: dict[int, int]) -> None:
        for unit, place in places.items():
            self._place[unit] = place

    def _go(self, place: list[int]) -> None:
        """Replace the current placement."""
        self._place, self._now = list(place), makespan(self._timing, place)
        self._room = list(self._all_room)
        for units, size in zip(self._groups, self._bytes, strict=True):
            if (piece := place[units[0]]) != CPU:
                self._room[self._device[piece]] -= size

    def _neighbours(self, units: list[int]) -> list[int]:
        """Return the units before and after the units of an item."""
        timing, own = self._timing, set(units)
        return sorted({near for unit in units for near in (*timing.before[unit], *timing.after[unit])} - own)


# Branch and bound over all placements of a small problem, one unit after the other in topological order.
#
# The units placed so far include all their predecessors, so their makespan is a lower bound on that of every
# completion, and so is the makespan with all others on as many devices of their quickest kind as there are units.


_MOST_UNITS = 64  # of which all prefixes are timed; with 32 to 512, three bounds were the same, with 4 one 36 % lower
_MOST_ITEMS = 600_000  # units and edges in all makespans computed
_ROUNDING = 1e-12  # relative; smaller improvements are not searched for


class BranchAndBound:
    """One search.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device.
        order: (n,) the units in topological order.
        value: a makespan that is attained; placements that are no better are left out.

    Attributes:
        best: the place of each unit in the best placement found; ``None`` if none was found.
        closed: whether all placements have been visited or excluded.
    """

    def __init__(self, problem: Problem, timing: Timing, group: Ints, order: Ints, value: float = inf) -> None:
        self.best: list[int] | None = None
        self.closed = False
        self._value, self._order = value, order.tolist()
        accelerators = [device for device in problem.devices if not device.cpu]
        self._pieces = max(map(len, timing.turns), default=1)
        self._alike = [accelerators.index(device) for device in accelerators]  # the first device that is the same
        self._room = [float(device.capacity) for device in accelerators]
        self._groups: list[int] = group[order].tolist()
        self._bytes: list[float] = np.bincount(group, problem.nbytes).tolist()
        self._prefixes = _prefixes(timing, self._order) if problem.units <= _MOST_UNITS else []
        self._left = _MOST_ITEMS // (1 + problem.units + len(problem.edges))
        self._place = [CPU] * problem.units
        self._done = 0
        self._device: dict[int, int] = {}

    def run(self, *, any_will_do: bool = False) -> None:
        """Search all placements, or until the first one, up to a fixed number of steps."""
        self._any = any_will_do
        if self._prefixes:
            self._grow()
            self.closed = self._left > 0 and not (any_will_do and self.best is not None)

    def _grow(self) -> None:
        """Try the places of the next unit, the most promising first."""
        if self._done == len(self._order):
            self.best, self._value = list(self._place), makespan(self._prefixes[-1], self._place)
            return
        choices, unit = [], self._order[self._done]
        for place in self._choices(self._groups[self._done]):
            self._left -= 1
            if self._left <= 0:
                return
            self._place[unit] = place
            choices.append((makespan(self._prefixes[self._done + 1], self._place), place))
        for value, place in sorted(choices):
            if self._left <= 0 or value == inf or value >= self._value * (1 - _ROUNDING):
                break
            if self._any and self.best is not None:
                break
            self._place[unit] = place
            self._with(place)
        self._place[unit] = CPU

    def _with(self, place: int) -> None:
        """Continue with the next unit at a place."""
        group = self._groups[self._done]
        is_first = group not in self._device
        device = place if place == CPU else place // self._pieces
        if is_first:
            self._device[group] = device
            if device != CPU:
                self._room[device] -= self._bytes[group]
        self._done += 1
        self._grow()
        self._done -= 1
        if is_first:
            del self._device[group]
            if device != CPU:
                self._room[device] += self._bytes[group]

    def _choices(self, group: int) -> list[int]:
        """Return the places where a unit of a group can go; of equal empty devices, only the first one's places."""
        used = set(self._device.values())
        places: list[int] = []
        for device in range(len(self._room)):
            if group in self._device:
                fits = self._device[group] == device
            else:
                twin = any(a == self._alike[device] and d not in used for d, a in enumerate(self._alike[:device]))
                fits = self._room[device] >= self._bytes[group] and not twin
            if fits:
                places += range(device * self._pieces, (device + 1) * self._pieces)
        if self._device.get(group, CPU) == CPU:
            places.append(CPU)
        return places


def _prefixes(timing: Timing, order: list[int]) -> list[Timing]:
    """Return, for each number of first units of an order, the timing in which nothing is sent to the others, and these
    take their least time as soon as their inputs are there: what it says with them on CPUs is a lower bound.
    """
    quickest = [min(row[unit] for row in (*timing.work, timing.cpu)) for unit in range(len(order))]
    found = []
    for size in range(len(order) + 1):
        placed, cpu = set(order[:size]), list(timing.cpu)
        for unit in order[size:]:
            cpu[unit] = quickest[unit]
        pins = ((cost, [pin for pin in pins if pin in placed]) for cost, pins in timing.nets)
        found.append(replace(timing, cpu=cpu, nets=[(cost, here) for cost, here in pins if len(here) > 1]))
    return found
