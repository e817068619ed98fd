"""Tables of stage times over pairs of cuts, for pipelines with one stage on each rank: bounds first, exact where asked.

The bounds add up the frontiers of the pieces between neighbouring cuts, as if all that passes a cut were free: by the
Lagrangian ``R(bytes) >= max over prices of (sum of the pieces' least (seconds + price * bytes) - price * bytes)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitkit.search.pipelines.rank_choice import RankChoice
from splitkit.search.pipelines.span_tables import fixed_bytes
from splitkit.search.pipelines.stage_frontiers import problem_key
from splitkit.search.recompute.pareto_cuts import Hull

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_PRICES = 64


class CutTimes:
    """The times of all stages between cuts.

    Attributes:
        cuts: (n + 1,) the positions of the cuts, with 0 and the end.
        lower: (p, n + 1, n + 1) lower bounds on the seconds of stage k from cut i to cut j; infinite if it cannot fit.
        upper: the same; seconds of a stage that fits, where ``known``, else the lower bound.
        known: (p, n + 1, n + 1) bool; which entries are exact.
    """

    def __init__(self, choices: RankChoice, cuts: Ints) -> None:
        self.choices, self.cuts = choices, cuts
        self.problems = choices.frontiers.problems
        self.count = [int(load.surely()[0]) for load in choices.loads]
        both = self.problems.seconds[cuts]
        self._base = both[None, :] - both[:, None]
        self._fixed = fixed_bytes(self.problems, cuts)
        made = self.problems.peaks.gradients[cuts]
        self._gradients = (made[None, :] - made[:, None]).astype(np.float64)
        self.lower = self._bounds()
        self.upper = self.lower.copy()
        self.known = np.zeros(self.lower.shape, np.bool_)

    def _bounds(self) -> Floats:
        size = len(self.cuts)
        outside = np.arange(size)[:, None] >= np.arange(size)[None, :]
        tables = []
        prices, sums = self._lagrangian()
        received = self.problems.sent_on[self.cuts][:, None]
        for rank, limit in enumerate(self.choices.limits):
            table = self._base.copy()
            if limit is not None:
                left = (limit - self._fixed - self._gradients) / max(1, self.count[rank]) - received
                again = np.zeros((size, size))
                for price, total in zip(prices.tolist(), sums, strict=True):
                    np.maximum(again, total[None, :] - total[:, None] - price * left, out=again)
                table += again
                table[left < 0] = np.inf
            table[outside] = np.inf
            tables.append(table)
        return np.array(tables)

    def _lagrangian(self) -> tuple[Floats, Floats]:
        """Return (l,) prices in seconds a byte, and (l, n + 1) sums of the pieces' least cost before each cut."""
        corners, known = list[Floats](), dict[object, Floats]()
        for start, end in zip(self.cuts, self.cuts[1:], strict=False):
            problem = self.problems.problem(int(start), int(end), relaxed=True).savings
            key = problem_key(problem)
            if key not in known:
                hull = Hull.of(problem)
                known[key] = np.array([(c.first, c.second * hull.tick) for c in hull.corners], np.float64)
            corners.append(known[key])
        slopes = [-np.diff(c[:, 1]) / np.diff(c[:, 0]) for c in corners if len(c) > 1]
        prices = np.unique(np.concatenate(slopes)) if slopes else np.zeros(0)
        if len(prices) > _PRICES:
            prices = prices[np.linspace(0, len(prices) - 1, _PRICES).astype(np.int64)]
        sums = np.zeros((len(prices), len(self.cuts)))
        for q, corner in enumerate(corners):
            least = (corner[None, :, 1] + prices[:, None] * corner[None, :, 0]).min(axis=1)
            sums[:, q + 1] = sums[:, q] + least
        return prices, sums

    def settle(self, stage: int, start: int, end: int) -> None:
        """Make the entry of a stage exact."""
        if self.known[stage, start, end] or start >= end:
            return
        self.known[stage, start, end] = True
        span = (int(self.cuts[start]), int(self.cuts[end]))
        base = float(self._base[start, end])
        limit = self.choices.limits[stage]
        frontier = self.choices.frontiers.of(*span)
        points = self.choices.of(stage, [span])
        self.upper[stage, start, end] = np.inf if points is None else base + points[0].seconds
        if limit is not None:
            left = limit - self._fixed[start, end] - self._gradients[start, end]
            bound = frontier.bound(left / max(1, self.count[stage]))
            self.lower[stage, start, end] = max(self.lower[stage, start, end], base + bound)

    def settled(self, ends: Sequence[int]) -> bool:
        """Make the entries of a plan exact; return whether they were."""
        starts = (0, *ends[:-1])
        stages = list(zip(range(len(ends)), starts, ends, strict=True))
        if all(self.known[each] for each in stages):
            return True
        for each in stages:
            self.settle(*each)
        return False
