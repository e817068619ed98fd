"""Refinement of stages by moves of single units: passes over pairs of stages (Fiduccia and Mattheyses, DAC 1982).

A pass moves units from the stage with the greater load to the other, first the unit whose move adds least to what both
pay, each unit once, also where the load becomes worse for a while. Then it takes back the moves after the best state.
"""

from __future__ import annotations

import heapq

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.stage_loads import StageRanks, stage_loads

_PATIENCE = 20  # moves that a pass makes after its best state
_LOOKED = 24  # heap entries examined to find a legal move
_SMALL = 32  # pins up to which all pins of a net are weighed again when one of them moves
_REACH = 2  # the greatest distance between the two stages of a pair


def refine_stages(core: Core, stages: StageRanks, flights: Ints, rounds: int) -> StageRanks:
    """Return stages with no greater load; the classes of devices stay, and no stage becomes empty.

    Args:
        core: the core; edges go from a stage to the same or a greater number.
        stages: the stages to start from; they fit the devices.
        flights: (stages,) microbatches in flight in each stage.
        rounds: the most rounds over all pairs of stages.
    """
    moves = _Moves(core, stages, flights)
    for _ in range(rounds):
        before = max(moves.loads)
        if not moves.round() or max(moves.loads) >= before:
            break
    rank = np.array(moves.rank, np.int64)
    return StageRanks(int(stage_loads(core, rank, stages.kinds).max()), rank, stages.kinds)


class _Moves:
    """Stages that change by moves of units; kept in lists, on which single steps in Python are faster."""

    def __init__(self, core: Core, stages: StageRanks, flights: Ints) -> None:
        self.rank: list[int] = stages.rank.tolist()
        self.loads: list[int] = stage_loads(core, stages.rank, stages.kinds).tolist()
        self._count = len(stages.kinds)
        self._sizes: list[int] = np.diff(core.starts).tolist()
        self._pins = [part.tolist() for part in np.split(core.pins, core.starts[1:-1])] if len(core.pins) else []
        self._nets = _listed(core.pins, core.pin_nets, core.size)
        self._after = _listed(core.edges[:, 0], core.edges[:, 1], core.size)
        self._before = _listed(core.edges[:, 1], core.edges[:, 0], core.size)
        place, count = np.unique(core.pin_nets * self._count + stages.rank[core.pins], return_counts=True)
        self._here: dict[int, int] = dict(zip(place.tolist(), count.tolist(), strict=True))
        self._work = _shared_rows(core.work, stages.kinds)
        self._costs = _shared_rows(core.costs, stages.kinds)
        self._barred = _shared_rows(core.barred.astype(np.int64), stages.kinds)
        self._nbytes = _shared_rows(core.nbytes + flights[:, None] * core.saved, tuple(range(self._count)))
        held = np.zeros(self._count, np.int64)
        np.add.at(held, stages.rank, core.nbytes + flights[stages.rank] * core.saved)
        self._room = [core.kinds[kind].capacity - most for kind, most in zip(stages.kinds, held.tolist(), strict=True)]
        self._changes = [0] * self._count
        self._tried: dict[tuple[int, int], tuple[int, int]] = {}  # pairs that nothing helped, as they were then
        self._members: list[dict[int, None]] = [{} for _ in stages.kinds]
        for unit, stage in enumerate(self.rank):
            self._members[stage][unit] = None

    def round(self) -> bool:
        """Make one pass over each pair of near stages, the most loaded stage first; return whether any helped."""
        helped = False
        for stage in sorted(range(self._count), key=lambda stage: -self.loads[stage]):
            for other in range(max(0, stage - _REACH), min(self._count, stage + _REACH + 1)):
                low, high = min(stage, other), max(stage, other)
                seen = self._changes[low], self._changes[high]
                if low == high or self._tried.get((low, high)) == seen:
                    continue
                if self._pass(low, high):
                    helped = True
                    self._changes[low] += 1
                    self._changes[high] += 1
                else:
                    self._tried[low, high] = seen
        return helped

    def _pass(self, low: int, high: int) -> bool:
        """Move units between two stages; return whether the greater load, or else the sum of both, has fallen."""
        heaps: dict[int, list[tuple[int, int]]] = {low: [], high: []}
        for stage, other in ((low, high), (high, low)):
            heaps[stage] = [
                (sum(self._change(unit, stage, other)), unit)
                for unit in self._members[stage]
                if self._may_leave(unit, stage, other)
            ]
            heapq.heapify(heaps[stage])
        locked: set[int] = set()
        done: list[int] = []
        best = start = (max(self.loads[low], self.loads[high]), self.loads[low] + self.loads[high])
        kept = 0
        while len(done) - kept < _PATIENCE:
            unit = self._next(heaps, low, high, locked)
            if unit is None:
                break
            old = self.rank[unit]
            self._move(unit, old, low + high - old)
            locked.add(unit)
            done.append(unit)
            self._weigh_again(unit, heaps, low, high, locked)
            now = (max(self.loads[low], self.loads[high]), self.loads[low] + self.loads[high])
            if now < best:
                best, kept = now, len(done)
        for unit in reversed(done[kept:]):
            self._move(unit, self.rank[unit], low + high - self.rank[unit])
        return best < start

    def _next(self, heaps: dict[int, list[tuple[int, int]]], low: int, high: int, locked: set[int]) -> int | None:
        """Return the unit to move next: from the stage with the greater load, or else from the other."""
        sides = (low, high) if self.loads[low] >= self.loads[high] else (high, low)
        for stage in sides:
            heap, other = heaps[stage], low + high - stage
            for _ in range(_LOOKED):
                if not heap:
                    break
                price, unit = heapq.heappop(heap)
                if unit in locked or self.rank[unit] != stage or not self._may_leave(unit, stage, other):
                    continue
                now = sum(self._change(unit, stage, other))
                if now > price and heap and (now, unit) > heap[0]:
                    heapq.heappush(heap, (now, unit))
                    continue
                if len(self._members[stage]) > 1 and self._nbytes[other][unit] <= self._room[other]:
                    return unit
        return None

    def _may_leave(self, unit: int, stage: int, other: int) -> bool:
        """Return whether a unit can go to another stage: no edge goes back, and the device supports it."""
        rank = self.rank
        if self._barred[other][unit]:
            return False
        if stage < other:
            for then in self._after[unit]:
                if rank[then] < other:
                    return False
        else:
            for first in self._before[unit]:
                if rank[first] > other:
                    return False
        return True

    def _change(self, unit: int, old: int, new: int) -> tuple[int, int]:
        """Return what a move adds to the loads of the stage left and the stage entered."""
        less, more = -self._work[old][unit], self._work[new][unit]
        here, sizes, count = self._here, self._sizes, self._count
        left, entered = self._costs[old], self._costs[new]
        for net in self._nets[unit]:
            size = sizes[net]
            mine, theirs = here[net * count + old], here.get(net * count + new, 0)
            if mine == size:
                less += left[net] if size > 1 else 0
            elif mine == 1:
                less -= left[net]
            if not theirs:
                more += entered[net]
            elif theirs + 1 == size:
                more -= entered[net]
        return less, more

    def _move(self, unit: int, old: int, new: int) -> None:
        less, more = self._change(unit, old, new)
        self.loads[old] += less
        self.loads[new] += more
        for net in self._nets[unit]:
            self._here[net * self._count + old] -= 1
            self._here[net * self._count + new] = self._here.get(net * self._count + new, 0) + 1
        self._room[old] += self._nbytes[old][unit]
        self._room[new] -= self._nbytes[new][unit]
        self.rank[unit] = new
        del self._members[old][unit]
        self._members[new][unit] = None

    def _weigh_again(
        self, unit: int, heaps: dict[int, list[tuple[int, int]]], low: int, high: int, locked: set[int]
    ) -> None:
        """Push the units near a moved unit again, at their current price."""
        near: set[int] = set()
        for net in self._nets[unit]:
            if self._sizes[net] <= _SMALL:
                near.update(self._pins[net])
        for other in sorted(near - locked):
            stage = self.rank[other]
            if stage in heaps and self._may_leave(other, stage, low + high - stage):
                heapq.heappush(heaps[stage], (sum(self._change(other, stage, low + high - stage)), other))


def _listed(owner: Ints, value: Ints, size: int) -> list[list[int]]:
    """Return for each owner its values."""
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=size)).tolist()
    values = value[by_owner].tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _shared_rows(rows: Ints, which: tuple[int, ...]) -> list[list[int]]:
    """Return some rows as lists; equal rows share one list."""
    lists: dict[bytes, list[int]] = {}
    found = []
    for row in which:
        key = rows[row].tobytes()
        if key not in lists:
            lists[key] = rows[row].tolist()
        found.append(lists[key])
    return found
