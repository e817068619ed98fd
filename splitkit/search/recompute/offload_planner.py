"""Plans that recompute and offload, with a note and a claim, or the refusal that says what would fit."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from splitkit.costs import Costs
from splitkit.costs.host_room import require_seconds
from splitkit.costs.links import HostLink
from splitkit.errors import NoPlanError
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.search.recompute.offload_bound import OffloadBound
from splitkit.search.recompute.offload_search import OffloadPlan, OffloadSearch
from splitkit.search.recompute.plan_pool import Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.flow import BACKWARD, FORWARD
from splitkit.training.offload_timeline import OffloadModel
from splitkit.units import duration, size

OBJECTIVE = "recompute and waiting"


class OffloadPlanner:
    """Plans one joint graph.

    Attributes:
        search: the search.
        model: makes timelines.
        host: bytes of the host.

    Raises:
        PolicyError: SK302 if the prices are not seconds.
    """

    def __init__(self, search: RecomputeSearch, costs: Costs, link: HostLink, host: float = inf) -> None:
        require_seconds(costs)
        model = OffloadModel(search.pool.savings, search.pool.peaks, costs, link)
        self.model, self.host = model, host
        self.search = OffloadSearch(search, model, host)

    def best(self, budget: int, whole: Seen) -> OffloadPlan | None:
        """Return the best plan found within a budget; ``whole``: the plan that recomputes nothing."""
        return self.search.best(budget, whole)

    def plan(self, found: OffloadPlan, budget: int) -> Plan:
        """Return the plan of what was found, with the transfers, a note and a claim."""
        bound = OffloadBound(self.model, self.search.pool, budget, self.host).seconds(found.seconds)
        early, late = found.run.waits
        limiting = FORWARD if early > late + found.seen.seconds else BACKWARD
        claim = Claim(OBJECTIVE, found.seconds, bound, f"{self.search.tried} timelines; HiGHS", limiting)
        note = (
            f"The peak is {size(found.run.peak)} (within {size(budget)}). Forward saves {size(found.seen.saved)}, "
            f"{size(found.run.host)} of it on the host in {len(found.run.transfers)} values. Backward recomputes for "
            f"{duration(found.seen.seconds)}, and the step waits {duration(found.run.exposed)} for copies. No plan in "
            f"graph order takes less than {duration(bound)} for both, which is {claim.gap:.2%} less"
        )
        return replace(self.described(found, note), claim=claim)

    def infeasible(self, budget: int, how: str) -> NoPlanError:
        """Return the refusal of a budget, with the lowest peak that was found.

        Args:
            budget: bytes.
            how: the arguments of the policy besides the budget, as a user writes them.
        """
        lowest = self.search.lowest()
        peak = lowest.run.peak
        error = NoPlanError(
            "SK303",
            f"no plan was found whose peak is within {size(budget)} ({budget} bytes): the smallest is {size(peak)}, "
            f"with {size(lowest.run.host)} on the host",
            f"Budget({peak}, {how}) takes that plan or a better one; a smaller batch or shorter sequence needs less.",
        )
        about = f"more than {size(budget)}, but the least found"
        note = f"The peak is {size(peak)} ({about}); {size(lowest.run.host)} wait on the host"
        error.nearest, error.excess = self.described(lowest, note), peak - budget
        return error

    def described(self, found: OffloadPlan, note: str) -> Plan:
        """Return the plan of what was found with a note, without a claim."""
        moved = found.timeline.described(self.search.pool.peaks.nodes, found.run.transfers)
        return replace(found.seen.choice.plan(note), offloaded=moved)
