"""Local search on simulated peaks: ops change sides, in groups of those that play one part, layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf
from time import monotonic

import numpy as np

from splitkit.search.recompute.pool import Pool, Seen
from splitkit.training.choices import Bools, Ints, Savings
from splitkit.training.peaks import PeakTrace

_STEPS = 180_000  # nodes that one search simulates at most, all its tries together
_MOST = 600  # tries of one search
EFFORT = 3
"""Times as many tries for the lowest peak."""
_STARTS = 3  # plans over the budget from which one goes down to it
_RADIUS = 2  # how far ops look at their neighbours to tell which part they play
_NEAR = 0.97  # what is above this fraction of the peak counts as high


class Descent:
    """Looks for better plans near those of a pool; all that it tries goes into it.

    Counts of tries end it, so that it is the same in every process and on every machine; but for ``until``.

    Attributes:
        pool: simulates.
        until: when to stop, by ``time.monotonic``.
        free: ops that may be saved and may be computed again.
        groups: of these, those that play the same part in each layer.
    """

    def __init__(self, pool: Pool, until: float = inf) -> None:
        self.pool, self.savings, self.until = pool, pool.savings, until
        free = np.zeros(len(self.savings.ops), np.bool_)
        free[self.savings.maker[self.savings.savable]] = True
        self.free = np.flatnonzero(free & ~self.savings.fixed)
        self.groups = _groups(self.savings, self.free)
        self._tries = min(_MOST, _STEPS // max(1, len(pool.peaks.nodes)))

    def sow(self, effort: int = EFFORT) -> None:
        """Try plans that save one group, or every second, third ... of its ops, and compute all else again.

        And those that save and that compute again whatever they can. Small groups, and every second op and so on, are
        for more than the least effort.
        """
        for runs in (False, True):
            self.pool.see(np.full(len(self.savings.ops), runs))
        masks = (group[::apart] for apart in (1, 2, 3, 4) for group in self.groups if apart == 1 or len(group) > apart)
        if effort == 1:
            masks = (group for group in sorted(self.groups, key=lambda group: -len(group)))
        for _, mask in zip(range(effort * self._tries), masks, strict=False):
            if monotonic() > self.until:
                return
            most = np.ones(len(self.savings.ops), np.bool_)
            most[mask] = False
            self.pool.see(most)

    def lower(self, *, others: bool, effort: int = EFFORT) -> None:
        """Go down from the lowest plan: to fewer bytes at the peak, or fewer moments there.

        Args:
            others: whether what the plan neither saves nor computes again is computed again, once another change makes
                backward need it; else it is saved.
            effort: how many times as many tries as a search for a budget has.
        """
        best = self.pool.lowest()
        wish = best.runs
        if others:
            wish = np.ones(len(best.runs), np.bool_)
            wish[self.savings.maker[best.choice.saved & self.savings.savable]] = False
        _Descent(self, best, wish, effort * self._tries).go()

    def under(self, budget: int) -> None:
        """Go down to the budget from plans over it that are quicker than the best within it, and stay so."""
        best = self.pool.best(lambda seen: seen.peak <= budget)
        most = np.inf if best is None else best.seconds
        over = sorted((s for s in self.pool if s.peak > budget and s.seconds < most), key=lambda s: (s.peak, s.seconds))
        for start in over[:_STARTS]:
            if start.seconds < most:
                end = _Descent(self, start, start.runs, self._tries // _STARTS, budget, most).go()
                most = min(most, end.seconds) if end.peak <= budget else most

    def cheaper(self, budget: int) -> None:
        """Save what the best plan within the budget computes again, the dearest first, where it stays within."""
        best = self.pool.best(lambda seen: seen.peak <= budget)
        tries, price = self._tries // 3, self.savings.price
        improved = best is not None
        while improved and best is not None:
            improved = False
            moves = (group[best.runs[group]] for group in (*_many(self.groups), *self.free[:, None]))
            for move in sorted((m for m in moves if len(m)), key=lambda m: -float(price[m].sum())):
                if not tries or monotonic() > self.until:
                    return
                changed = best.runs.copy()
                changed[move] = False
                if self.savings.choose(changed).seconds < best.seconds:
                    seen, tries = self.pool.see(changed), tries - 1
                    if seen.peak <= budget:
                        best, improved = seen, True

    def moves(self, trace: PeakTrace) -> Iterator[Ints]:
        """Groups, then single ops: first those of whose results the most bytes are there at the peak."""
        at = int(trace.timeline.argmax())
        there = (trace.born <= at) & (trace.dies >= at)
        flow, peaks = self.savings.flow, self.pool.peaks
        nbytes = np.bincount(peaks.storages.maker[trace.slot[there]], trace.nbytes[there], minlength=len(peaks.nodes))
        weight = nbytes[[flow.index[op] for op in self.savings.ops]]
        yield from sorted(_many(self.groups), key=lambda group: -float(weight[group].sum()))
        yield from self.free[np.argsort(-weight[self.free], kind="stable")][:, None]


class _Descent:
    """One descent: to less height over the budget, or, without one, nearly at the peak.

    Attributes:
        descent: the search that it is of.
        best: where it is.
        wish: (n,); what is computed again, if backward needs it.
        left: tries that are left.
        budget: bytes.
        seconds: all plans on the way spend less.
    """

    def __init__(
        self,
        descent: Descent,
        start: Seen,
        wish: Bools,
        tries: int,
        budget: int | None = None,
        seconds: float = float("inf"),
    ) -> None:
        self.descent, self.best, self.wish, self.left = descent, start, wish, tries
        self.budget, self.seconds = budget, seconds
        self.trace = descent.pool.trace(start.runs)[1]
        self._tried = set[bytes]()

    def go(self) -> Seen:
        """Take every step that leads down, until none does; yields the plan where it ends."""
        improved = True
        while improved:
            improved = False
            for move in self.descent.moves(self.trace):
                for changed in _flips(self.wish, move):
                    if self._done():
                        return self.best
                    improved |= self._step(changed)
        return self.best

    def _done(self) -> bool:
        within = self.budget is not None and self.best.peak <= self.budget
        return within or self.left <= 0 or monotonic() > self.descent.until

    def _step(self, changed: Bools) -> bool:
        choice = self.descent.savings.choose(changed)
        key = choice.runs.tobytes()
        if key in self._tried or choice.seconds >= self.seconds:
            return False
        self._tried.add(key)
        self.left -= 1
        seen, trace = self.descent.pool.trace(changed)
        high = int(_NEAR * self.best.peak) if self.budget is None else self.budget
        if _height(trace, high) >= _height(self.trace, high) or (self.budget is None and seen.peak > self.best.peak):
            return False
        self.best, self.trace, self.wish = seen, trace, changed
        return True


def _height(trace: PeakTrace, high: int) -> int:
    """Bytes times steps above so many bytes."""
    return int(np.maximum(trace.timeline - high, 0).sum())


def _flips(wish: Bools, move: Ints) -> Iterator[Bools]:
    """The ops all on one side, then all on the other, where that changes anything."""
    for runs in (True, False):
        if (wish[move] != runs).any():
            changed = wish.copy()
            changed[move] = runs
            yield changed


def _many(groups: list[Ints]) -> list[Ints]:
    return [group for group in groups if len(group) > 1]


def _groups(savings: Savings, free: Ints) -> list[Ints]:
    """The ops by the part that they play: the same target and bytes, read from and by such, two steps around.

    (Colour refinement: Weisfeiler and Leman 1968, cut off early, so that the ends of a stack of layers are like the
    middle.)
    """
    held: list[list[int]] = [[] for _ in savings.ops]
    for value, op in enumerate(savings.maker.tolist()):
        held[op].append(int(savings.nbytes[savings.storage[value]]))
    label = _numbered((str(op.target), tuple(held[i]), bool(savings.fixed[i])) for i, op in enumerate(savings.ops))
    maker = savings.maker.tolist()
    for _ in range(_RADIUS):
        label = _numbered(
            (label[i], tuple(label[maker[v]] for v in savings.read_by[i]), tuple(sorted(label[u] for u in users)))
            for i, users in enumerate(savings.used_by)
        )
    found: dict[int, list[int]] = {}
    for op in free.tolist():
        found.setdefault(label[op], []).append(op)
    return [np.array(group, np.int64) for group in found.values()]


def _numbered(keys: Iterator[Hashable]) -> list[int]:
    """Equal numbers for equal keys, in the order in which they first come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
