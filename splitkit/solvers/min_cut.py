"""Minimum s-t cuts of networks with 64-bit capacities, exact, by scipy's 32-bit maximum flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.topological import in_turn

INFINITE = np.iinfo(np.int64).max
"""The capacity of an edge that no cut may contain."""

ROOM = 2**61
"""The sum of all finite capacities stays below this."""

_BITS = 29  # scipy adds flows and capacities of both directions of an edge as signed 32-bit integers


class NoCutError(ValueError):
    """Every cut is infinite: a path of infinite edges leads from the source to the sink.

    Attributes:
        path: the vertices of the path, with source and sink.
    """

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__(f"no finite cut: infinite edges lead along the vertices {list(path)}")
        self.path = tuple(path)


@dataclass(frozen=True, eq=False)
class Network:
    """A directed graph with capacities; vertex 0 is the source, vertex 1 the sink.

    Attributes:
        size: the number of vertices.
        tails: (e,) where each edge starts. Edges may be parallel; self-loops are ignored.
        heads: (e,) where each edge ends.
        capacities: (e,) int64, not negative; each is `INFINITE`, or their sum is below `ROOM`.
    """

    size: int
    tails: Ints
    heads: Ints
    capacities: Ints

    def value(self, side: Bools) -> int:
        """Return the capacity of the cut with these vertices on the source's side; its edges must be finite."""
        crossing = side[self.tails] & ~side[self.heads]
        return int(self.capacities[crossing].sum())

    def contract(self, inside: Bools, outside: Bools) -> tuple[Network, Ints]:
        """Merge all of ``inside`` into the source and all of ``outside`` into the sink.

        Return the network, and for each vertex of this one its vertex in the result.
        """
        number = np.where(inside, 0, np.where(outside, 1, -1))
        number[:2] = 0, 1
        free = number < 0
        number[free] = 2 + np.arange(int(free.sum()))
        tails, heads = number[self.tails], number[self.heads]
        counts = (tails != heads) & (heads != 0) & (tails != 1)
        return Network(2 + int(free.sum()), tails[counts], heads[counts], self.capacities[counts]), number


def whole_capacities(costs: Floats) -> tuple[Ints, float]:
    """Return costs, which may be infinite, as capacities; and what one unit of capacity costs.

    They are rounded to multiples of ``2**-60`` of the sum of the finite ones, or of a smaller power of two.
    """
    finite = np.isfinite(costs)
    total = float(costs[finite].sum())
    power = int(np.floor(np.log2(ROOM / 2 / total))) if total else 0
    whole = np.full(len(costs), INFINITE)
    whole[finite] = np.rint(np.ldexp(costs[finite], power)).astype(np.int64)
    return whole, float(np.ldexp(1.0, -power))


@dataclass(frozen=True, eq=False)
class Cut:
    """A minimum cut, with its proof: a flow of the same value, of which the residual network is kept.

    Attributes:
        value: the capacity of the cut.
        smallest: (n,) bool; the source's side of the minimum cut with the fewest vertices there.
        largest: (n,) bool; the source's side of the minimum cut with the most vertices there. All minimum cuts lie
            between the two: they are the sides that no residual edge leaves.
        tails: where each edge of the residual network starts, between vertices whose side is not settled.
        heads: where each of these edges ends.
    """

    value: int
    smallest: Bools
    largest: Bools
    tails: Ints
    heads: Ints


def min_cut(network: Network) -> Cut:
    """Return the minimum cut, exact in integers.

    Capacities are scaled down to what `scipy.sparse.csgraph.maximum_flow` (Dinic 1970) can represent. The flow is
    scaled up again, and the rest is solved in the same way with a finer scale, until a cut is saturated (capacity
    scaling, Edmonds and Karp 1972). Flow and cut then have equal value, which proves both.

    Raises:
        NoCutError: when no cut is finite.
    """
    inside, outside = _settled(network)
    small, number = network.contract(inside, outside)
    residual = _Residual.of(small)
    smallest, largest = residual.fill()[number], ~residual.reaching()[number]
    value = network.value(smallest)
    assert value == network.value(largest) == residual.flow
    place = np.flatnonzero(number > 1)
    inner = (residual.left > 0) & (residual.rows > 1) & (residual.columns > 1)
    return Cut(value, smallest, largest, place[residual.rows[inner] - 2], place[residual.columns[inner] - 2])


def _settled(network: Network) -> tuple[Bools, Bools]:
    """Return the vertices that infinite edges tie to the source, and to the sink."""
    fixed = network.capacities == INFINITE
    ends = (network.tails[fixed], network.heads[fixed])
    arcs = csr_array((np.ones(len(ends[0]), np.int8), ends), shape=(network.size, network.size))
    order, before = breadth_first_order(arcs, 0, return_predecessors=True)
    inside = _marked(network.size, order)
    if inside[1]:
        path = [1]
        while path[-1] != 0:
            path.append(int(before[path[-1]]))
        raise NoCutError(path[::-1])
    return inside, _marked(network.size, breadth_first_order(arcs.T.tocsr(), 1, return_predecessors=False))


def _marked(size: int, members: Ints) -> Bools:
    found = np.zeros(size, np.bool_)
    found[members] = True
    return found


@dataclass(eq=False)
class _Residual:
    """The residual network, with both directions of each edge, one perhaps of capacity 0.

    Attributes:
        size: the number of vertices.
        rows: where each edge starts; edges are sorted by both ends.
        columns: where each edge ends.
        starts: where the edges of each vertex start, as in CSR.
        left: the residual capacity of each edge.
        flow: the flow on each edge.
    """

    size: int
    rows: Ints
    columns: NDArray[np.int32]
    starts: NDArray[np.int32]
    left: Ints
    flow: int = 0

    @classmethod
    def of(cls, network: Network) -> _Residual:
        n, tails, heads = network.size, network.tails, network.heads
        finite = network.capacities[network.capacities != INFINITE]
        most = int(finite.sum()) + 1  # as good as infinite
        keys, which = np.unique(np.concatenate([tails * n + heads, heads * n + tails]), return_inverse=True)
        left = np.zeros(len(keys), np.int64)
        capacities = np.where(network.capacities == INFINITE, 0, network.capacities)
        np.add.at(left, which[: len(tails)], capacities)
        left[which[: len(tails)][network.capacities == INFINITE]] = most
        rows, columns = keys // n, (keys % n).astype(np.int32)  # of other ints scipy looks at each, in each array
        return cls(n, rows, columns, np.searchsorted(rows, np.arange(n + 1)).astype(np.int32), left)

    def fill(self) -> Bools:
        """Send as much flow as possible; return (n,) the vertices to which more could flow from the source."""
        over = min(int(self.left[self.rows == 0].sum()), int(self.left[self.columns == 1].sum()))
        side = None
        while over:
            shift = max(0, over.bit_length() - _BITS)
            self._round(shift)
            side = self.reached(shift)
            over = int(self.left[side[self.rows] & ~side[self.columns]].sum())
        return self.reached() if side is None else side  # nothing leaves it, so it is the same for a shift of 0

    def _round(self, shift: int) -> None:
        """Send as much flow as possible in multiples of ``2**shift``."""
        units = np.minimum(self.left >> shift, 2**_BITS).astype(np.int32)
        arcs = csr_array((units, self.columns, self.starts), shape=(self.size, self.size))
        found = maximum_flow(arcs, 0, 1)
        assert found.flow.nnz == len(self.left)  # each edge is there in both directions: scipy adds none
        self.left -= found.flow.data.astype(np.int64) << shift
        self.flow += int(found.flow_value) << shift

    def reached(self, shift: int = 0) -> Bools:
        """Return (n,) the vertices to which ``2**shift`` more could flow from the source."""
        return _marked(self.size, breadth_first_order(self._open(shift), 0, return_predecessors=False))

    def reaching(self) -> Bools:
        """Return (n,) the vertices from which more could flow to the sink."""
        return _marked(self.size, breadth_first_order(self._open().T.tocsr(), 1, return_predecessors=False))

    def _open(self, shift: int = 0) -> csr_array:
        is_open = (self.left >> shift) > 0
        starts = np.concatenate([[0], np.cumsum(is_open)])[self.starts].astype(np.int32)
        data = np.ones(int(is_open.sum()), np.int8)
        return csr_array((data, self.columns[is_open], starts), shape=(self.size, self.size))


# All minimum cuts of a network whose capacities are ``first + rate * second``, over every rate: the convex hull.


_MOST_UNITS = 2.0**40  # into which the sum of the second costs is divided


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
        found = self.corner_between(start, end)
        if found is None:
            yield end
        else:
            yield from self._after(start, found)
            yield from self._after(found, end)

    def corner_between(self, start: Corner, end: Corner) -> Corner | None:
        """Return the corner furthest below the line through two corners; ``None`` if the hull has an edge there."""
        rates = _rates(start, end)
        found = self._corner(self._cut(start.side, ~end.side, *rates).largest)
        return found if _cost(found, *rates) < _cost(start, *rates) else None

    def between(self, start: Corner, end: Corner, rank: Ints) -> Iterator[Corner]:
        """Yield the cuts on the edge of the hull between two corners, with growing sides of the source.

        Args:
            start: a corner.
            end: the next corner.
            rank: (size,) of the vertices that may change sides next, those of the highest rank do.
        """
        cut = self._cut(start.side, ~end.side, *_rates(start, end))
        side, steps = start.side, list(_steps(cut, end.side & ~start.side, rank))
        for step in steps[:-1]:
            side = side.copy()
            side[step] = True
            yield self._corner(side)

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
    leads: list[list[int]] = [[] for _ in range(count)]
    for tail, head in pairs.tolist():
        leads[tail].append(head)
    highest = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(highest, label, rank[members])
    order = np.argsort(label, kind="stable")
    groups = np.split(members[order], np.cumsum(np.bincount(label, minlength=count))[:-1])
    yield from (groups[group] for group in in_turn(leads, lambda group, _: -int(highest[group])))
