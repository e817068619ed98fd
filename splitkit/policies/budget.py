"""The policy `Budget`: the least recompute within a limit on the peak, or on the bytes saved for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Literal

from splitkit.checks import is_number, is_whole, is_word, nbytes, shown
from splitkit.costs import Costs
from splitkit.costs.links import HostLink, Offload, require_offload, room_of_host
from splitkit.costs.named import priced, require_price
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.policy import PolicyLike, as_plan, require_policy
from splitkit.plans.record import Plan
from splitkit.prices import checked
from splitkit.search.recompute.offload_planner import OffloadPlanner
from splitkit.search.recompute.plan_pool import PlanPool, Pool, Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.choices import savings
from splitkit.training.flow import JointFlow, MakeOptimizer, as_joint, check_optimizer, optimizer_memory
from splitkit.training.peaks import Peaks, eager_plan
from splitkit.units import duration, size

LEAST = "least"
"""The budget that asks for as little memory as possible."""
_EXACT = 5e-5  # smaller gaps are printed as none


@dataclass(frozen=True)
class Budget:
    """Recompute as little as possible, in seconds, such that memory stays within a budget.

    ``Budget("least")`` uses as little memory as possible. Try it first: its note says how low the peak can be.

    ``Budget("2GiB")`` limits the peak of forward and backward as `splitkit.simulate_memory` predicts it for the pair.
    The peak includes parameters, inputs, the loss and the gradients that backward has computed. ``Budget(0.5)`` is a
    share of the range from the lowest peak that is found (0.0) to the peak of `SaveAll` (1.0). Such a plan always
    exists, however much of the peak is parameters; it holds for the sizes of the graph that was planned.

    ``Budget(card="24GiB", optimizer="adamw")`` limits everything that training holds at once on a card of that size:
    the peak above, the optimizer's state, the gradients of earlier microbatches, the optimizer's own step, and a
    reserve.

    With ``of="saved"`` it limits the bytes that forward saves for backward, as torch's ``activation_memory_budget``
    does, and a share is relative to what `SaveAll` saves; the peak may then rise while the budget falls.

    *Saved bytes*: a mixed-integer program finds the best plan; the note of the plan states the gap.

    *Peak*: the same program is solved repeatedly. Each time, it gets a limit for every step at which the last plan
    exceeds the budget, until the simulated peak of the plan is within the budget. The lifetime of a value differs
    between plans, so these limits are estimates; a local search over simulated plans corrects them. The plan keeps the
    budget to the byte, but a faster plan may exist. The proven bound holds for all plans that recompute a value at most
    once and run everything else in graph order.

    ``Budget("least", of="saved")`` provably saves the fewest bytes of all plans. ``Budget("least")`` has the lowest
    peak that a longer search finds, and its note has a lower bound for all plans. For plans of many budgets, use
    `splitkit.Frontier`.

    The same graph, prices and policy give the same plan, byte for byte: in every process, on every machine, whatever
    was planned before. Searches stop after a number of steps. They stop early only if ``time_limit`` is given, and then
    the note of the plan says so. A search for a smaller budget may find plans that a search for a larger one does not,
    so the plan for a larger budget may be slightly slower. To prevent that, pass the same `PlanPool` to all budgets,
    and plan the smallest first.

    ``Budget("2GiB", offload="pcie5")`` may also move saved activations to the host and back, over that link. Copies
    overlap with computation, one in each direction at a time. The plan has the least recompute and waiting, in seconds,
    that was found within the peak; it is never worse than the plan without offload, nor than offloading the largest
    values first. The claim of the plan has a lower bound for all plans in graph order. Prices must be in seconds.

    Attributes:
        budget: the bytes as an int or a text such as ``"1.5GiB"``; or a float from 0.0 to 1.0, the share of what can be
            saved; or ``"least"``. ``None`` if a card is given.
        of: ``"peak"`` or ``"saved"``, the quantity that is bounded.
        candidates: policies or plans of your own; the result is no worse than any of them that fits. To pass what
            torch's partitioner saves, write ``Remat(lambda node: node.name in pair.saved)``.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.costs.named`); by
            default the costs as they are.
        pool: the plans that earlier searches have seen, to which this search adds its own; by default empty.
        card: instead of a budget, the bytes that training may use in total: an int or a text such as ``"24GiB"``.
        optimizer: with a card: the optimizer whose memory is counted, by name (``"adamw"``, ``"sgd"``, ``"momentum"``
            ...) or as a function that makes it from parameters; ``None`` counts none.
        accumulate: with a card: whether gradients of earlier microbatches exist while the next one runs, as they do if
            the loop accumulates them, or clears them only after forward. Pass False if every step begins without
            gradients.
        reserve: with a card: the bytes, or the share of the card, for memory that is in neither graph nor optimizer:
            the driver's context, kernel workspaces, fragmentation.
        offload: the link to the host: its name (``"pcie5"``), bytes per second, a `splitkit.costs.Link`, or
            `splitkit.costs.Links` from ``"device"`` to ``"host"``; ``None`` offloads nothing.
        host: with ``offload``: the bytes that the host has room for; ``None`` for any number.
    """

    budget: int | float | str | None = None
    of: Literal["peak", "saved"] = "peak"
    candidates: tuple[PolicyLike, ...] = ()
    price: Literal["fused"] | None = None
    pool: PlanPool | None = field(default=None, repr=False, compare=False)
    card: int | str | None = None
    optimizer: str | MakeOptimizer | None = None
    accumulate: bool = True
    reserve: int | float | str = 0.05
    offload: Offload = None
    host: int | str | None = None

    def __post_init__(self) -> None:
        if not is_word(self.of, "peak", "saved"):
            raise PolicyError("SK302", f"Budget has of={shown(self.of)}", "Give 'peak' or 'saved'.")
        candidates: object = self.candidates
        if isinstance(candidates, str | bytes) or not isinstance(candidates, Sequence):
            text = f"Budget has candidates={shown(candidates)}"
            raise PolicyError("SK302", text, "List policies or plans: (SaveAll(), Remat(['aten.mm'])).")
        for candidate in candidates:
            require_policy(candidate)
        if self.pool is not None and not isinstance(self.pool, PlanPool):
            raise PolicyError("SK302", f"Budget has pool={self.pool!r:.200}", "Give a splitkit.policies.PlanPool().")
        require_price(self, self.price)
        check_optimizer(self, self.optimizer)
        if self.card is None:
            self._bytes(0)
        else:
            self._check_card()
        self._check_offload()

    def _check_offload(self) -> None:
        require_offload(self, self.offload, self.host, "Budget('2GiB', ")
        if self.offload is None:
            return
        if self.of != "peak" or self.budget == LEAST:
            what = f"of={self.of!r}" if self.of != "peak" else f"budget={LEAST!r}"
            remedy = "Offload trades time against the peak: give the bytes of the peak, a share, or a card."
            raise PolicyError("SK302", f"Budget has offload={shown(self.offload)} and {what}", remedy)

    def _check_card(self) -> None:
        if self.budget is not None or self.of != "peak":
            other = f"budget={shown(self.budget)}" if self.budget is not None else f"of={self.of!r}"
            remedy = (
                "A card limits the peak of everything that training holds: Budget(card='24GiB', optimizer='adamw')."
            )
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

    def _card_with(self, more: int) -> int:
        """Return the bytes of a card that leaves so many more; a reserve that is a share grows with the card."""
        card, reserved, reserve = nbytes(self, "card", self.card), self._reserved(), self.reserve
        is_share = is_number(reserve) and not is_whole(reserve) and reserve < 1
        return ceil((card - reserved + more) / (1 - float(reserve))) if is_share else card + more

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
        """Return the limit in bytes, if it does not depend on the sizes of the graph; ``None`` for a share or 'least'.

        Raises:
            NoPlanError: SK303 if the card is too small for weights, gradients and optimizer alone.
        """
        if self.card is not None:
            return self._left_on_card(flow)
        return None if self.budget == LEAST or self._is_share() else self._bytes(0)

    def within(self, nbytes: int) -> Budget:
        """Return the same policy with this budget."""
        return replace(self, budget=nbytes, card=None, optimizer=None)

    def _left_on_card(self, flow: JointFlow) -> int:
        """Return the bytes that the card leaves to the peak of forward and backward."""
        taken, card = optimizer_memory(flow, self.optimizer), nbytes(self, "card", self.card)
        there = card - self._reserved()
        held = Peaks(flow).baseline(())
        step = held + taken.gradients + taken.state + taken.temporary
        if step > there:
            error = NoPlanError(
                "SK303",
                f"of a card of {size(card)}, {size(there)} are left after the reserve, and the optimizer's step alone "
                f"takes {size(step)}: {size(held)} of weights and inputs, {size(taken.gradients)} of gradients, "
                f"{size(taken.state)} of state and {size(taken.temporary)} while it steps",
                "No plan of forward and backward changes that: use a larger card, an optimizer with less state, or a "
                "smaller reserve.",
            )
            error.excess = step - there
            raise error
        return there - taken.state - (taken.gradients if self.accumulate else 0)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``"forward"`` and ``"backward"``.

        Raises:
            PolicyError: SK302 for a graph that is not a joint graph.
            NoPlanError: SK303 if no plan was found within the budget; it has the smallest budget that was found.
        """
        joint = as_joint(self, flow)
        costs = priced(joint, costs, self.price)
        pool = Pool(savings(joint, costs), Peaks(joint), self.pool)
        whole = pool.see_plan(eager_plan(joint))
        for candidate in self.candidates:
            pool.see_plan(as_plan(candidate, joint, costs))
        search = RecomputeSearch(pool)
        if self.budget == LEAST:
            return self._least(search)
        limit, bound = self._limit(joint, search, whole), 0.0
        if self.offload is not None:
            return self._with_offload(search, costs, limit, whole)
        best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None or best.seconds:
            bound = search.peak(limit) if self.of == "peak" else search.saved(limit)
            best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None:  # search anew, so that the smallest budget in the message does not depend on this one
            other = search.anew()
            lowest = other.low_peak() if self.of == "peak" else other.fewest_saved()
            pool.take(other.pool)
            best = pool.best(lambda seen: self._taken(seen) <= limit)
            if best is None:
                raise self._infeasible(limit, lowest, other)
        return best.choice.plan(self._note(limit, best, bound, search))

    def _with_offload(self, search: RecomputeSearch, costs: Costs, limit: int, whole: Seen) -> Plan:
        host = room_of_host(self, self.host)
        planner = OffloadPlanner(search, checked(costs), HostLink.of(self.offload), host)
        best = planner.search.best(limit, whole)
        if best is None:
            raise planner.infeasible(limit, f"offload={self.offload!r}" + (f", host={host}" if self.host else ""))
        return planner.plan(best, limit)

    def _limit(self, flow: JointFlow, search: RecomputeSearch, whole: Seen) -> int:
        """Return the limit of the plan in bytes."""
        try:
            limit = self.limit(flow)
        except NoPlanError as error:
            error.nearest = search.low_peak().choice.plan("The lowest peak that was found, on a card that is too small")
            raise
        if limit is not None:
            return limit
        if self.of == "saved":
            return self._bytes(whole.saved)
        least = whole.peak
        if self.budget != 1:  # search anew, so that the share does not depend on what the pool has seen
            other = search.anew()
            least = min(least, other.low_peak().peak)
            search.pool.take(other.pool)
        return self._bytes(whole.peak, least)

    def _taken(self, seen: Seen) -> int:
        return seen.peak if self.of == "peak" else seen.saved

    def _least(self, search: RecomputeSearch) -> Plan:
        """Return the quickest of the plans found that need the least memory."""
        if self.of == "saved":
            least, proven = search.fewest_saved(), "No plan saves less"
        else:
            least = search.cheapest_at(search.lowest_peak())
            proven = f"No plan's peak is below {size(search.least_peak())}"
        exact = f"{self._taken(least)} bytes, the {'fewest' if self.of == 'saved' else 'least'} found"
        return least.choice.plan(f"{self._told(least, exact, search)}. {proven}")

    def _told(self, seen: Seen, about: str, search: RecomputeSearch) -> str:
        """Return what a plan takes, as sentences without the last full stop; ``about`` is said of the limited bytes."""
        peak, saved = search.pool.peaks.told(search.pool.trace(seen.runs)[1]), size(seen.saved)
        peak, saved = (f"{peak} ({about})", saved) if self.of == "peak" else (peak, f"{saved} ({about})")
        again = duration(seen.seconds, seen.choice.savings.time_unit)
        recomputes = f"recomputes for {again}" if seen.seconds else "recomputes nothing"
        return f"The peak is {peak}. Forward saves {saved}, and backward {recomputes}"

    def _note(self, limit: int, best: Seen, bound: float, search: RecomputeSearch) -> str:
        told = self._told(best, f"within {size(limit)}", search)
        if not best.seconds:
            return told
        # The bound is infinite if no plan in graph order fits, and the plan has another order.
        bound = min(bound, best.seconds) if isfinite(bound) else 0.0
        of = "" if self.of == "saved" else " in graph order"
        least, gap = duration(bound, best.choice.savings.time_unit), 1 - bound / best.seconds
        proven = f"less than {least}, which is {gap:.2%} less" if gap >= _EXACT else "less"
        return f"{told}. No plan{of} recomputes {proven}"

    def _infeasible(self, limit: int, lowest: Seen, search: RecomputeSearch) -> NoPlanError:
        taken = self._taken(lowest)
        proven = f"; no plan is below {size(search.least_peak())}" if self.of == "peak" else ""
        what = "peak" if self.of == "peak" else "number of saved bytes"
        further = "; Budget('least') looks for lower ones, for longer" if self.of == "peak" else ""
        way = f"Budget({taken}, of={self.of!r}) takes that plan{further}"
        if self.card is not None:
            card = self._card_with(taken - limit)
            way = f"A card of {card} bytes ({size(card)}) holds that plan and the rest"
        again = duration(lowest.seconds, lowest.choice.savings.time_unit)
        error = NoPlanError(
            "SK303",
            f"no plan was found whose {what} is within {size(limit)} ({limit} bytes): the smallest is {size(taken)}, "
            f"where {again} are computed again and {size(lowest.saved)} are saved{proven}",
            f"{way}; a smaller batch or shorter sequence needs less.",
        )
        about = f"more than {size(limit)}, but the least found"
        error.nearest, error.excess = lowest.choice.plan(self._told(lowest, about, search)), taken - limit
        return error
