"""All minimum cuts of a network whose capacities are ``first + rate * second``, over every rate: the convex hull."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.cuts.min_cut import INFINITE, ROOM, Cut, Network, min_cut

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_MOST_UNITS = 2.0**40


@dataclass(frozen=True, eq=False)
class Corner:
    """A cut that neither another cut nor a mixture of cuts beats in both costs.

    Attributes:
        side: (size,) bool; the source's side.
        first: the first cost of the cut.
        second: the second cost of the cut.
    """

    side: Bools
    first: int
    second: int


@dataclass(frozen=True, eq=False)
class TwoCosts:
    """A network whose edges have two costs, the second of which only those from the source have.

    Attributes:
        size: the number of vertices; 0 is the source, 1 the sink.
        tails: (e,) int.
        heads: (e,) int.
        first: (e,) int; not negative, or `INFINITE`.
        second: (e,) int; not negative, or `INFINITE`. The product of the two sums is below `ROOM` / 4.
    """

    size: int
    tails: Ints
    heads: Ints
    first: Ints
    second: Ints

    @classmethod
    def of(cls, size: int, tails: Ints, heads: Ints, costs: tuple[Floats, Floats]) -> tuple[TwoCosts, float]:
        """Return the network of two costs that may be infinite, and the cost that one unit of the second stands for.

        First costs are rounded down to whole numbers, second costs to `2**-40` of their sum or so.
        """
        first, second = (float(cost[np.isfinite(cost)].sum()) for cost in costs)
        unit = second / min(_MOST_UNITS, ROOM / 8 / max(first, 1.0)) or 1.0
        return cls(size, tails, heads, _whole(costs[0]), _whole(costs[1] / unit)), unit

    def corners(self) -> list[Corner]:
        """Return the corners of the lower convex hull of the costs of all cuts, by rising first cost.

        Each step computes the best cut at the slope between two corners: if none is below the line, the hull has an
        edge there, otherwise there is a new corner (Eisner and Severance 1976). As second costs are at the source only,
        the source's sides of the corners are nested (Gallo, Grigoriadis and Tarjan 1989), so each step settles
        vertices.

        Raises:
            NoCutError: when no cut is finite.
        """
        start, end = self.ends()
        return [start, *self._after(start, end)] if end.second < start.second else [start]

    def ends(self) -> tuple[Corner, Corner]:
        """Return the corners of the least first cost and of the least second cost, two cuts in all.

        Raises:
            NoCutError: when no cut is finite.
        """
        nothing = np.zeros(self.size, np.bool_)
        start = self._corner(self._cut(nothing, nothing, self._total(self.second) + 1, 1).largest)
        return start, self._corner(self._cut(start.side, nothing, 1, self._total(self.first) + 1).largest)

    def _after(self, start: Corner, end: Corner) -> Iterator[Corner]:
        rates = _rates(start, end)
        found = self._corner(self._cut(start.side, ~end.side, *rates).largest)
        if _cost(found, *rates) < _cost(start, *rates):
            yield from self._after(start, found)
            yield from self._after(found, end)
        else:
            yield end

    def between(self, start: Corner, end: Corner, rank: Ints) -> NestedCuts:
        """Return cuts on the edge of the hull between two corners, with growing sides of the source.

        Args:
            start: a corner.
            end: the next corner.
            rank: (size,) of the vertices that may change sides next, those of the highest rank do.
        """
        cut = self._cut(start.side, ~end.side, *_rates(start, end))
        return NestedCuts(self, start, tuple(_steps(cut, end.side & ~start.side, rank)))

    def _cut(self, inside: Bools, outside: Bools, first: int, second: int) -> Cut:
        """Return the minimum cut of the costs at these rates, with some vertices fixed; sides are over all vertices."""
        endless = (self.first == INFINITE) | (self.second == INFINITE)
        costs = np.where(endless, 0, self.first) * first + np.where(endless, 0, self.second) * second
        whole = Network(self.size, self.tails, self.heads, np.where(endless, INFINITE, costs))
        small, number = whole.contract(inside, outside)
        cut = min_cut(small)
        place = np.flatnonzero(number > 1)
        return Cut(cut.value, cut.smallest[number], cut.largest[number], place[cut.tails - 2], place[cut.heads - 2])

    def _corner(self, side: Bools) -> Corner:
        crossing = side[self.tails] & ~side[self.heads]
        return Corner(side, int(self.first[crossing].sum()), int(self.second[crossing].sum()))

    @staticmethod
    def _total(costs: Ints) -> int:
        return int(costs[costs != INFINITE].sum())


@dataclass(frozen=True, eq=False)
class NestedCuts:
    """Nested cuts; see `TwoCosts.between`.

    Attributes:
        network: the network.
        start: the first cut.
        steps: the vertices that join the source's side, one group after the other.
    """

    network: TwoCosts
    start: Corner
    steps: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.steps) + 1

    def corner(self, index: int) -> Corner:
        """Return the cut after so many steps."""
        side = self.start.side.copy()
        for step in self.steps[:index]:
            side[step] = True
        return self.network._corner(side)

    def last_within(self, limit: int) -> Corner:
        """Return the last cut whose first cost is at most ``limit``; the first cut must be within it."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.corner(middle).first <= limit else (low, middle - 1)
        return self.corner(low)


def _rates(start: Corner, end: Corner) -> tuple[int, int]:
    """Return the weights of first and second costs on the line through two corners."""
    first, second = start.second - end.second, end.first - start.first
    common = gcd(first, second)
    return first // common, second // common


def _cost(corner: Corner, first: int, second: int) -> int:
    return corner.first * first + corner.second * second


def _whole(costs: Floats) -> Ints:
    found = np.full(len(costs), INFINITE)
    finite = np.isfinite(costs)
    found[finite] = np.floor(costs[finite]).astype(np.int64)
    return found


def _steps(cut: Cut, free: Bools, rank: Ints) -> Iterator[Ints]:
    """Yield groups of vertices; after each group, all vertices so far are the source's side of a minimum cut.

    The groups are the strongly connected components of the residual network; each joins after all that it leads to.
    """
    members = np.flatnonzero(free)
    place = np.full(len(free), -1)
    place[members] = np.arange(len(members))
    inner = free[cut.tails] & free[cut.heads]
    ends = place[cut.tails[inner]], place[cut.heads[inner]]
    shape = (len(members), len(members))
    count, label = connected_components(csr_array((np.ones(len(ends[0]), np.int8), ends), shape), connection="strong")
    tails, heads = label[ends[0]], label[ends[1]]
    pairs = np.unique(np.stack([tails, heads], 1)[tails != heads], axis=0)
    waits = np.bincount(pairs[:, 0], minlength=count)
    before: list[list[int]] = [[] for _ in range(count)]
    for tail, head in pairs.tolist():
        before[head].append(tail)
    highest = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(highest, label, rank[members])
    order = np.argsort(label, kind="stable")
    groups = np.split(members[order], np.cumsum(np.bincount(label, minlength=count))[:-1])
    ready = [(-int(highest[c]), int(c)) for c in range(count) if not waits[c]]
    heapq.heapify(ready)
    while ready:
        _, group = heapq.heappop(ready)
        yield groups[group]
        for tail in before[group]:
            waits[tail] -= 1
            if not waits[tail]:
                heapq.heappush(ready, (-int(highest[tail]), tail))
