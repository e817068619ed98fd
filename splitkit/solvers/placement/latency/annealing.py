"""Simulated annealing of pieces and units on CPUs: a unit moves to another place, or a group to another device."""

from __future__ import annotations

from math import inf, log

import numpy as np

from splitkit.solvers.placement.anneal import CoolingSchedule
from splitkit.solvers.placement.latency.makespan import CPU, Timing, makespan
from splitkit.solvers.placement.problem import Ints, Problem

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

    def run(self, schedule: CoolingSchedule, enough: float) -> None:
        """Anneal until the schedule ends or the makespan is at most ``enough``."""
        pieces = len(self._timing.work)
        returns = 0
        while self.value > enough and (done := schedule.next()) is not None:
            heat = _HOT * (_COLD / _HOT) ** ((done * _RETURNS) % 1) * self.value
            if int(done * _RETURNS) > returns:
                returns += 1
                self._return()
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
        self._account(here, there, self._bytes[group])
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

    def _return(self) -> None:
        """Go back to the best placement."""
        self._go(self.best)

    def _go(self, place: list[int]) -> None:
        """Replace the current placement."""
        self._place, self._now = list(place), makespan(self._timing, place)
        self._room = list(self._all_room)
        for units, size in zip(self._groups, self._bytes, strict=True):
            if (piece := place[units[0]]) != CPU:
                self._room[self._device[piece]] -= size

    def _account(self, here: int, there: int, size: int) -> None:
        if here != CPU:
            self._room[here] += size
        if there != CPU:
            self._room[there] -= size

    def _neighbours(self, units: list[int]) -> list[int]:
        """Return the units before and after the units of an item."""
        timing, own = self._timing, set(units)
        return sorted({near for unit in units for near in (*timing.before[unit], *timing.after[unit])} - own)
