"""The plans of one joint graph that have been simulated; a `PlanPool` hands them from one search to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from splitkit.plans.plan_file import fingerprint
from splitkit.plans.record import Plan
from splitkit.training.choices import Bools, Choice, Ints, Replay, Savings
from splitkit.training.flow import BACKWARD
from splitkit.training.peaks import Peaks, PeakTrace


@dataclass(frozen=True)
class Result:
    """What the pool remembers of a choice: the ops that run in both halves, (n,) as bytes, and the simulated bytes."""

    twice: bytes
    peak: int
    saved: int


@dataclass(frozen=True, eq=False)
class PlanPool:
    """Plans that searches have seen, for the searches after them: ``Budget("2GiB", pool=pool)``.

    Without one, a plan of `splitkit.policies.Budget` depends on nothing but the graph, the prices and the policy. With
    one, each plan that was seen for the same graph, by whatever prices, is a candidate: a larger budget never costs
    more than a smaller one that was asked for before it. Which plan comes out then depends on what was asked before.

    Attributes:
        graphs: fingerprint of a graph and its sizes -> what was seen of it.
    """

    graphs: dict[str, dict[bytes, Result]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return the number of plans."""
        return sum(map(len, self.graphs.values()))

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Seen:
    """A choice that has been simulated.

    Attributes:
        savings: the arrays that it is a choice of.
        runs: (n,) bool; ops that backward computes.
        peak: peak bytes, as `simulate_memory` finds for the pair.
        saved: bytes that forward leaves for backward.
        seconds: recompute time.
    """

    savings: Savings
    runs: Bools
    peak: int
    saved: int
    seconds: float

    @cached_property
    def choice(self) -> Choice:
        """The saved storages and recomputed ops."""
        return self.savings.choose(self.runs)


class Pool:
    """Simulates choices, each once.

    Args:
        memory: results known from earlier searches of this graph, to which new ones are added; none by default.
    """

    def __init__(self, savings: Savings, peaks: Peaks, memory: PlanPool | None = None) -> None:
        self.savings, self.peaks, self._replay = savings, peaks, Replay(savings, peaks)
        self._known = {} if memory is None else memory.graphs.setdefault(_key(savings, peaks), {})
        self._seen = {runs: self._of(runs, result) for runs, result in self._known.items()}

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[Seen]:
        return iter(self._seen.values())

    def fresh(self) -> Pool:
        """Return an empty pool, for a search that must not depend on what this one has seen."""
        return Pool(self.savings, self.peaks)

    def take(self, other: Pool) -> None:
        """Add what another pool of this graph has seen."""
        self._known |= other._known
        self._seen = {**other._seen, **self._seen}

    def _of(self, runs: bytes, result: Result) -> Seen:
        seconds = float(self.savings.seconds[np.frombuffer(result.twice, np.bool_)].sum())
        return Seen(self.savings, np.frombuffer(runs, np.bool_), result.peak, result.saved, seconds)

    def see(self, runs: Bools) -> Seen:
        """Simulate the choice in which backward computes the ops of ``runs`` that it needs, if it is not yet known."""
        choice = self.savings.choose(runs)
        return self._seen.get(choice.runs.tobytes()) or self._simulate(choice)[0]

    def trace(self, runs: Bools) -> tuple[Seen, PeakTrace]:
        """Return the choice of `see` and its simulated run."""
        return self._simulate(self.savings.choose(runs))

    def _simulate(self, choice: Choice) -> tuple[Seen, PeakTrace]:
        trace, key = self._replay.trace(choice), choice.runs.tobytes()
        twice = (choice.runs & choice.forward).tobytes()
        self._known[key] = result = Result(twice, trace.peak, trace.saved_bytes)
        self._seen[key] = seen = self._of(key, result)
        return seen, trace

    def see_plan(self, plan: Plan) -> Seen:
        """Simulate the choice that recomputes what a plan recomputes."""
        runs = [BACKWARD in plan.get(op, ()) for op in self.savings.ops]
        return self.see(np.array(runs, np.bool_))

    def best(self, fits: Callable[[Seen], bool]) -> Seen | None:
        """Return the quickest choice that fits; of equally quick ones, the one with the lowest peak."""
        return min(filter(fits, self), key=lambda seen: (seen.seconds, seen.peak, seen.saved), default=None)

    def lowest(self) -> Seen:
        """Return the choice with the lowest peak; of equally low ones, the quickest."""
        return min(self, key=lambda seen: (seen.peak, seen.seconds))


def _key(savings: Savings, peaks: Peaks) -> str:
    digest = hashlib.sha256(fingerprint(savings.flow.graph).encode())
    arrays = (
        savings.fixed,
        savings.forced,
        savings.late,
        savings.savable,
        savings.needed,
        savings.nbytes,
        savings.reads,
    )
    for array in (*arrays, np.array(peaks.nbytes), peaks.transient):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# Local search on simulated peaks: ops change sides, in groups of ops that play the same part in each layer.
#
# The program that finds the least recompute sees limits at a few moments; only a simulation sees the peak. A model
# repeats its layers, so a change that helps in one helps in all: an op is grouped with those whose neighbourhoods
# (targets, bytes, what is read and by whom, `_RADIUS` steps around) are equal, and whole groups move before single ops.


_STEPS = 180_000  # nodes that one search simulates at most, all its tries together
_MOST = 600  # tries of one search
EFFORT = 3
"""Times as many tries for the lowest peak."""
_STARTS = 3  # plans over the budget from which one goes down to it
_RADIUS = 2  # how far ops look at their neighbours to tell which part they play
_NEAR = 0.97  # what is above this fraction of the peak counts as high


class Descent:
    """A search for better plans near those of a pool; every plan that it tries goes into the pool.

    Counts of tries end it, so that it is the same in every process and on every machine.

    Attributes:
        pool: simulates the plans.
        free: ops that may be saved and may be recomputed.
        groups: groups of these ops that play the same part in each layer.
        large: the groups of several ops.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.savings = pool, pool.savings
        free = np.zeros(len(self.savings.ops), np.bool_)
        free[self.savings.maker[self.savings.savable]] = True
        self.free = np.flatnonzero(free & ~self.savings.fixed)
        self.groups = _groups(self.savings, self.free)
        self.large = [group for group in self.groups if len(group) > 1]
        self._tries = min(_MOST, _STEPS // max(1, len(pool.peaks.nodes)))

    def sow(self, effort: int = EFFORT) -> None:
        """Try plans that save one group, or every second, third ... of its ops, and recompute everything else.

        The plans that save and that recompute as much as possible are tried as well. Small groups, and fractions of
        groups, need more than the least effort.
        """
        for runs in (False, True):
            self.pool.see(np.full(len(self.savings.ops), runs))
        masks = (group[::apart] for apart in (1, 2, 3, 4) for group in self.groups if apart == 1 or len(group) > apart)
        if effort == 1:
            masks = (group for group in sorted(self.groups, key=lambda group: -len(group)))
        for _, mask in zip(range(effort * self._tries), masks, strict=False):
            most = np.ones(len(self.savings.ops), np.bool_)
            most[mask] = False
            self.pool.see(most)

    def lower(self, *, others: bool, effort: int = EFFORT) -> None:
        """Descend from the lowest plan: to fewer bytes at the peak, or fewer moments there.

        Args:
            others: whether an op that the plan neither saves nor recomputes is recomputed when another change makes
                backward need it; otherwise it is saved.
            effort: how many times the tries of a search for a budget to spend.
        """
        best = self.pool.lowest()
        wish = best.runs
        if others:
            wish = np.ones(len(best.runs), np.bool_)
            wish[self.savings.maker[best.choice.saved & self.savings.savable]] = False
        self._down(best, wish, effort * self._tries)

    def under(self, budget: int) -> None:
        """Descend to the budget from plans above it that are quicker than the best plan within it, and stay quicker."""
        best = self.pool.best(lambda seen: seen.peak <= budget)
        most = np.inf if best is None else best.seconds
        over = sorted((s for s in self.pool if s.peak > budget and s.seconds < most), key=lambda s: (s.peak, s.seconds))
        for start in over[:_STARTS]:
            if start.seconds < most:
                end = self._down(start, start.runs, self._tries // _STARTS, budget, most)
                most = min(most, end.seconds) if end.peak <= budget else most

    def _down(
        self, best: Seen, wish: Bools, tries: int, budget: int | None = None, seconds: float = float("inf")
    ) -> Seen:
        """Take every step that leads down until none does: to less height above the budget, or, without a budget, near
        the peak; return the plan at the end.

        Args:
            best: the plan from which to go.
            wish: (n,) whether an op is recomputed if backward needs it.
            tries: how many plans may be tried.
            budget: bytes.
            seconds: a limit on the recompute time of every plan on the way.
        """
        trace, tried, improved = self.pool.trace(best.runs)[1], set[bytes](), True
        while improved:
            improved = False
            for changed in (flip for move in self.moves(trace) for flip in _flips(wish, move)):
                if len(tried) >= tries or (budget is not None and best.peak <= budget):
                    return best
                choice = self.savings.choose(changed)
                if (key := choice.runs.tobytes()) in tried or choice.seconds >= seconds:
                    continue
                tried.add(key)
                seen, there = self.pool.trace(changed)
                high = int(_NEAR * best.peak) if budget is None else budget
                if _height(there, high) < _height(trace, high) and (budget is not None or seen.peak <= best.peak):
                    best, trace, wish, improved = seen, there, changed, True
        return best

    def cheaper(self, budget: int) -> None:
        """Save what the best plan within the budget recomputes, the most expensive first, while it stays within."""
        best = self.pool.best(lambda seen: seen.peak <= budget)
        tries, price = self._tries // 3, self.savings.price
        improved = best is not None
        while improved and best is not None:
            improved = False
            moves = (group[best.runs[group]] for group in (*self.large, *self.free[:, None]))
            for move in sorted((m for m in moves if len(m)), key=lambda m: -float(price[m].sum())):
                if not tries:
                    return
                changed = best.runs.copy()
                changed[move] = False
                if self.savings.choose(changed).seconds < best.seconds:
                    seen, tries = self.pool.see(changed), tries - 1
                    if seen.peak <= budget:
                        best, improved = seen, True

    def moves(self, trace: PeakTrace) -> Iterator[Ints]:
        """Return groups, then single ops; those with the most bytes alive at the peak come first."""
        at = int(trace.timeline.argmax())
        there = (trace.born <= at) & (trace.dies >= at)
        flow, peaks = self.savings.flow, self.pool.peaks
        nbytes = np.bincount(peaks.storages.maker[trace.slot[there]], trace.nbytes[there], minlength=len(peaks.nodes))
        weight = nbytes[[flow.index[op] for op in self.savings.ops]]
        yield from sorted(self.large, key=lambda group: -float(weight[group].sum()))
        yield from self.free[np.argsort(-weight[self.free], kind="stable")][:, None]


def _height(trace: PeakTrace, high: int) -> int:
    """Return bytes times steps above ``high`` bytes."""
    return int(np.maximum(trace.timeline - high, 0).sum())


def _flips(wish: Bools, move: Ints) -> Iterator[Bools]:
    """Return the choices with all ops on one side, then all on the other, where that changes anything."""
    for runs in (True, False):
        if (wish[move] != runs).any():
            changed = wish.copy()
            changed[move] = runs
            yield changed


def _groups(savings: Savings, free: Ints) -> list[Ints]:
    """Group the ops that play the same part: same target and bytes, read from and by such ops, two steps around.

    This is colour refinement (Weisfeiler and Leman 1968), cut off early so that the ends of a stack of layers are like
    its middle.
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
    """Number the keys in order of first occurrence; equal keys get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
