"""The best trade-offs between the true peak and recompute plus waiting, where saved values may wait on the host.

The points of `PeakFrontier` are candidates, so no point is above the frontier without offload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from splitkit.costs import Costs
from splitkit.costs.links import HostLink
from splitkit.search.recompute.offload_bound import OffloadBound
from splitkit.search.recompute.offload_planner import OffloadPlanner
from splitkit.search.recompute.offload_search import OffloadPlan
from splitkit.search.recompute.pareto_peaks import PeakFrontier
from splitkit.training.checkpoints import eager_plan


@dataclass(frozen=True, eq=False)
class OffloadFrontier:
    """The plans of a joint graph that no other plan seen beats in both peak and time.

    Attributes:
        peaks: the frontier without offload; its budgets are how many are searched here, too.
        costs: the prices in seconds.
        link: the link to the host.
        host: bytes of the host.
    """

    peaks: PeakFrontier
    costs: Costs
    link: HostLink
    host: float

    @cached_property
    def planner(self) -> OffloadPlanner:
        """Searches for plans, and describes them; SK302 if the prices are not seconds."""
        return OffloadPlanner(self.peaks.search, self.costs, self.link, self.host)

    @cached_property
    def plans(self) -> tuple[OffloadPlan, ...]:
        """The plans by rising peak and falling time."""
        planner = self.planner
        found = [planner.search.kept(seen) for seen in self.peaks.plans]
        whole = self.peaks.search.pool.see_plan(eager_plan(self.peaks.flow))
        lowest = planner.search.lowest()
        found.append(lowest)
        low, count = lowest.run.peak, self.peaks.budgets
        for number in range(count):
            better = planner.best(low + (whole.peak - low) * number // count, whole)
            found += [] if better is None else [better]
        front: list[OffloadPlan] = []
        for plan in sorted(found, key=lambda plan: (plan.run.peak, plan.seconds, plan.run.host)):
            if not front or plan.seconds < front[-1].seconds:
                front.append(plan)
        return tuple(front)

    def bound(self, nbytes: int) -> float:
        """Return a lower bound on recompute and waiting of plans in graph order whose peak is at most ``nbytes``."""
        within = (plan.seconds for plan in reversed(self.plans) if plan.run.peak <= nbytes)
        most = next(within, 2 * max(plan.seconds for plan in self.plans))
        return OffloadBound(self.planner.model, self.peaks.search.pool, nbytes, self.host).seconds(most)
