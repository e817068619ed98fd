"""The least recompute within a budget of memory: of the true peak, or of what is saved for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from splitkit.checks import is_number, is_whole, is_word, nbytes, seconds, shown
from splitkit.costs import Costs
from splitkit.costs.named import priced, require_price
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.policy import PolicyLike, as_plan, require_policy
from splitkit.plans.record import Plan
from splitkit.search.recompute.pool import PlanPool, Pool, Seen
from splitkit.search.recompute.search import Proof, RecomputeSearch
from splitkit.training.checkpoints import as_eager
from splitkit.training.choices import savings
from splitkit.training.flow import as_joint
from splitkit.training.peaks import Peaks
from splitkit.units import duration, size

LEAST = "least"
"""The budget that is as low as one can go."""


@dataclass(frozen=True)
class Budget:
    """Compute again as little as possible, in seconds, so that memory stays within a budget.

    ``Budget("2GiB")`` bounds the peak of forward and backward, as `splitkit.simulate_memory` finds it of the pair:
    parameters, inputs, the loss and the gradients that backward has made are in it. ``Budget(0.5)`` is half the peak of
    `SaveAll`. With ``of="saved"`` it bounds the bytes that forward leaves for backward, as torch's
    ``activation_memory_budget`` does; the peak may then rise while the budget falls.

    *Saved bytes*: a mixed-integer program finds the best plan; the note of the plan says how far from proven it is.

    *Peak*: the same program, with a limit for each moment at which the plan that it found is over the budget, until
    that plan's simulated peak is within it. As values live longer or shorter from plan to plan, these limits are
    estimates, and what is over them a search for plans near by, each simulated: the plan keeps to the budget, to the
    byte, but need not be the quickest of those that do. What is proven is a bound for all plans that compute a value
    again at most once and run all else in the order of the graph.

    ``Budget("least")`` goes as low as one can: with ``of="saved"`` to the fewest bytes that any plan saves, which is
    proven; else to the lowest peak that a longer search finds, and the note says what no plan is below. For plans of
    many budgets, ask `splitkit.Frontier`.

    The same graph, prices and policy give the same plan, byte for byte: in every process, on every machine, whatever
    was planned before. Every search ends by counts; a clock ends it only where ``time_limit`` is given, and then the
    note of a plan that was cut short says so. As a search for a smaller budget may meet what one for a larger budget
    does not, a larger budget may cost more than a smaller one, by a little. Who wants it never to gives all of them one
    `PlanPool`, and asks for the smallest first.

    Attributes:
        budget: bytes as an int or a text such as ``"1.5GiB"``; or a float from 0.0 to 1.0, the fraction of what
            `SaveAll` takes; or ``"least"``.
        of: ``"peak"`` or ``"saved"``.
        time_limit: seconds after which the search ends with what it has, on a slow machine with less; by default there
            is no such limit.
        candidates: policies or plans of one's own; the result is no worse than any of them that fits. What torch's
            partitioner saves is ``Remat(lambda node: node.name in pair.saved)``.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.costs.named`); by
            default the costs as they are.
        pool: what searches before this one have seen, and where it puts what it sees; by default it knows nothing.
    """

    budget: int | float | str
    of: Literal["peak", "saved"] = "peak"
    time_limit: float | None = None
    candidates: tuple[PolicyLike, ...] = ()
    price: Literal["fused"] | None = None
    pool: PlanPool | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_word(self.of, "peak", "saved"):
            raise PolicyError("SK302", f"Budget has of={shown(self.of)}", "Give 'peak' or 'saved'.")
        candidates: object = self.candidates
        if isinstance(candidates, str | bytes) or not isinstance(candidates, Sequence):
            text = f"Budget has candidates={shown(candidates)}"
            raise PolicyError("SK302", text, "List policies or plans: (SaveAll(), Remat(['aten.mm'])).")
        for candidate in candidates:
            require_policy(candidate)
        if self.time_limit is not None:
            seconds(self, "time_limit", self.time_limit)
        if self.pool is not None and not isinstance(self.pool, PlanPool):
            raise PolicyError("SK302", f"Budget has pool={self.pool!r:.200}", "Give a splitkit.policies.PlanPool().")
        require_price(self, self.price)
        self._bytes(0)

    def _bytes(self, whole: int) -> int:
        """The budget in bytes, where the whole is what `SaveAll` takes."""
        budget: object = self.budget
        if isinstance(budget, str) and budget == LEAST:
            return 0
        if is_number(budget) and not is_whole(budget) and budget <= 1:
            return int(budget * whole)
        return nbytes(self, "budget", budget, besides=", a fraction from 0.0 to 1.0, or 'least'")

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``"forward"`` and ``"backward"``.

        Raises:
            PolicyError: SK302 for a graph that is no joint graph.
            NoPlanError: SK303 when no plan was found within the budget; it says how low one can go, and by which plan.
        """
        joint = as_joint(self, flow)
        costs = priced(joint, costs, self.price)
        pool = Pool(savings(joint, costs), Peaks(joint), self.pool)
        whole = pool.see_plan(as_eager(joint))
        for candidate in self.candidates:
            pool.see_plan(as_plan(candidate, joint, costs))
        search = RecomputeSearch(pool, inf if self.time_limit is None else self.time_limit)
        if self.budget == LEAST:
            return self._least(search)
        limit, proof = self._bytes(getattr(whole, self.of)), Proof(0.0, 0, 0)
        best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None or best.seconds:
            proof = search.peak(limit) if self.of == "peak" else search.saved(limit)
            best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None:  # what is said to be the smallest must not depend on this budget: it is looked for anew
            other = search.anew()
            lowest = other.low_peak() if self.of == "peak" else other.fewest_saved()
            pool.take(other.pool)
            best = pool.best(lambda seen: self._taken(seen) <= limit)
            if best is None:
                raise self._infeasible(limit, lowest, other)
        return best.choice.plan(self._note(limit, best, proof, search))

    def _taken(self, seen: Seen) -> int:
        return seen.peak if self.of == "peak" else seen.saved

    def _least(self, search: RecomputeSearch) -> Plan:
        """The plan that takes the least, and of those that were found the quickest."""
        if self.of == "saved":
            least, proven = search.fewest_saved(), "no plan saves less"
        else:
            least = search.cheapest_at(search.lowest_peak())
            proven = f"no plan is below {size(search.least_peak())}"
        taken = self._taken(least)
        again = duration(least.seconds, least.choice.savings.unit)
        note = (
            f"least {self.of}: {size(taken)} ({taken} bytes), {proven}; peak {size(least.peak)}, {size(least.saved)} "
            f"saved, {again} computed again; {len(search.pool)} candidates{search.ending}"
        )
        return least.choice.plan(note)

    def _note(self, limit: int, best: Seen, proof: Proof, search: RecomputeSearch) -> str:
        bound = min(proof.bound, best.seconds) if isfinite(proof.bound) else 0.0  # infinite: a plan in another order
        gap = 1 - bound / best.seconds if best.seconds else 0.0
        unit = best.choice.savings.unit
        of = "" if self.of == "saved" else " (of plans in graph order)"
        return (
            f"{self.of} within {size(limit)}: peak {size(best.peak)}, {size(best.saved)} saved, "
            f"{duration(best.seconds, unit)} computed again; at least {duration(bound, unit)}{of}, gap {gap:.2%}; "
            f"HiGHS, {proof.programs} programs, {proof.limits} limits; {len(search.pool)} candidates{search.ending}"
        )

    def _infeasible(self, limit: int, lowest: Seen, search: RecomputeSearch) -> NoPlanError:
        taken = self._taken(lowest)
        proven = f"; no plan is below {size(search.least_peak())}" if self.of == "peak" else ""
        what = "peak" if self.of == "peak" else "number of saved bytes"
        further = "; Budget('least') looks for lower ones, for longer" if self.of == "peak" else ""
        again = duration(lowest.seconds, lowest.choice.savings.unit)
        return NoPlanError(
            "SK303",
            f"no plan was found whose {what} is within {size(limit)} ({limit} bytes): the smallest is {size(taken)}, "
            f"where {again} are computed again and {size(lowest.saved)} are saved{proven}",
            f"Budget({taken}, of={self.of!r}) takes that plan{further}; a smaller batch or shorter sequence needs "
            "less.",
        )
