"""The Pareto frontier of saved bytes and recompute time of a joint graph, by parametric minimum cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch.fx import Node

from splitkit.errors import NoPlanError
from splitkit.solvers.min_cut import Corner, Network, NoCutError, TwoCosts, min_cut, whole_capacities
from splitkit.training.choices import Bools, Choice, Floats, Ints, Savings


class Hull:
    """The lower convex hull of (saved bytes, recompute seconds) over all legal choices.

    Its two ends are found at once, and the corners between them where they are asked for, with about two cuts each.

    Attributes:
        cutting: the network of cuts.
        network: the same with whole costs: bytes, and ticks of time.
        tick: seconds; time is rounded down to these, 2**-40 of all recompute together or so.
        known: the corners found so far, by rising bytes; the last recomputes nothing that it need not.
    """

    def __init__(self, problem: Savings) -> None:
        """Find the ends of the hull of a problem.

        Raises:
            NoPlanError: SK303 when something that backward needs can be neither saved nor recomputed.
        """
        self.cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        costs = self.cutting.nbytes, self.cutting.seconds
        self.network, self.tick = TwoCosts.of(self.cutting.size, self.cutting.tails, self.cutting.heads, costs)
        with explained(self.cutting, problem.why):
            start, end = self.network.ends()
        self.known = [start, end] if end.second < start.second else [start]
        self._edges = set[int]()
        """First bytes of the corners after which there is none before the next one in `known`."""

    @cached_property
    def corners(self) -> tuple[Corner, ...]:
        """All corners, by rising bytes."""
        index = 0
        while index + 1 < len(self.known):
            index += self._is_edge(index)
        return tuple(self.known)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The choice at each corner."""
        return tuple(self.cutting.choice(corner.side) for corner in self.corners)

    def _is_edge(self, index: int) -> bool:
        """Return whether there is no corner between a known one and the next; otherwise it is known from then on."""
        low, high = self.known[index : index + 2]
        if low.first not in self._edges:
            found = self.network.corner_between(low, high)
            if found is not None:
                self.known.insert(index + 1, found)
                return False
            self._edges.add(low.first)
        return True

    def _edge(self, nbytes: float) -> int:
        """Return the index of the corner at or below so many bytes, -1 if there is none."""
        while True:
            index = bisect_right([corner.first for corner in self.known], nbytes) - 1
            if index < 0 or index + 1 == len(self.known) or self._is_edge(index):
                return index

    def around(self, nbytes: float) -> list[Choice]:
        """Return the choices at the corners around so many bytes, and those between them on the hull, by rising bytes.

        Between two corners whole groups of ops switch one by one, such as the layers of a transformer, the last ones
        first: each of these choices lies on the hull too.
        """
        index = self._edge(nbytes)
        if index < 0:
            return []
        start, *end = self.known[index : index + 2]
        between = self.network.between(start, end[0], self.cutting.rank) if end else ()
        return [self.cutting.choice(corner.side) for corner in (start, *between, *end)]

    def within(self, nbytes: int) -> Choice | None:
        """Return the choice of `around` with the most saved bytes up to ``nbytes``, or ``None`` if there is none."""
        return next((choice for choice in reversed(self.around(nbytes)) if choice.nbytes <= nbytes), None)

    def bound(self, nbytes: float) -> float:
        """Return a lower bound on the seconds of every choice that saves at most ``nbytes``; infinite if none does."""
        index = self._edge(nbytes)
        if index < 0:
            return float("inf")
        ends = self.known[index : index + 2]
        return float(np.interp(nbytes, [c.first for c in ends], [c.second * self.tick for c in ends]))

    def least(self, price: float, weight: float) -> tuple[float, Corner]:
        """Return a lower bound on ``price * bytes + weight * seconds`` of every choice, and the corner that has it."""
        while True:
            costs = [price * corner.first + weight * self.tick * corner.second for corner in self.known]
            index = costs.index(min(costs))
            if all(self._is_edge(k) for k in (index, index - 1) if 0 <= k < len(costs) - 1):
                return costs[index], self.known[index]


# The flow network whose minimum cuts are the best choices of what a joint graph saves.


@dataclass(frozen=True, eq=False)
class CutNetwork:
    """A `Savings` as a network: the sink's side is what backward has.

    ::

        source --price--> op --nbytes--> value --inf--> sink      needed by backward
                          op <---inf---- value                    read by the op

    An op on the sink's side runs in backward, and so must have the values that it reads there; a value there is
    either of such an op, or its storage is saved. A value that is not savable is one vertex with its op.

    Attributes:
        problem: the arrays.
        size: number of vertices; 0 is the source, 1 the sink.
        tails: (e,) int; where edges start.
        heads: (e,) int; where they end.
        nbytes: (e,) float; what an edge costs in bytes.
        seconds: (e,) float; what it costs in seconds.
        op: (n,) int; the vertex of each op.
        value: (m,) int; of each value.
    """

    problem: Savings
    size: int
    tails: Ints
    heads: Ints
    nbytes: Floats
    seconds: Floats
    op: Ints
    value: Ints

    @classmethod
    def of(cls, problem: Savings, weights: Floats, fixed: Bools) -> CutNetwork:
        """Build the network of a problem.

        Args:
            problem: the arrays.
            weights: (k,) what saving each storage costs.
            fixed: (n,) bool; ops that may not be recomputed.
        """
        n, savable = len(problem.ops), problem.savable
        op = 2 + np.arange(n)
        value = np.where(savable, 2 + n + np.cumsum(savable) - 1, op[problem.maker])
        readers, read = op[problem.reads[:, 0]], value[problem.reads[:, 1]]
        needed, owner = value[problem.needed], problem.maker[savable]
        prices = np.where(fixed, np.inf, problem.price)
        never, nothing = np.full(len(read) + len(needed), np.inf), np.zeros(len(read) + len(needed))
        return cls(
            problem,
            2 + n + int(savable.sum()),
            np.concatenate([np.zeros(n, np.int64), op[owner], read, needed]),
            np.concatenate([op, value[savable], readers, np.ones(len(needed), np.int64)]),
            np.concatenate([np.zeros(n), weights[problem.storage[savable]], never]),
            np.concatenate([prices, np.zeros(len(owner)), nothing]),
            op,
            value,
        )

    def network(self, price: float) -> Network:
        """The network at so many bytes a second; capacities are rounded to 2**-60 of their sum.

        At a price of 0 all seconds together weigh half a byte: of the plans that save the fewest, the quickest is best.
        """
        total = float(self.seconds[np.isfinite(self.seconds)].sum())
        costs = self.nbytes + (price or 0.5 / (total or 1.0)) * self.seconds
        return Network(self.size, self.tails, self.heads, whole_capacities(costs)[0])

    def choice(self, side: Bools) -> Choice:
        """Return the choice that a cut stands for, given by the source's side."""
        return self.problem.choose(~side[self.op])

    @cached_property
    def rank(self) -> Ints:
        """The position of the op of each vertex."""
        found = np.zeros(self.size, np.int64)
        found[self.value] = self.problem.maker
        found[self.op] = np.arange(len(self.op))
        return found

    def nodes(self, vertices: Iterable[int]) -> tuple[Node, ...]:
        """Return the nodes that vertices stand for, each once."""
        known = dict(zip(self.value.tolist(), self.problem.values, strict=True))
        known |= dict(zip(self.op.tolist(), self.problem.ops, strict=True))
        return tuple(dict.fromkeys(known[v] for v in vertices if v in known))


def cheapest(cutting: CutNetwork, price: float, why: Mapping[Node, str]) -> Choice:
    """Return the choice of least cost in bytes at ``price`` bytes per second; of equal choices the one with the
    fewest ops.

    Args:
        cutting: the network.
        price: bytes that a second is worth.
        why: op that may not be recomputed -> the reason, for the error.

    Raises:
        NoPlanError: SK303 when something that backward needs can be neither saved nor recomputed.
    """
    with explained(cutting, why):
        return cutting.choice(min_cut(cutting.network(price)).largest)


@contextmanager
def explained(cutting: CutNetwork, why: Mapping[Node, str]) -> Iterator[None]:
    """Turn ``NoCutError`` into SK303, which names the nodes on the path of infinite edges and its start."""
    try:
        yield
    except NoCutError as error:
        nodes = cutting.nodes(error.path)
        culprit, way = nodes[0], " -> ".join(n.name for n in nodes)
        raise NoPlanError(
            "SK303",
            f"{culprit.name} may be neither saved nor computed again ({why.get(culprit, 'no reason is known')}), and "
            f"backward needs it: {way}",
            "Let one of these be saved (a finite size), or be computed again.",
            nodes,
        ) from error
