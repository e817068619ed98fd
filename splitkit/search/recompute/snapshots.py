"""What backward holds at one moment, as rows of the recompute program that hold for every plan.

`MemoryFloors` charges what is saved until backward's own nodes read it. Two things escape it: a value that is
recomputed early waits for its readers, and a value that is saved only to compute others from it stays until they are
computed. A snapshot charges both. For one node that only backward can run, it adds three kinds of variables::

    there[k]     storage k is in memory while the node runs
    ago[o]       op o has run again by then
    yet[o]       op o runs again later

    ago[o] + yet[o]  <=  runs[o]                       an op runs again once
    1                <=  there[k] + yet[maker(k)]      a later node of backward's own reads k
    yet[o]           <=  there[k] + yet[maker(k)]      op o reads k
    1                <=  saved[k] + ago[maker(k)]      this node, or an earlier one of backward's own, reads k
    ago[o]           <=  saved[k] + ago[maker(k)]      op o reads k
    there[k]         <=  saved[k] + ago[maker(k)]      it has to come from somewhere
    saved[k]         <=  there[k]                      a later node of backward's own reads k
    nbytes @ there   <=  budget - least                `MemoryFloors.least`: bytes that are there in every plan

This is Checkmate's time index (Jain et al., MLSys 2020) at a few moments only, where plans exceed the budget. Every
plan whose own nodes run in graph order and that recomputes nothing twice satisfies these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from scipy.sparse import coo_array, csr_array

from splitkit.search.recompute.memory_limits import MemoryFloors, MomentLimits
from splitkit.solvers.recompute import Snapshot
from splitkit.training.choices import Ints
from splitkit.training.joint_storages import STATIC
from splitkit.training.peaks import PeakTrace

_AT_ONCE = 4  # snapshots that one run suggests
_APART = 60  # of as many parts of the run, each suggests one at most


class Snapshots:
    """Builds the snapshots of one joint graph.

    Attributes:
        floors: the bytes that are there in every plan at each moment.
        maker: storage -> the op that makes it.
        reads: op -> the storages that it reads, including those of its views.
        own: storage -> the moments at which backward's own nodes read it.
    """

    def __init__(self, moments: MomentLimits, floors: MemoryFloors) -> None:
        savings = moments.savings
        self.floors, self.savings = floors, savings
        self._moment = {node: floors.early + i for i, node in enumerate(floors.own)}
        self.maker = moments.base.copy()
        storage = savings.storage.tolist()
        for k, op in zip(storage, savings.maker.tolist(), strict=True):
            if self.maker[k] == STATIC:
                self.maker[k] = op
        self.reads = [tuple(dict.fromkeys(storage[v] for v in values)) for values in savings.read_by]
        self._savable = np.zeros(len(savings.nbytes), np.bool_)
        self._savable[savings.storage[savings.savable | savings.fixed[savings.maker]]] = True

    def over(self, trace: PeakTrace, budget: int, known: Iterable[int]) -> Iterator[int]:
        """Return the moments, except ``known``, at which a run is furthest over the budget: a few, far apart.

        Recompute between two of backward's own nodes counts as a moment of the later one.
        """
        known, moment = set(known), self._moment_of_steps(trace)
        over = np.where(moment == STATIC, 0, trace.timeline - budget)
        width = max(1, len(over) // _APART)
        found = 0
        while found < _AT_ONCE and over.max(initial=0) > 0:
            step = int(over.argmax())
            if int(moment[step]) not in known:
                known.add(int(moment[step]))
                found += 1
                yield int(moment[step])
            over[max(0, step - width) : step + width + 1] = 0

    def _moment_of_steps(self, trace: PeakTrace) -> Ints:
        found = np.full(len(trace.steps), STATIC, np.int64)
        moment = STATIC
        for step in range(len(trace.steps) - 1, trace.forward - 1, -1):
            moment = self._moment.get(int(trace.steps[step]), moment)
            found[step] = moment
        return found

    def at(self, moment: int, budget: int) -> Snapshot:
        """Return the rows of one moment of `MemoryFloors`."""
        return _Rows(self, moment).snapshot(budget)


class _Rows:
    """The rows of one snapshot; its columns are those of the program, followed by its own."""

    def __init__(self, made: Snapshots, moment: int) -> None:
        self.made, self.moment, savings = made, moment, made.savings
        self.ops, self.before = len(savings.ops), len(savings.ops) + len(savings.nbytes)
        floors = made.floors
        self.pinned = (floors.first <= moment) & (moment <= floors.final)
        self.there: dict[int, int] = {}
        self.ago: dict[int, int] = {}
        self.yet: dict[int, int] = {}
        self.count = 0
        self.least: list[float] = []
        self.entries: list[tuple[int, int, float]] = []

    def snapshot(self, budget: int) -> Snapshot:
        """Return all rows, the one of the bytes last."""
        floors, savings = self.made.floors, self.made.savings
        later = np.flatnonzero((floors.final > self.moment) & ~self.pinned)
        earlier = np.flatnonzero(floors.first <= self.moment)
        self._after(later.tolist())
        for k in later.tolist():
            self._row({self.there[k]: 1.0, self.ops + k: -1.0}, 0.0)
        self._before(earlier.tolist())
        for op in dict.fromkeys((*self.ago, *self.yet)):
            self._row({op: 1.0} | {own[op]: -1.0 for own in (self.ago, self.yet) if op in own}, 0.0)
        nbytes = {x: float(savings.nbytes[k]) for k, x in self.there.items() if floors.handed[k]}
        unit = max(nbytes.values(), default=1.0) or 1.0
        self._row({x: -n / unit for x, n in nbytes.items()}, (int(floors.least[self.moment]) - budget) / unit)
        rows, columns, values = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        shape = (len(self.least), self.before + self.count)
        return Snapshot(csr_array(coo_array((values, (rows, columns)), shape=shape)), np.array(self.least), self.count)

    def _after(self, wanted: list[int]) -> None:
        """Add the rows for what is made later from what is there."""
        needs: dict[int, float] = dict.fromkeys(wanted, 1.0)
        for k in wanted:
            self._row({self._column(self.there, k): 1.0} | self._by(self.yet, k), needs[k])
        for op in _growing(self.yet):
            for k in self.made.reads[op]:
                if not self.pinned[k]:
                    there = {self._column(self.there, k): 1.0}
                    self._row(there | self._by(self.yet, k) | {self.yet[op]: -1.0}, 0.0)

    def _before(self, wanted: list[int]) -> None:
        """Add the rows for what has been read or is there: it was saved, or recomputed from such values."""
        for k in wanted:
            self._row(self._origin(k), 1.0)
        for k, there in list(self.there.items()):
            self._row(self._origin(k) | {there: -1.0}, 0.0)
        for op in _growing(self.ago):
            for k in self.made.reads[op]:
                self._row(self._origin(k) | {self.ago[op]: -1.0}, 0.0)

    def _origin(self, k: int) -> dict[int, float]:
        saved = {self.ops + k: 1.0} if self.made._savable[k] else {}
        return saved | self._by(self.ago, k)

    def _by(self, when: dict[int, int], k: int) -> dict[int, float]:
        """Return the op that makes a storage, if it may run again."""
        op = int(self.made.maker[k])
        return {} if self.made.savings.fixed[op] else {self._column(when, op): 1.0}

    def _column(self, columns: dict[int, int], key: int) -> int:
        if key not in columns:
            columns[key] = self.before + self.count
            self.count += 1
        return columns[key]

    def _row(self, entries: Mapping[int, float], least: float) -> None:
        self.entries += [(len(self.least), column, value) for column, value in entries.items()]
        self.least.append(least)


def _growing(columns: Mapping[int, int]) -> Iterator[int]:
    """Yield the keys, including those added meanwhile."""
    done = 0
    while done < len(columns):
        keys = list(columns)[done:]
        done += len(keys)
        yield from keys
