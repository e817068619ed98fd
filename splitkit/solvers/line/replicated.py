"""Chains of stages between borders, each on one or several devices, with the least greatest load or the least total.

This is the dynamic program of PipeDream (Narayanan et al., SOSP 2019, section 3.1) over borders, devices left and
replicas, extended by the transfers at both ends of a stage, which depend on the replicas of its neighbours.

With ``r`` devices for the stage that begins at border i, and ``q`` for the one that follows at border j::

    best[j, used + r, r, q] = min over i < j and the replicas a of the stage before of
                              max(best[i, used, a, r], load of the stage from i to j)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROUNDING = 1e-12  # relative; above the rounding errors of sums


class Replicated(NamedTuple):
    """A chain of stages.

    Attributes:
        borders: the border at which each stage ends; the last is the end of the chain.
        replicas: the number of devices of each stage.
        value: the greatest load, or the weighted sum.
    """

    borders: list[int]
    replicas: list[int]
    value: float


@dataclass(frozen=True)
class Aim:
    """The objective: the greatest load if all weights are zero, otherwise a weighted sum over the stages.

    Attributes:
        limit: the greatest load allowed for a stage.
        squares: the weight of the squared load of each device.
        loads: the weight of the load of each stage.
        crossing: the weight of what crosses each border.
    """

    limit: float = np.inf
    squares: float = 0.0
    loads: float = 0.0
    crossing: float = 0.0

    @property
    def summed(self) -> bool:
        """Whether the objective is a sum."""
        return bool(self.squares or self.loads or self.crossing)


@dataclass(frozen=True, eq=False)
class ReplicatedChains:
    """Chains of pairs of borders from the first to the last border; each pair is a stage. Exact for what is given.

    A stage of d replicas, the next ones after ``before`` devices, between stages of a and b replicas, has the load::

        work / d + extra(to come, before, d) + enter(before, a, d) + leave(before + d, d, b)

    In O(pairs devices degrees^3), times the places if they count.

    Attributes:
        first: (p,) the border at which each stage begins.
        last: (p,) the border at which each stage ends; the highest is the end of all chains.
        work: (p,) seconds of each stage on one device.
        crossing: (borders,) what crosses each border.
        devices: the number of devices.
        degrees: of replication, increasing, each at most the number of devices.
        enter: (devices before the first border, replicas on its left, on its right) -> (p,) seconds; None: nothing.
        leave: the same of the last border; both or none are given.
        extra: (stages from here to the last, devices before, replicas) -> (p,) seconds; None: nothing.
        held: the same -> (p,) bytes less what there is room for, above 0 for what does not fit; None: everything does.
        places: the most stages that are counted for these two; 0: they do not matter to them.
    """

    first: Ints
    last: Ints
    work: Floats
    crossing: Floats
    devices: int
    degrees: Sequence[int]
    enter: Callable[[int, int, int], Floats] | None = None
    leave: Callable[[int, int, int], Floats] | None = None
    extra: Callable[[int, int, int], Floats] | None = None
    held: Callable[[int, int, int], Floats] | None = None
    places: int = 0

    @property
    def cells(self) -> int:
        """The number of pairs that `best` weighs, a measure of its work."""
        around = len(self.degrees) ** (1 if self.enter is None else 3)
        return len(self.first) * self.devices * around * max(1, self.places)

    def best(self, aim: Aim) -> Replicated | None:
        """Return the best chain, with the fewest devices among equally good ones; None if there is none."""
        return next(iter(sorted(self.ends(aim), key=lambda found: found.value)), None)

    def ends(self, aim: Aim) -> Iterator[Replicated]:
        """Yield the best chain for each total number of devices, the fewest first."""
        table = _Table(self, aim)
        table.fill()
        for used in range(1, self.devices + 1):
            found = table.chain(used)
            if found is not None:
                yield found


_Key = tuple[int, int, int, int]
"""Stages to come (0 where places do not count), devices used, replicas before the border, replicas after it (0 for the
end); where nothing is paid at borders the last two are 0."""


class _Table:
    """The least value up to each border, by `_Key`, and the step that attains it."""

    def __init__(self, chains: ReplicatedChains, aim: Aim) -> None:
        self._chains, self._aim = chains, aim
        self._borders = int(chains.last.max(initial=0)) + 1
        self._by_last = np.argsort(chains.last, kind="stable")
        ends = chains.last[self._by_last]
        self._starts = np.flatnonzero(np.append(True, ends[1:] != ends[:-1])).astype(np.int64)
        self._sizes = np.diff(np.append(self._starts, len(ends)))
        self._ends = ends[self._starts]
        self._least: dict[_Key, Floats] = {}
        self._from: dict[_Key, list[tuple[_Key, int, Ints]]] = {}

    def fill(self) -> None:
        """Fill the table in order of devices used."""
        chains = self._chains
        begin = np.full(self._borders, np.inf)
        begin[0] = 0.0 if self._aim.summed else -np.inf
        counts = range(1, chains.places + 1) if chains.places else (0,)
        for to_come, then in product(counts, chains.degrees if chains.enter else (0,)):
            self._least[to_come, 0, 0, then] = begin
        for used in range(chains.devices):
            for key in [key for key in self._least if key[1] == used]:
                if chains.places and not key[0]:
                    continue
                for degree in chains.degrees if chains.enter is None else (key[3],):
                    if degree and used + degree <= chains.devices:
                        self._step(key, degree)

    def _step(self, key: _Key, degree: int) -> None:
        """Add a stage with so many replicas after each border."""
        chains, (to_come, used, before, _) = self._chains, key
        now = self._least[key]
        barred = now[chains.first] == np.inf
        if chains.held is not None and not barred.all():
            barred |= chains.held(to_come, used, degree) > 0
        if barred.all():
            return
        loads = chains.work / degree
        if chains.extra is not None:
            loads = loads + chains.extra(to_come, used, degree)
        left, after = max(0, to_come - 1), used + degree
        if chains.enter is None or chains.leave is None:
            self._keep((left, after, 0, 0), key, degree, np.where(barred, np.inf, self._total(now, loads, degree)))
            return
        if before:
            loads = loads + chains.enter(used, before, degree)
        ending = chains.last == self._borders - 1
        for then in (0, *chains.degrees):
            if then and (after + then > chains.devices or (chains.places and not left)):
                continue
            ahead = loads + chains.leave(after, degree, then) if then else loads
            total = np.where(barred | (ending if then else ~ending), np.inf, self._total(now, ahead, degree))
            self._keep((left, after, degree, then), key, degree, total)

    def _total(self, now: Floats, loads: Floats, degree: int) -> Floats:
        """Return (p,) the values of chains that end with each pair."""
        aim, first = self._aim, self._chains.first
        if aim.summed:
            total = now[first] + aim.squares * degree * loads**2 + aim.loads * loads
            total = total + aim.crossing * self._chains.crossing[self._chains.last]
        else:
            total = np.maximum(now[first], loads)
        return np.where(loads > aim.limit * (1 + _ROUNDING), np.inf, total)

    def _keep(self, key: _Key, source: _Key, degree: int, total: Floats) -> None:
        """Record the least value for each of these borders, and the pair that attains it."""
        ordered = total[self._by_last]
        least = np.minimum.reduceat(ordered, self._starts)
        known = self._least.setdefault(key, np.full(self._borders, np.inf))
        better = least < known[self._ends]
        if not better.any():
            return
        hits = np.flatnonzero(ordered == np.repeat(least, self._sizes))
        pairs = np.full(self._borders, -1, np.int64)
        pairs[self._ends] = np.where(better, self._by_last[hits[np.searchsorted(hits, self._starts)]], -1)
        known[self._ends] = np.where(better, least, known[self._ends])
        self._from.setdefault(key, []).append((source, degree, pairs))

    def chain(self, used: int) -> Replicated | None:
        """Return the best chain over exactly so many devices."""
        border = self._borders - 1
        keys = [key for key in self._least if key[1] == used and key[0] == 0 and key[3] == 0]
        value, key = min(((float(self._least[key][border]), key) for key in keys), default=(np.inf, (0, 0, 0, 0)))
        if not np.isfinite(value):
            return None
        borders, replicas = [], []
        while key[1] > 0:
            source, degree, pairs = next(entry for entry in reversed(self._from[key]) if entry[2][border] >= 0)
            borders.append(border)
            replicas.append(degree)
            border, key = int(self._chains.first[pairs[border]]), source
        return Replicated(borders[::-1], replicas[::-1], value)
