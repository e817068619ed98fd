"""What a training step saves and recomputes, and why; what fills the peak, and what other budgets would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.fx import Node

from splitkit.costs.named import priced
from splitkit.engine.joint_stages.divide_stages import divide_stages
from splitkit.engine.pair import divide
from splitkit.errors import SplitError
from splitkit.graph.dataflow import module_path
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.policies import Budget, MinCut
from splitkit.prices import Costs, checked, unit_of
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.plan_pool import Pool
from splitkit.short_repr import brief
from splitkit.studies.explanation.folded_names import ranges, without_numbers
from splitkit.studies.explanation.recompute_rows import AGAIN, SAVED, RecomputeChoices, RecomputeRow
from splitkit.studies.explanation.told import Section, Told
from splitkit.training.choices import savings
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, save_all_plan
from splitkit.training.peaks import Peaks
from splitkit.training.saved_values import op_of
from splitkit.training.stage_parts import is_staged, stage_part
from splitkit.units import duration, size
from splitkit.view.console.tables import table
from splitkit.view.data.planned_run import planned_run

_SHOWN = 14
_AT_PEAK = 5
MIB = 2**20


@dataclass(frozen=True)
class BudgetVariant:
    """The plan of another budget.

    Attributes:
        change: ``"10 % less memory"`` or ``"10 % more memory"``.
        budget: its bytes.
        of: ``"peak"`` or ``"saved"``, what the budget bounds.
        seconds: the recompute time of its plan; ``None`` if there is none.
        peak: the peak of its plan.
        saved: the bytes that it saves.
        refusal: why there is no plan.
    """

    change: str
    budget: int
    of: str
    seconds: float | None = None
    peak: int | None = None
    saved: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class PeakContents:
    """What is alive at the peak.

    Attributes:
        nbytes: the peak.
        half: ``"forward"`` or ``"backward"``, which runs then.
        node: the node that runs.
        module: its module.
        op: what it computes.
        kinds: kind of storage -> bytes alive; ``"temporary"`` is what the op takes only while it runs.
        largest: (what, bytes) of the largest values alive, with equal layers folded.
    """

    nbytes: int
    half: str
    node: str
    module: str
    op: str
    kinds: Mapping[str, int]
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class RecomputeExplanation(Told):
    """Why a training step saves what it saves.

    Attributes:
        note: the note of the plan.
        policy: the policy that made it; empty if the plan does not say.
        saved: the bytes that forward leaves for backward.
        seconds: the recompute time.
        step: the time of the step without recompute.
        peak: what is alive at the peak; ``None`` for plans in stages, whose ranks have peaks of their own.
        run: for a plan in stages, the step of the schedule that it was made for, if it knows one.
        rows: a row for each kind of value, with equal layers folded.
        paid: the seconds that the policy itself pays for a byte (`MinCut`); ``None`` if it has no such price.
        variants: what other budgets cost; empty if nothing was planned again.
        unit: the unit of the times.
        of: ``"peak"`` if the policy bounds the peak, else ``"saved"``.
    """

    note: str
    policy: str
    saved: int
    seconds: float
    step: float
    peak: PeakContents | None
    rows: tuple[RecomputeRow, ...]
    paid: float | None
    variants: tuple[BudgetVariant, ...]
    unit: str
    of: str = "saved"
    run: ScheduleRun | None = None

    __repr__ = brief

    @property
    def dearest(self) -> float | None:
        """The most seconds for a byte that a recomputed row costs; ``None`` if none has a price."""
        return max((row.rate for row in self.rows if row.decision == AGAIN and row.rate is not None), default=None)

    @property
    def cheapest(self) -> float | None:
        """The fewest seconds for a byte that a saved row would cost; ``None`` if none has a price.

        If the policy bounds the peak, only rows count that would lower it.
        """
        saved = (row for row in self.rows if row.decision == SAVED and row.rate is not None)
        useful = (row for row in saved if self.of == "saved" or (row.peak_change or 0) < 0)
        return min((row.rate for row in useful if row.rate is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; times are in ``unit``, sizes in bytes, rates in times for each byte."""
        return {
            "kind": "recompute",
            "note": self.note,
            "policy": self.policy or None,
            "unit": self.unit,
            "saved": self.saved,
            "seconds": self.seconds,
            "step": self.step,
            "peak": None if self.peak is None else asdict(self.peak),
            "figures": None if self.run is None else {"step": self.run.seconds, "peaks": list(self.run.peaks)},
            "rows": [row.to_dict() for row in self.rows],
            "paid": self.paid,
            "dearest": self.dearest,
            "cheapest": self.cheapest,
            "variants": [asdict(variant) for variant in self.variants],
        }

    def sections(self) -> list[Section]:
        """Return the paragraphs and tables."""
        after = [self._variants()] if self.variants else []
        return [self._sums(), self._peak(), self._table(), self._price(), *after]

    def _time(self, seconds: float) -> str:
        return duration(seconds, self.unit)

    def _sums(self) -> str:
        share = f" ({self.seconds / self.step:.1%} of a step without recompute)" if self.step else ""
        policy = f" Its policy is {self.policy}." if self.policy else ""
        return (
            f"Forward saves {size(self.saved)} for backward, and backward recomputes for {self._time(self.seconds)}"
            f"{share}.{policy}"
        )

    def _peak(self) -> str:
        peak = self.peak
        if peak is None and self.run is None:
            return f"Each rank has a peak of its own. The plan says: {self.note}."
        if peak is None:
            assert self.run is not None
            return f"{self.run.told}. Each rank has a peak of its own. {self.run.fullest()}."
        kinds = sorted(((n, name) for name, n in peak.kinds.items() if n), reverse=True)
        told = ", ".join(f"{size(n)} of {name}" for n, name in kinds)
        where = f" of {peak.module}" if peak.module else ""
        most = "; ".join(f"{what} {size(n)}" for what, n in peak.largest)
        return (
            f"The peak is {size(peak.nbytes)}, in {peak.half}, while {peak.op}{where} ({peak.node}) runs. Then "
            f"{told} are alive. The largest are: {most}."
        )

    def _price(self) -> str:
        says = []
        if self.paid is not None:
            says.append(f"The policy pays up to {self._rate(self.paid)}.")
        if self.dearest is not None:
            says.append(f"The most expensive recompute in the plan costs {self._rate(self.dearest)} that is not saved.")
        if self.cheapest is not None:
            lower = " that would lower the peak but" if self.of == "peak" else " that"
            says.append(f"The cheapest recompute{lower} is not in the plan would cost {self._rate(self.cheapest)}.")
        if not says and self.of == "peak":
            return "No single change of the plan would lower the peak."
        if not says:
            return "No choice has a price: everything is forced, or costs no time."
        return " ".join(says)

    def _rate(self, rate: float) -> str:
        return f"{self._time(rate * MIB)} for each MiB"

    def _table(self) -> Section:
        staged = any(row.stages for row in self.rows)
        titles = [
            "value",
            *(["stage"] if staged else []),
            "",
            "each",
            "total",
            "recompute",
            "per MiB",
            "why",
        ]
        cells = [self._cells(row, staged) for row in self.rows[:_SHOWN]]
        left = self.rows[_SHOWN:]
        more = sum(row.nbytes * len(row.nodes) for row in left)
        title = f"the largest {len(cells)} of {len(self.rows)} rows; the others have {size(more)}" if left else ""
        right = ("each", "total", "recompute", "per MiB")
        return table(titles, cells, right, title, least={"value": 24, "why": 24}, spare=("total", "each"))

    def _cells(self, row: RecomputeRow, staged: bool) -> list[str]:
        count = len(row.nodes)
        each = size(row.nbytes)
        seconds = "" if row.seconds is None else self._time(row.seconds)
        rate = "" if row.rate is None else self._time(row.rate * MIB)
        stage = [ranges(row.stages)] if staged else []
        whole = size(row.nbytes * count)
        return [row_name(row), *stage, row.decision, each, whole, seconds, rate, why(row, self.paid)]

    def _variants(self) -> Section:
        titles = ("planned again with", "budget", "recompute", "peak", "saved", "cost")
        rows = []
        for v in self.variants:
            if v.seconds is None or v.peak is None or v.saved is None:
                rows.append([v.change, f"{size(v.budget)} {v.of}", "-", "-", "-", f"no plan: {v.refusal}"])
                continue
            more = v.seconds - self.seconds
            sign = "more" if more > 0 else "less"
            costs = "nothing" if abs(more) <= 1e-9 * self.step else f"{self._time(abs(more))} {sign} recompute"
            numbers = [self._time(v.seconds), size(v.peak), size(v.saved)]
            rows.append([v.change, f"{size(v.budget)} {v.of}", *numbers, costs])
        return table(titles, rows, ("budget", "recompute", "peak", "saved"))


def row_name(row: RecomputeRow) -> str:
    """Return ``model.layers.0-5.mlp: silu``."""
    name = row.module.replace("*", row.layers, 1) if row.layers else row.module
    count = len(row.nodes)
    several = f" (x{count})" if count > 1 and not row.layers else ""
    return f"{name or 'the model'}: {row.op}{several}"


def why(row: RecomputeRow, paid: float | None) -> str:
    """Return why a row is saved or recomputed, in words."""
    if row.forced:
        return row.forced
    if row.seconds is None:
        return "not priced"
    if row.decision == AGAIN:
        if not row.seconds:
            return "it costs no time"
        if row.peak_change is not None and row.peak_change <= 0:
            return "saving it would not raise the peak, so recomputing it gains nothing there"
        return (
            "cheap for its bytes"
            if row.peak_change is None
            else f"saving it would add {size(row.peak_change)} to the peak"
        )
    if row.rate is None:
        return "its inputs would have to be saved in its place"
    if paid is not None:
        return (
            "more expensive than the price"
            if row.rate > paid
            else "together with the rest, more expensive than the price"
        )
    if row.peak_change is None:
        return "its stage has room for it" if row.stages else "expensive for its bytes"
    if row.peak_change >= 0:
        return "recomputing it would not lower the peak"
    return f"recomputing it would lower the peak by {size(-row.peak_change)}"


def explain_recompute(
    flow: JointFlow, plan: Plan, policy: object, costs: Costs, *, again: bool
) -> RecomputeExplanation:
    """Explain a plan of forward and backward, also one in stages.

    Args:
        flow: the facts of the joint graph.
        plan: the plan.
        policy: the policy that made it; ``None`` if it is not known.
        costs: the prices.
        again: whether to plan again with other budgets.
    """
    choices, costs = choices_of(flow, plan, policy, costs)
    whole = choices.plan
    staged = bool(choices.stage_of)
    profile = None if staged else _profile(flow, whole, costs)
    seconds = choices.seen.seconds
    return RecomputeExplanation(
        plan.note,
        plan.policy,
        choices.seen.saved if profile is None else profile.saved,
        seconds,
        sum(costs.seconds(node) for node in flow.nodes),
        None if profile is None else _contents(profile),
        choices.rows,
        _paid(policy),
        tuple(_variants(choices, policy, costs)) if again and not staged else (),
        unit_of(costs),
        "peak" if isinstance(policy, Budget) and policy.of == "peak" else "saved",
        staged_run(flow, plan, costs) if staged else None,
    )


def staged_run(flow: JointFlow, plan: Plan, costs: Costs) -> ScheduleRun | None:
    """Return the step of a plan in stages under the schedule that it was made for; ``None`` if it knows none."""
    return planned_run(plan, divide_stages(flow, plan).stage_costs(costs))


def choices_of(flow: JointFlow, plan: Plan, policy: object, costs: Costs) -> tuple[RecomputeChoices, Costs]:
    """Return the choices of a plan, in stages or not, and the checked prices."""
    costs = checked(priced(flow, costs, None))
    stage_of: dict[Node, int] = {}
    if is_staged(plan.parts):
        stage_of = {n: part.stage for n, keys in plan.items() if keys and (part := stage_part(keys[0])) is not None}
        plan = _without_stages(flow, plan)
    pair = divide(flow, plan, costs)
    assert pair.plan is not None
    return RecomputeChoices(Pool(savings(flow, costs), Peaks(flow)), pair.plan, stage_of), costs


def _without_stages(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan of forward and backward that a plan in stages refines.

    Sums over stages of the gradient of a shared parameter are in no stage: backward computes them.
    """

    def halves(keys: Sequence[PartKey]) -> tuple[PartKey, ...]:
        parts = [stage_part(key) for key in keys]
        return tuple(dict.fromkeys(FORWARD if part and part.half == "forward" else BACKWARD for part in parts))

    parts: dict[PartKey, Part] = {key: Part(key) for key in (FORWARD, BACKWARD)}
    places = {n: halves(plan.places.get(n, ())) or save_all_plan(flow).places[n] for n in flow.nodes}
    return replace(plan, places=places, parts=parts, claim=None)


def _profile(flow: JointFlow, plan: Plan, costs: Costs) -> MemoryProfile:
    pair = divide(flow, plan, costs)
    return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


def _contents(profile: MemoryProfile) -> PeakContents:
    """Return what is alive at the peak of a run."""
    alive, node = profile.live_at_peak, profile.at
    kinds: dict[str, int] = {}
    groups: dict[str, list[tuple[int, int]]] = {}
    for storage in alive:
        kind = _PLURAL.get(storage.kind, storage.kind)
        kinds[kind] = kinds.get(kind, 0) + storage.nbytes
        if storage.node is None or storage.node.op == "placeholder":
            continue
        module, numbers = without_numbers(module_path(storage.node))
        name = f"{module or 'the model'}: {op_of(storage.node)}"
        groups.setdefault(name, []).append((storage.nbytes, numbers[0] if numbers else -1))
    left = profile.peak - sum(kinds.values())
    if left > 0:
        kinds["temporary"] = left
    largest = sorted(groups.items(), key=lambda item: -sum(n for n, _ in item[1]))[:_AT_PEAK]
    half = next((call for call, steps in profile.calls.items() if profile.index in steps), "")
    named = tuple((_folded(name, found), sum(n for n, _ in found)) for name, found in largest)
    if node is None:
        return PeakContents(profile.peak, half, "", "", "nothing", kinds, named)
    return PeakContents(profile.peak, half, node.name, module_path(node), op_of(node), kinds, named)


_PLURAL = {
    "parameter": "parameters",
    "buffer": "buffers",
    "constant": "constants",
    "input": "inputs",
    "activation": "activations in use",
    "saved": "saved values",
    "tangent": "tangents",
    "gradient": "gradients",
    "cast": "casts of weights",
    "output": "outputs",
}


def _folded(name: str, found: Sequence[tuple[int, int]]) -> str:
    numbers = [number for _, number in found if number >= 0]
    return name.replace("*", ranges(numbers), 1) if numbers else name


def _paid(policy: object) -> float | None:
    """Return the seconds that a policy pays for a byte."""
    if not isinstance(policy, MinCut) or isinstance(policy.price, str) or not policy.price:
        return None
    return 1 / float(policy.price)


def _variants(choices: RecomputeChoices, policy: object, costs: Costs) -> Iterator[BudgetVariant]:
    """Yield the plans of a tenth less and a tenth more: of the peak for budgets of the peak, else of saved bytes."""
    seen, flow = choices.seen, choices.problem.flow
    if isinstance(policy, Budget) and policy.of == "peak" and policy.offload is None:
        limit = policy.limit(flow)
        limit = seen.peak if limit is None else limit
        for change, factor in (("10 % less memory", 0.9), ("10 % more memory", 1.1)):
            yield _of_peak(change, int(limit * factor), choices, policy, costs)
        return
    hull = Hull.of(choices.problem)
    for change, factor in (("10 % less saved", 0.9), ("10 % more saved", 1.1)):
        budget = int(seen.saved * factor)
        choice = hull.within(budget)
        if choice is None:
            least = min((one.nbytes for one in hull.choices), default=0)
            yield BudgetVariant(change, budget, "saved", refusal=f"no plan saves less than {size(least)}")
            continue
        other = choices.pool.see(choice.runs)
        yield BudgetVariant(change, budget, "saved", other.seconds, other.peak, other.saved)


def _of_peak(change: str, budget: int, choices: RecomputeChoices, policy: Budget, costs: Costs) -> BudgetVariant:
    try:
        plan = policy.within(budget).assign(choices.problem.flow, costs)
    except SplitError as error:
        return BudgetVariant(change, budget, "peak", refusal=error.reason.partition(":")[0])
    found = choices.pool.see_plan(plan)
    return BudgetVariant(change, budget, "peak", found.seconds, found.peak, found.saved)
