"""The Pareto frontier of true peak and recompute time, from searches for several budgets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from splitkit.costs import Costs
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.checkpoints import eager_plan
from splitkit.training.choices import savings
from splitkit.training.flow import JointFlow
from splitkit.training.peaks import Peaks


@dataclass(frozen=True, eq=False)
class PeakFrontier:
    """The plans of a joint graph that no other plan seen beats in both peak and time.

    Attributes:
        flow: facts about the graph.
        costs: the price of running a node again.
        budgets: how many budgets are searched, evenly spaced between the lowest peak and that of eager mode.
    """

    flow: JointFlow
    costs: Costs
    budgets: int

    @cached_property
    def search(self) -> RecomputeSearch:
        """The search, with all plans that it has seen."""
        return RecomputeSearch(Pool(savings(self.flow, self.costs), Peaks(self.flow)))

    @cached_property
    def plans(self) -> tuple[Seen, ...]:
        """The plans by rising peak and falling time."""
        search = self.search
        whole = search.pool.see_plan(eager_plan(self.flow))
        lowest = search.lowest_peak()
        search.cheapest_at(lowest)
        for number in range(1, self.budgets):
            search.peak(lowest.peak + (whole.peak - lowest.peak) * number // self.budgets)
        front: list[Seen] = []
        for seen in sorted(search.pool, key=lambda seen: (seen.peak, seen.seconds, seen.saved)):
            if not front or seen.seconds < front[-1].seconds:
                front.append(seen)
        return tuple(front)

    def bound(self, nbytes: int) -> float:
        """Return a lower bound on the seconds of plans in graph order whose peak is at most ``nbytes``."""
        return self.search.bound(nbytes)
