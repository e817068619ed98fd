"""Compromises between the true peak and recompute time: the best plans that searches for several budgets meet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from splitkit.costs import Costs
from splitkit.search.recompute.pool import Pool, Seen
from splitkit.search.recompute.search import RecomputeSearch
from splitkit.training.checkpoints import as_eager
from splitkit.training.choices import savings
from splitkit.training.flow import JointFlow
from splitkit.training.peaks import Peaks


@dataclass(frozen=True, eq=False)
class PeakFront:
    """The plans of a joint graph that no other that was seen beats in both the peak and the time.

    Attributes:
        flow: facts about the graph.
        costs: prices of running a node again.
        budgets: how many are searched for, evenly between the lowest peak and that of eager mode.
    """

    flow: JointFlow
    costs: Costs
    budgets: int

    @cached_property
    def _search(self) -> RecomputeSearch:
        return RecomputeSearch(Pool(savings(self.flow, self.costs), Peaks(self.flow)))

    @cached_property
    def plans(self) -> tuple[Seen, ...]:
        """By rising peak, and falling time."""
        search = self._search
        whole = search.pool.see_plan(as_eager(self.flow))
        lowest = search.lowest_peak()
        search.cheapest_at(lowest)
        for number in range(1, self.budgets):
            search.peak(lowest.peak + (whole.peak - lowest.peak) * number // self.budgets)
        front: list[Seen] = []
        for seen in sorted(search.pool, key=lambda seen: (seen.peak, seen.seconds, seen.saved)):
            if not front or seen.seconds < front[-1].seconds:
                front.append(seen)
        return tuple(front)

    def within(self, nbytes: float) -> Seen | None:
        """The quickest whose peak is at most so many bytes; ``None`` if there is none."""
        return next((seen for seen in reversed(self.plans) if seen.peak <= nbytes), None)

    def bound(self, nbytes: int) -> float:
        """Seconds that every plan in the order of the graph takes whose peak is at most so many bytes."""
        return self._search.bound(nbytes)
