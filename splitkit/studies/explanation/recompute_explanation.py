"""What a training step saves and recomputes, and why, and what other budgets would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from splitkit.costs.named import priced
from splitkit.engine.joint_stages.divide_stages import divide_stages
from splitkit.engine.pair import divide
from splitkit.errors import SplitError, listed
from splitkit.graph.dataflow import module_path
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.policies import Budget, MinCut
from splitkit.prices import Costs, checked, unit_of
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.plan_pool import Pool
from splitkit.studies.explanation.compared_figures import ChangedPlan, changes_table, compared_steps
from splitkit.studies.explanation.folded_names import ranges
from splitkit.studies.explanation.recompute_rows import AGAIN, SAVED, RecomputeChoices, RecomputeRow
from splitkit.studies.explanation.told import Explanation, Section
from splitkit.training.choices import savings
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, save_all_plan
from splitkit.training.peaks import Peaks
from splitkit.training.saved_values import op_of
from splitkit.training.stage_parts import is_staged, stage_part
from splitkit.units import duration, size
from splitkit.view.console.tables import table
from splitkit.view.data.planned_run import planned_run

_SHOWN = 14
_MIB = 2**20


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


def explain_recompute(flow: JointFlow, plan: Plan, policy: object, costs: Costs, *, again: bool) -> Explanation:
    """Explain a plan of forward and backward, also one in stages.

    Args:
        flow: the facts of the joint graph.
        plan: the plan.
        policy: the policy that made it; ``None`` if it is not known.
        costs: the prices.
        again: whether to plan again with other budgets.
    """
    choices, costs = choices_of(flow, plan, costs)
    staged, seen, paid, unit = bool(choices.stage_of), choices.seen, _paid(policy), unit_of(costs)
    pair = None if staged else divide(flow, choices.plan, costs)
    profile = None if pair is None else simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    run = staged_run(flow, plan, costs) if staged else None
    step = sum(costs.seconds(node) for node in flow.nodes)
    saved = seen.saved if profile is None else profile.saved
    changes = tuple(_changes(choices, policy, costs)) if again and not staged else ()
    share = f" ({seen.seconds / step:.1%} of a step without recompute)" if step else ""
    sums = (
        f"Forward saves {size(saved)} for backward, and backward recomputes for {duration(seen.seconds, unit)}{share}."
    )
    said = [
        sums + (f" Its policy is {plan.policy}." if plan.policy else ""),
        _ranks(plan, run) if profile is None else _peak(profile),
        _table(choices.rows, paid, unit),
        *([changes_table("planned again with", changes)] if changes else []),
    ]
    data: dict[str, Any] = {
        "kind": "recompute",
        "note": plan.note,
        "policy": plan.policy or None,
        "unit": unit,
        "saved": saved,
        "seconds": seen.seconds,
        "step": step,
        "peak": None if profile is None else profile.peak,
        "figures": None if run is None else {"step": run.seconds, "peaks": list(run.peaks)},
        "rows": [row.to_dict() for row in choices.rows],
        "changes": [change.to_dict() for change in changes],
    }
    return Explanation(data, tuple(said))


def _ranks(plan: Plan, run: ScheduleRun | None) -> str:
    if run is None:
        return f"Each rank has a peak of its own. The plan says: {plan.note}."
    return f"{run.told}. Each rank has a peak of its own. {run.fullest()}."


def _peak(profile: MemoryProfile) -> str:
    kinds: dict[str, int] = {}
    for storage in profile.live_at_peak:
        kind = _PLURAL.get(storage.kind, storage.kind)
        kinds[kind] = kinds.get(kind, 0) + storage.nbytes
    if (left := profile.peak - sum(kinds.values())) > 0:
        kinds["temporary"] = left
    told = ", ".join(
        f"{size(n)} of {kind}" for n, kind in sorted(((n, k) for k, n in kinds.items() if n), reverse=True)
    )
    half = next((call for call, steps in profile.calls.items() if profile.index in steps), "")
    node = profile.at
    op = "nothing" if node is None else f"{op_of(node)} of {module_path(node) or 'the model'} ({node.name})"
    return f"The peak is {size(profile.peak)}, in {half}, while {op} runs. Then {told} are alive."


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


def _table(rows: Sequence[RecomputeRow], paid: float | None, unit: str) -> Section:
    """Return a row for each kind of value, the largest first; ``paid`` is what the policy pays for a byte."""
    staged = any(row.stages for row in rows)
    titles = ["value", *(["stage"] if staged else []), "", "each", "total", "recompute", "per MiB", "why"]
    cells = []
    for row in rows[:_SHOWN]:
        seconds = "" if row.seconds is None else duration(row.seconds, unit)
        rate = "" if row.rate is None else duration(row.rate * _MIB, unit)
        stage = [ranges(row.stages)] if staged else []
        sizes = [size(row.nbytes), size(row.nbytes * len(row.nodes))]
        cells.append([row_name(row), *stage, row.decision, *sizes, seconds, rate, why(row, paid)])
    more = sum(row.nbytes * len(row.nodes) for row in rows[_SHOWN:])
    title = f"the largest {len(cells)} of {len(rows)} rows; the others have {size(more)}" if rows[_SHOWN:] else ""
    right = ("each", "total", "recompute", "per MiB")
    return table(titles, cells, right, title, least={"value": 24, "why": 24}, spare=("total", "each"))


def explain_value(flow: JointFlow, plan: Plan, policy: object, costs: Costs, node: Node) -> Explanation:
    """Explain why a node of a joint graph is saved or recomputed; the arguments are those of `explain_recompute`."""
    choices, costs = choices_of(flow, plan, costs)
    places, unit = choices.plan.places, unit_of(costs)
    halves = [str(key) for key in places.get(flow.producer(node), ()) if key is not None]
    members = [value for value in choices.saved if flow.producer(value) is node]
    asked = members[0] if members and node not in choices.saved else node
    decided = asked in choices.saved or flow.producer(asked) in choices.again
    row = choices.row([asked]) if decided else None
    late = [user.name for user in node.users if BACKWARD in places.get(flow.producer(user), ())]
    op = op_of(node) if node.op not in ("placeholder", "get_attr") else "an input"
    where = f" of {module_path(node)}" if module_path(node) else ""
    said: list[Section] = [f"{node.name} is {op}{where}, computed in {' and in '.join(halves) or 'neither half'}."]
    if row is None:
        said.append("Backward reads nothing of it that forward makes, so nothing is saved or recomputed.")
    else:
        saved = (
            f"Its {size(row.nbytes)} are saved for backward" if row.decision == SAVED else "Backward computes it again"
        )
        said += [f"{saved}: {why(row, _paid(policy))}.", _table([row], _paid(policy), unit)]
    if late:
        said.append(f"Backward reads it in {listed(late, 6)}.")
    data: dict[str, Any] = {
        "kind": "value",
        "node": node.name,
        "op": op,
        "module": module_path(node),
        "halves": halves,
        "row": None if row is None else row.to_dict(),
        "readers": late,
        "unit": unit,
    }
    return Explanation(data, tuple(said))


def staged_run(flow: JointFlow, plan: Plan, costs: Costs) -> ScheduleRun | None:
    """Return the step of a plan in stages under the schedule that it was made for; ``None`` if it knows none."""
    return planned_run(plan, divide_stages(flow, plan).stage_costs(costs))


def choices_of(flow: JointFlow, plan: Plan, costs: Costs) -> tuple[RecomputeChoices, Costs]:
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


def _paid(policy: object) -> float | None:
    """Return the seconds that a policy pays for a byte."""
    if not isinstance(policy, MinCut) or isinstance(policy.price, str) or not policy.price:
        return None
    return 1 / float(policy.price)


def _changes(choices: RecomputeChoices, policy: object, costs: Costs) -> Iterator[ChangedPlan]:
    """Yield the plans of a tenth less and a tenth more: of the peak for budgets of the peak, else of saved bytes."""
    seen, flow, unit = choices.seen, choices.problem.flow, unit_of(costs)
    of_peak = isinstance(policy, Budget) and policy.of == "peak" and policy.offload is None
    for factor, word in ((0.9, "10 % less"), (1.1, "10 % more")):
        if of_peak:
            assert isinstance(policy, Budget)
            limit = policy.limit(flow)
            budget = int((seen.peak if limit is None else limit) * factor)
            change = f"{word} memory ({size(budget)} peak)"
            try:
                other = choices.pool.see_plan(policy.within(budget).assign(flow, costs))
            except SplitError as error:
                yield ChangedPlan(change, (), error.reason.partition(":")[0])
                continue
        else:
            budget = int(seen.saved * factor)
            change = f"{word} saved ({size(budget)})"
            hull = Hull.of(choices.problem)
            choice = hull.within(budget)
            if choice is None:
                least = min((one.nbytes for one in hull.choices), default=0)
                yield ChangedPlan(change, (), f"no plan saves less than {size(least)}")
                continue
            other = choices.pool.see(choice.runs)
        yield ChangedPlan(change, tuple(reversed(compared_steps(seen, other, unit, choices.has_peak))))
