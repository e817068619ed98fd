"""Simulated annealing of pieces and host units: one group of units at a time moves to another place."""

from __future__ import annotations

from itertools import product
from math import inf, log

import numpy as np

from splitkit.solvers.placement.anneal import Schedule
from splitkit.solvers.placement.latency.makespan import HOST, Timing, makespan
from splitkit.solvers.placement.problem import Ints, Problem

_HOT, _COLD = 3e-3, 3e-5  # temperatures, as fractions of the makespan
_ROUND = 64  # moves between two looks at the clock
_ITEM_SECONDS = 5e-7  # what a makespan takes, about, for each unit and edge
_FEW = 20_000  # placements that are all tried
_RETURNS = 8  # how often the search goes back to the best


class Moves:
    """The state of one search.

    Args:
        problem: what is placed.
        timing: how long units and messages of that problem take.
        group: (n,) units of the same group move together.
        place: where they are at first; it must fit.
    """

    def __init__(self, problem: Problem, timing: Timing, group: Ints, place: Ints) -> None:
        self._timing = timing
        self._groups = [np.flatnonzero(group == g).tolist() for g in range(int(group.max()) + 1)]
        self._place = place.tolist()
        self.best, self.value = list(self._place), makespan(timing, self._place)
        self._now = self.value
        accelerators = [device for device in problem.devices if not device.host]
        self._room = [device.capacity for device in accelerators]
        self._all_room = list(self._room)
        self._device = [d for d, turns in enumerate(timing.turns) for _ in turns]
        self._bytes = [int(problem.nbytes[units].sum()) for units in self._groups]
        for units, size in zip(self._groups, self._bytes, strict=True):
            if self._place[units[0]] != HOST:
                self._room[self._device[self._place[units[0]]]] -= size
        self._near = [self._neighbours(units) for units in self._groups]
        self._random = np.random.default_rng(0)

    def rounds(self, seconds: float) -> int:
        """About how many rounds fit in some seconds."""
        size = len(self._place) + sum(map(len, self._timing.after))
        return max(1, int(seconds / (_ITEM_SECONDS * size * _ROUND)))

    def everywhere(self) -> bool:
        """Try every placement, if they are few; whether that was done."""
        places = len(self._timing.work) + 1
        if places ** len(self._groups) > _FEW:
            return False
        for choice in product(range(-1, places - 1), repeat=len(self._groups)):
            room = list(self._all_room)
            for group, place in enumerate(choice):
                if place != HOST:
                    room[self._device[place]] -= self._bytes[group]
            if min(room, default=0) < 0:
                continue
            for units, place in zip(self._groups, choice, strict=True):
                for unit in units:
                    self._place[unit] = place
            value = makespan(self._timing, self._place)
            if value < self.value:
                self.best, self.value = list(self._place), value
        return True

    def run(self, schedule: Schedule, enough: float) -> None:
        """Anneal until the schedule ends, or the makespan is ``enough``."""
        pieces = len(self._timing.work)
        returns = 0
        while self.value > enough and (done := schedule.next()) is not None:
            heat = _HOT * (_COLD / _HOT) ** ((done * _RETURNS) % 1) * self.value
            if int(done * _RETURNS) > returns:
                returns += 1
                self._return()
            chosen = self._random.integers(len(self._groups), size=_ROUND).tolist()
            anywhere = self._random.integers(-1, pieces, size=_ROUND).tolist()
            draws = self._random.random((_ROUND, 2)).tolist()
            for group, other, (which, luck) in zip(chosen, anywhere, draws, strict=True):
                near = self._near[group]
                pick = int(which * len(near) * 1.25)
                target = self._place[near[pick]] if pick < len(near) else other
                self._move(group, target, self._now - heat * log(max(luck, 1e-300)))

    def _move(self, group: int, target: int, most: float) -> None:
        """Move a group if the makespan is not above ``most`` then."""
        units, size = self._groups[group], self._bytes[group]
        source = self._place[units[0]]
        if source == target or (target != HOST and self._room[self._device[target]] < size):
            return
        for unit in units:
            self._place[unit] = target
        now = makespan(self._timing, self._place)
        if now > most or now == inf:
            for unit in units:
                self._place[unit] = source
            return
        self._account(source, target, size)
        self._now = now
        if now < self.value:
            self.best, self.value = list(self._place), now

    def _return(self) -> None:
        """Go back to the best."""
        for units, size in zip(self._groups, self._bytes, strict=True):
            self._account(self._place[units[0]], self.best[units[0]], size)
        self._place, self._now = list(self.best), self.value

    def _account(self, source: int, target: int, size: int) -> None:
        if source != HOST:
            self._room[self._device[source]] += size
        if target != HOST:
            self._room[self._device[target]] -= size

    def _neighbours(self, units: list[int]) -> list[int]:
        """The units before and after those of a group."""
        timing, own = self._timing, set(units)
        return sorted({near for unit in units for near in (*timing.before[unit], *timing.after[unit])} - own)
