"""The plans of one joint graph that have been simulated; a `PlanPool` hands them from one search to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from splitkit.plans.plan_file import fingerprint
from splitkit.plans.record import Plan
from splitkit.training.choices import Bools, Choice, Savings
from splitkit.training.flow import BACKWARD
from splitkit.training.peaks import Peaks, PeakTrace
from splitkit.training.replay import Replay


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
