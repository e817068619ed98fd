"""Simulated annealing of one assignment of units to stages, one unit at a time.

A move takes a unit to another stage between those of its neighbours, so that no edge goes back; the two loads that
change follow from how many pins of each of its nets the two stages hold. One long run gets further on wide graphs than
the many short ones of `anneal`, which make more moves per second. The state is kept in lists because single steps in
Python are faster on lists than on arrays.
"""

from __future__ import annotations

from math import log

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Floats, Ints

_POWER = 20.0  # the power of the norm of the loads that approximates the greatest
_HOT, _COLD = 0.3, 0.06  # first and last temperature; the energy is the logarithm of that norm, times the units
_BATCH = 5_000  # moves for which random numbers are drawn at once, and sums are made anew: what is added to drifts


class UnitAnnealing:
    """The state of one annealing run.

    Args:
        core: the core, with its units (n) and nets (m).
        places: the stages (k); no edge may go from one to an earlier one.
        start: (n,) the stage of each unit at the start; it must keep to all constraints.

    Attributes:
        best: (n,) the best assignment so far.
        value: its greatest load, in seconds.
    """

    def __init__(self, core: Core, places: DeviceTable, start: Ints) -> None:
        self._core, self._places = core, places
        self._random = np.random.default_rng(0)
        self._rank: list[int] = start.tolist()
        self._after = _listed(core.edges[:, 0], core.edges[:, 1], core.size)
        self._before = _listed(core.edges[:, 1], core.edges[:, 0], core.size)
        self._nets = _listed(core.pins, core.pin_nets, core.size)
        self._sizes: list[int] = np.diff(core.starts).tolist()
        self._work, self._costs, self._nbytes = _shared(places.work), _shared(places.costs), _shared(places.nbytes)
        self._capacity: list[float] = places.capacity.tolist()
        self.best, self.value = start, float("inf")
        self._recount()
        self._keep()

    def run(self, moves: int, clock: Clock, enough: float = 0.0) -> None:
        """Anneal for a number of proposed moves, or until a value of at most ``enough`` is reached."""
        batches = -(-moves // _BATCH)
        for batch in range(batches):
            if self.value <= enough or clock.is_over():
                return
            self._some(_HOT * (_COLD / _HOT) ** (batch / batches) / self._core.size, enough)
            self._recount()

    def _recount(self) -> None:
        """Compute loads, bytes and pins from scratch."""
        core, places, count = self._core, self._places, len(self._capacity)
        rank = np.array(self._rank, np.int64)
        unit = np.arange(core.size)
        pins = np.zeros((core.costs.shape[1], count), np.int64)
        np.add.at(pins, (core.pin_nets, rank[core.pins]), 1)
        partly = (pins > 0) & (pins < np.diff(core.starts)[:, None])
        loads = (places.costs.T * partly).sum(axis=0) + np.bincount(rank, places.work[rank, unit], count)
        self._loads: list[float] = loads.tolist()
        self._held: list[float] = np.bincount(rank, places.nbytes[rank, unit], count).tolist()
        self._units: list[int] = np.bincount(rank, minlength=count).tolist()
        self._here: list[int] = pins.ravel().tolist()

    def _keep(self) -> None:
        if (worst := max(self._loads)) < self.value * (1 - 1e-12):
            self.best, self.value = np.array(self._rank, np.int64), worst

    def _some(self, heat: float, enough: float) -> None:
        """Make one batch of moves at a temperature."""
        random, last = self._random, len(self._capacity) - 1
        units = random.integers(self._core.size, size=_BATCH).tolist()
        ups = (random.random(_BATCH) < 1 / 2).tolist()
        shares, rises = random.random(_BATCH).tolist(), (heat * random.exponential(size=_BATCH)).tolist()
        rank, after, before, loads = self._rank, self._after, self._before, self._loads
        reference = max(loads) + 1e-300
        energy = sum((load / reference) ** _POWER for load in loads)
        for unit, up, share, rise in zip(units, ups, shares, rises, strict=True):
            old = rank[unit]
            if up:
                end = min([rank[then] for then in after[unit]], default=last)
                if end == old:
                    continue
                new = old + 1 + int(share * (end - old))
            else:
                end = max([rank[first] for first in before[unit]], default=0)
                if end == old:
                    continue
                new = old - 1 - int(share * (old - end))
            if not self._may(unit, old, new):
                continue
            less, more = self._loads_after(unit, old, new)
            then = energy + (less / reference) ** _POWER + (more / reference) ** _POWER
            then -= (loads[old] / reference) ** _POWER + (loads[new] / reference) ** _POWER
            if then > energy and log(then / energy) > _POWER * rise:
                continue
            energy = then
            self._move(unit, old, new, less, more)
            if max(loads) < self.value:
                self._keep()
                if self.value <= enough:
                    return

    def _may(self, unit: int, old: int, new: int) -> bool:
        """Return whether a move keeps to memory, to what stages support, and to the stages that must be filled."""
        if self._places.fill and self._units[old] == 1:
            return False
        return self._held[new] + self._nbytes[new][unit] <= self._capacity[new] and self._work[new][unit] < np.inf

    def _loads_after(self, unit: int, old: int, new: int) -> tuple[float, float]:
        """Return the loads of the two stages after a move."""
        less, more = self._loads[old] - self._work[old][unit], self._loads[new] + self._work[new][unit]
        here, sizes, count = self._here, self._sizes, len(self._loads)
        left, entered = self._costs[old], self._costs[new]
        for net in self._nets[unit]:
            size, place = sizes[net], net * count
            mine, theirs = here[place + old], here[place + new]
            if mine == size:
                less += left[net]
            elif mine == 1:
                less -= left[net]
            if not theirs:
                more += entered[net]
            elif theirs + 1 == size:
                more -= entered[net]
        return max(less, 0.0), more

    def _move(self, unit: int, old: int, new: int, less: float, more: float) -> None:
        self._rank[unit] = new
        self._loads[old], self._loads[new] = less, more
        here, count = self._here, len(self._loads)
        for net in self._nets[unit]:
            here[net * count + old] -= 1
            here[net * count + new] += 1
        self._held[old] -= self._nbytes[old][unit]
        self._held[new] += self._nbytes[new][unit]
        self._units[old] -= 1
        self._units[new] += 1


def _listed(owner: Ints, value: Ints, size: int) -> list[list[int]]:
    """Return for each owner its values."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for own, its in zip(owner.tolist(), value.tolist(), strict=True):
        lists[own].append(its)
    return lists


def _shared(rows: Floats) -> list[list[float]]:
    """Return each row as a list; equal rows share one list."""
    known: dict[bytes, list[float]] = {}
    return [known.setdefault(row.tobytes(), row.tolist()) for row in rows]
