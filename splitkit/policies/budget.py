"""The least recompute within a budget of memory: of the true peak, or of what is saved for backward."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from splitkit.costs import Costs
from splitkit.dataflow import Dataflow
from splitkit.errors import NoPlanError, PolicyError
from splitkit.halves import as_joint
from splitkit.peaks import Peaks
from splitkit.plan import Plan, PolicyLike, as_plan
from splitkit.policies.pool import Pool, Seen
from splitkit.policies.pricing import priced, require_price
from splitkit.policies.save_all import SaveAll
from splitkit.policies.search import Proof, Search
from splitkit.savings import savings
from splitkit.units import read_size, size


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

    Every plan that was seen for a graph in this process is a candidate of each later call. So a larger budget never
    costs more than a smaller one that came before, and a second call never does worse than the first. That is all that
    is guaranteed: a plan made first, or in another process, does not know what the search for a smaller budget finds.
    Who wants plans for many budgets should ask for the smallest first.

    Attributes:
        budget: bytes as an int or a text such as ``"1.5GiB"``; or a float from 0.0 to 1.0, the fraction of what
            `SaveAll` takes.
        of: ``"peak"`` or ``"saved"``.
        time_limit: seconds after which the search ends with what it has.
        candidates: policies or plans of one's own; the result is no worse than any of them that fits. What torch's
            partitioner saves is ``Remat(lambda node: node.name in pair.saved)``.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.policies.pricing`); by
            default the costs as they are.
    """

    budget: int | float | str
    of: Literal["peak", "saved"] = "peak"
    time_limit: float = 30.0
    candidates: tuple[PolicyLike, ...] = ()
    price: Literal["fused"] | None = None

    def __post_init__(self) -> None:
        of: object = self.of
        if of not in ("peak", "saved"):
            raise PolicyError("SK302", f"Budget has of={of!r}", "Give 'peak' or 'saved'.")
        limit: object = self.time_limit
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise PolicyError("SK302", f"Budget has time_limit={limit!r}", "Give seconds, more than 0.")
        require_price(self, self.price)
        self._bytes(0)

    def _bytes(self, whole: int) -> int:
        """The budget in bytes, where the whole is what `SaveAll` takes."""
        budget: object = self.budget
        if isinstance(budget, float) and 0 <= budget <= 1:
            return int(budget * whole)
        if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
            return budget
        if isinstance(budget, str) and (nbytes := read_size(budget)) is not None:
            return nbytes
        raise PolicyError(
            "SK302", f"Budget has budget={budget!r}", "Give bytes (an int, or '2GiB'), or a fraction from 0.0 to 1.0."
        )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``"forward"`` and ``"backward"``.

        Raises:
            PolicyError: SK302 for a graph that is no joint graph.
            NoPlanError: SK303 when no plan was found within the budget; it says how low one can go, and by which plan.
        """
        joint = as_joint(self, flow)
        costs = priced(joint, costs, self.price)
        problem = savings(joint, costs)
        pool = Pool(problem, Peaks(joint))
        whole = pool.see_plan(SaveAll().assign(joint, costs))
        for candidate in self.candidates:
            pool.see_plan(as_plan(candidate, joint, costs))
        limit = self._bytes(getattr(whole, self.of))
        search, proof = Search(pool, self.time_limit), Proof(0.0, 0, 0)
        best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None or best.seconds:
            proof = search.peak(limit) if self.of == "peak" else search.saved(limit)
            best = pool.best(lambda seen: self._taken(seen) <= limit)
        if best is None:
            lowest = search.lowest_peak() if self.of == "peak" else search.fewest_saved()
            best = pool.best(lambda seen: self._taken(seen) <= limit)
            if best is None:
                raise self._infeasible(limit, lowest, search)
        return best.choice.plan(self._note(limit, best, proof, len(pool)))

    def _taken(self, seen: Seen) -> int:
        return seen.peak if self.of == "peak" else seen.saved

    def _note(self, limit: int, best: Seen, proof: Proof, count: int) -> str:
        bound = min(proof.bound, best.seconds) if isfinite(proof.bound) else 0.0  # infinite: a plan in another order
        gap = 1 - bound / best.seconds if best.seconds else 0.0
        unit = best.choice.savings.unit
        of = "" if self.of == "saved" else " (of plans in graph order)"
        return (
            f"{self.of} within {size(limit)}: peak {size(best.peak)}, {size(best.saved)} saved, "
            f"{best.seconds:.4g} {unit} computed again; at least {bound:.4g} {unit}{of}, gap {gap:.2%}; "
            f"HiGHS, {proof.programs} programs, {proof.limits} limits; {count} candidates"
        )

    def _infeasible(self, limit: int, lowest: Seen, search: Search) -> NoPlanError:
        taken = self._taken(lowest)
        proven = f"; no plan is below {size(search.least_peak())}" if self.of == "peak" else ""
        what = "peak" if self.of == "peak" else "number of saved bytes"
        again = f"{lowest.seconds:.4g} {lowest.choice.savings.unit}"
        return NoPlanError(
            "SK303",
            f"no plan was found whose {what} is within {size(limit)} ({limit} bytes): the smallest is {size(taken)}, "
            f"where {again} are computed again and {size(lowest.saved)} are saved{proven}",
            f"Budget({taken}, of={self.of!r}) takes that plan; a smaller batch or shorter sequence needs less.",
        )
