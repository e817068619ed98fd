"""The least recompute within a budget of memory: of the true peak, or of what is saved for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from splitkit.training.flow import JointFlow, as_joint
from splitkit.training.optimizer import MakeOptimizer, checked_optimizer, optimizer_memory
from splitkit.training.peaks import Peaks
from splitkit.units import duration, size

LEAST = "least"
"""The budget that is as low as one can go."""


@dataclass(frozen=True)
class Budget:
    """Compute again as little as possible, in seconds, so that memory stays within a budget.

    ``Budget("least")`` takes as little memory as one can, and is what to ask first: its note says how low that is.

    ``Budget("2GiB")`` bounds the peak of forward and backward, as `splitkit.simulate_memory` finds it of the pair:
    parameters, inputs, the loss and the gradients that backward has made are in it. ``Budget(0.5)`` is a share of what
    can be saved: half-way from the lowest peak that is found, at 0.0, to that of `SaveAll`, at 1.0. Such a plan always
    exists, however much of the peak is parameters, and is for the sizes that it was planned at.

    ``Budget(card="24GiB", optimizer="adamw")`` bounds all that training holds at once on a card of that size: the peak
    above, the state of the optimizer, the gradients of earlier microbatches, the optimizer's own step, and a reserve.

    With ``of="saved"`` it bounds the bytes that forward leaves for backward, as torch's ``activation_memory_budget``
    does, and a share is one of what `SaveAll` saves; the peak may then rise while the budget falls.

    *Saved bytes*: a mixed-integer program finds the best plan; the note of the plan says how far from proven it is.

    *Peak*: the same program, with a limit for each moment at which the plan that it found is over the budget, until
    that plan's simulated peak is within it. As values live longer or shorter from plan to plan, these limits are
    estimates, and what is over them a search for plans near by, each simulated: the plan keeps to the budget, to the
    byte, but need not be the quickest of those that do. What is proven is a bound for all plans that compute a value
    again at most once and run all else in the order of the graph.

    ``Budget("least", of="saved")`` saves the fewest bytes that any plan saves, which is proven; ``Budget("least")`` has
    the lowest peak that a longer search finds, and the note says what no plan is below. For plans of many budgets, ask
    `splitkit.Frontier`.

    The same graph, prices and policy give the same plan, byte for byte: in every process, on every machine, whatever
    was planned before. Every search ends by counts; a clock ends it only where ``time_limit`` is given, and then the
    note of a plan that was cut short says so. As a search for a smaller budget may meet what one for a larger budget
    does not, a larger budget may cost more than a smaller one, by a little. Who wants it never to gives all of them one
    `PlanPool`, and asks for the smallest first.

    Attributes:
        budget: bytes as an int or a text such as ``"1.5GiB"``; or a float from 0.0 to 1.0, the share of what can be
            saved; or ``"least"``. ``None`` where a card is given.
        of: ``"peak"`` or ``"saved"``.
        time_limit: seconds after which the search ends with what it has, on a slow machine with less; by default there
            is no such limit.
        candidates: policies or plans of one's own; the result is no worse than any of them that fits. What torch's
            partitioner saves is ``Remat(lambda node: node.name in pair.saved)``.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.costs.named`); by
            default the costs as they are.
        pool: what searches before this one have seen, and where it puts what it sees; by default it knows nothing.
        card: bytes that training may take in all, in place of a budget: an int or a text such as ``"24GiB"``.
        optimizer: with a card: the optimizer whose memory is counted, by name (``"adamw"``, ``"sgd"``, ``"momentum"``
            ...) or as a function that makes it of parameters; ``None`` counts none.
        accumulate: with a card: gradients of earlier microbatches are there while the next one runs, as they are when a
            loop accumulates them, or clears them after forward only. Say False where every step begins without any.
        reserve: with a card: bytes, or the share of the card, for what neither graph nor optimizer shows: the context
            of the driver, workspaces of kernels, gaps between allocations.
    """

    budget: int | float | str | None = None
    of: Literal["peak", "saved"] = "peak"
    time_limit: float | None = None
    candidates: tuple[PolicyLike, ...] = ()
    price: Literal["fused"] | None = None
    pool: PlanPool | None = field(default=None, repr=False, compare=False)
    card: int | str | None = None
    optimizer: str | MakeOptimizer | None = None
    accumulate: bool = True
    reserve: int | float | str = 0.05

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
        checked_optimizer(self, self.optimizer)
        if self.card is None:
            self._bytes(0)
        else:
            self._check_card()

    def _check_card(self) -> None:
        if self.budget is not None or self.of != "peak":
            other = f"budget={shown(self.budget)}" if self.budget is not None else f"of={self.of!r}"
            remedy = "A card bounds the peak of all that training holds: Budget(card='24GiB', optimizer='adamw')."
            raise PolicyError("SK302", f"Budget has a card, and {other}", remedy)
        if not isinstance(self.accumulate, bool):
            raise PolicyError("SK302", f"Budget has accumulate={shown(self.accumulate)}", "Give True or False.")
        self._reserved()

    def _reserved(self) -> int:
        """Bytes of the card that are left alone."""
        card, reserve = nbytes(self, "card", self.card), self.reserve
        if is_number(reserve) and not is_whole(reserve) and reserve <= 1:
            return int(reserve * card)
        return nbytes(self, "reserve", reserve, besides=", or a fraction from 0.0 to 1.0")

    def _is_share(self) -> bool:
        budget: object = self.budget
        return is_number(budget) and not is_whole(budget) and budget <= 1

    def _bytes(self, whole: int, least: int = 0) -> int:
        """The budget in bytes, where `SaveAll` takes the whole and nothing takes less than the least."""
        budget: object = self.budget
        if isinstance(budget, str) and budget == LEAST:
            return 0
        if self._is_share():
            return least + int(float(budget) * (whole - least))  # type: ignore[arg-type]
        return nbytes(self, "budget", budget, besides=", a fraction from 0.0 to 1.0, or 'least'")

    def limit(self, flow: JointFlow) -> int | None:
        """The bytes that a plan for this graph is held to whatever its sizes are; ``None`` for a share or 'least'.

        Raises:
            NoPlanError: SK303 for a card that is too small for weights, gradients and optimizer alone.
        """
        if self.card is not None:
            return self._left_on_card(flow)
        return None if self.budget == LEAST or self._is_share() else self._bytes(0)

    def within(self, nbytes: int) -> Budget:
        """The same policy with this budget."""
        return replace(self, budget=nbytes, card=None, optimizer=None)

    def _left_on_card(self, flow: JointFlow) -> int:
        """What the peak of forward and backward may be on the card."""
        taken, card = optimizer_memory(flow, self.optimizer), nbytes(self, "card", self.card)
        there = card - self._reserved()
        held = Peaks(flow).baseline(())
        step = held + taken.gradients + taken.state + taken.temporary
        if step > there:
            error = NoPlanError(
                "SK303",
                f"of a card of {size(card)}, {size(there)} are left beside the reserve, and the optimizer's step alone "
                f"takes {size(step)}: {size(held)} of weights and inputs, {size(taken.gradients)} of gradients, "
                f"{size(taken.state)} of state and {size(taken.temporary)} while it steps",
                "No plan of forward and backward changes that: take a larger card, an optimizer with less state, or a "
                "smaller reserve.",
            )
            error.excess = step - there
            raise error
        return there - taken.state - (taken.gradients if self.accumulate else 0)

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
        limit, proof = self._limit(joint, search, whole), Proof(0.0, 0, 0)
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

    def _limit(self, flow: JointFlow, search: RecomputeSearch, whole: Seen) -> int:
        """The bytes that the plan is held to."""
        try:
            limit = self.limit(flow)
        except NoPlanError as error:
            error.nearest = search.low_peak().choice.plan("as low a peak as was found, on a card that is too small")
            raise
        if limit is not None:
            return limit
        if self.of == "saved":
            return self._bytes(whole.saved)
        least = whole.peak
        if self.budget != 1:  # looked for anew: the share must not depend on what the pool has seen before
            other = search.anew()
            least = min(least, other.low_peak().peak)
            search.pool.take(other.pool)
        return self._bytes(whole.peak, least)

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
        way = f"Budget({taken}, of={self.of!r}) takes that plan{further}"
        if self.card is not None:
            way = f"A card of {size(nbytes(self, 'card', self.card) + taken - limit)} holds that plan and the rest"
        again = duration(lowest.seconds, lowest.choice.savings.unit)
        error = NoPlanError(
            "SK303",
            f"no plan was found whose {what} is within {size(limit)} ({limit} bytes): the smallest is {size(taken)}, "
            f"where {again} are computed again and {size(lowest.saved)} are saved{proven}",
            f"{way}; a smaller batch or shorter sequence needs less.",
        )
        note = f"{self.of} as near as was found to {size(limit)}: {size(taken)}, {again} computed again"
        error.nearest, error.excess = lowest.choice.plan(note), taken - limit
        return error
