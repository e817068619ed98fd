"""The flow network whose minimum cuts are the best choices of what the weight part of a backward does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.search.deferral.deferral_problem import OUTSIDE, Deferral, Deferrals
from splitkit.solvers.cuts.min_cut import Network, min_cut, whole_capacities

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DeferralNetwork:
    """A `Deferrals` as a network, with two vertices for each op and one for each storage.

    ::

        source --inf--> early(o)                        o is pinned: it is in the input part
        late(o) --inf--> early(o)                       o is in a part
        early(o) --seconds--> late(o)                   o is in both
        early(o) --seconds--> sink                      o is in the input part and need not be
        early(o) --inf--> early(p)                      o needs p
        late(maker) --nbytes--> storage --inf--> late(o)   o reads the storage, which the weight part does not make

    ``early(o)`` on the source's side means that o is in the input part, ``late(o)`` on the sink's side that it is in
    the weight part.

    Attributes:
        problem: the arrays.
        size: the number of vertices; 0 is the source, 1 the sink.
        tails: (e,) int; where edges start.
        heads: (e,) int; where they end.
        nbytes: (e,) float; what an edge costs in bytes.
        seconds: (e,) float; what it costs in seconds.
    """

    problem: Deferrals
    size: int
    tails: Ints
    heads: Ints
    nbytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, problem: Deferrals, *, products: bool) -> DeferralNetwork:
        """Build the network of a problem.

        Args:
            problem: the arrays.
            products: whether `Deferrals.products` are in the weight part in any case, and no op that takes time runs
                in both parts.
        """
        n, k = len(problem.ops), len(problem.nbytes)
        early, late, storage = 2 + np.arange(n), 2 + n + np.arange(n), 2 + 2 * n + np.arange(k)
        never, single = np.inf, problem.single
        if products:
            single = single | (problem.seconds > 0)
        made = problem.maker != OUTSIDE
        maker = np.where(made, late[problem.maker] if n else 0, 0)
        free = np.flatnonzero(~problem.pinned)
        stays = np.where(problem.products & products, never, problem.seconds)[free]
        ends, reads, along = problem.before, problem.reads, problem.along
        groups: list[tuple[Ints, Ints, object, object]] = [
            (np.zeros(int(problem.pinned.sum()), np.int64), early[problem.pinned], never, 0.0),
            (late, early, never, 0.0),
            (early, late, 0.0, np.where(single, never, problem.seconds)),
            (early[free], np.ones(len(free), np.int64), 0.0, stays),
            (early[ends[:, 0]], early[ends[:, 1]], never, 0.0),
            (maker, storage, problem.nbytes.astype(np.float64), 0.0),
            (storage[reads[:, 1]], late[reads[:, 0]], never, 0.0),
            (late[along[:, 1]], late[along[:, 0]], never, 0.0),
        ]
        columns = [[np.broadcast_to(np.asarray(c), g[0].shape) for c in g] for g in groups]
        tails, heads, nbytes, seconds = (np.concatenate(c) for c in zip(*columns, strict=True))
        return cls(problem, 2 + 2 * n + k, tails, heads, nbytes, seconds)

    def cheapest(self, price: float) -> tuple[Deferral, float]:
        """Return the choice of least ``waiting bytes + price * seconds``, and a lower bound on that of all choices.

        At a price of 0 all seconds together weigh half a byte.
        """
        total = float(self.seconds[np.isfinite(self.seconds)].sum())
        rate = price or 0.5 / (total or 1.0)
        capacities, unit = whole_capacities(self.nbytes + rate * self.seconds)
        cut = min_cut(Network(self.size, self.tails, self.heads, capacities))
        bound = cut.value * unit
        return self.choice(cut.largest), bound if price else float(np.floor(bound))

    def choice(self, side: Bools) -> Deferral:
        """Return the choice that a cut stands for, given by the source's side."""
        n = len(self.problem.ops)
        return self.problem.choose(side[2 : 2 + n], ~side[2 + n : 2 + 2 * n])
