"""The plans of one joint graph that have been simulated, in this process: nothing that was seen is forgotten."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from splitkit.halves import BACKWARD
from splitkit.peaks import Peaks, Trace
from splitkit.plan import Plan
from splitkit.planfile import fingerprint
from splitkit.savings import Bools, Choice, Savings

_GRAPHS = 32  # as many graphs are remembered, the last used
_REMEMBERED: OrderedDict[str, dict[bytes, tuple[int, int]]] = OrderedDict()


def forget() -> None:
    """Forget all plans of all graphs."""
    _REMEMBERED.clear()


@dataclass(frozen=True, eq=False)
class Seen:
    """A choice that has been simulated.

    Attributes:
        choice: what is saved and what is computed again.
        peak: bytes, as `simulate_memory` finds of the pair.
        saved: bytes that forward leaves for backward.
    """

    choice: Choice
    peak: int
    saved: int

    @property
    def seconds(self) -> float:
        """Spent on computing again."""
        return self.choice.seconds


class Pool:
    """Simulates choices, and remembers them under the graph: the same ops and sizes, whatever the prices.

    So a plan that one policy found is a candidate of the next one, also for a graph that was captured anew.
    """

    def __init__(self, savings: Savings, peaks: Peaks) -> None:
        self.savings, self.peaks = savings, peaks
        key = _key(savings, peaks)
        self._known = _REMEMBERED.setdefault(key, {})
        _REMEMBERED.move_to_end(key)
        while len(_REMEMBERED) > _GRAPHS:
            _REMEMBERED.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Seen]:
        for runs, (peak, saved) in self._known.items():
            yield Seen(self.savings.choose(np.frombuffer(runs, np.bool_)), peak, saved)

    def see(self, runs: Bools) -> tuple[Seen, Trace]:
        """Simulate the choice in which backward computes those of these ops that it needs."""
        choice = self.savings.choose(runs)
        trace = self.peaks.trace(choice.plan())
        seen = Seen(choice, trace.peak, trace.saved_bytes)
        self._known[choice.runs.tobytes()] = seen.peak, seen.saved
        return seen, trace

    def see_plan(self, plan: Plan) -> Seen:
        """Simulate the choice that computes again what a plan computes again."""
        runs = [BACKWARD in plan.get(op, ()) for op in self.savings.ops]
        return self.see(np.array(runs, np.bool_))[0]

    def best(self, fits: Callable[[Seen], bool]) -> Seen | None:
        """The quickest of those that fit; of equals, the one with the lowest peak."""
        return min(filter(fits, self), key=lambda seen: (seen.seconds, seen.peak, seen.saved), default=None)


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
