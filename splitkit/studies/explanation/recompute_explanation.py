"""What a training step saves and recomputes, and why, and what other budgets would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch.fx import Node

from splitkit.costs.named import priced
from splitkit.costs.roofline import decomposed_attention
from splitkit.engine.divide_stages import divide_stages
from splitkit.engine.pair import divide
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import SplitError, listed
from splitkit.graph.dataflow import module_path
from splitkit.graph.storages import value_of
from splitkit.memory.kernels.target_kernels import CPU
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.policies import Budget, MinCut
from splitkit.prices import Costs, checked, kernels_of, unit_of
from splitkit.search.recompute.memory_limits import saved_storages
from splitkit.search.recompute.offload_planner import offload_run
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.studies.explanation.stage_explanation import ranges, without_numbers
from splitkit.studies.explanation.told import ChangedPlan, Explanation, Section, changes_table, compared_steps
from splitkit.training.choices import Bools, Ints, Savings, savings
from splitkit.training.emission_order import saved_for_backward
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, is_size, op_of, output_nodes, save_all_plan
from splitkit.training.offload_timeline import OffloadRun
from splitkit.training.peaks import Peaks
from splitkit.training.stage_parts import is_staged, stage_part
from splitkit.units import bounded, duration, size
from splitkit.view.data.ladder import planned_run
from splitkit.view.tables import table

_SHOWN = 14  # rows of values


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
    if row.on_host:
        return "it waits on the host"
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
    step, run = staged_step(flow, plan, costs) if staged else (None, None)
    whole = sum(costs.seconds(node) for node in flow.nodes)
    saved = seen.saved if step is None else step.saved_bytes
    changes = tuple(_changes(choices, policy, costs)) if again and not staged else ()
    share = f" ({seen.seconds / whole:.1%} of a step without recompute)" if whole else ""
    sums = (
        f"Forward saves {size(saved)} for backward, and backward recomputes for {duration(seen.seconds, unit)}{share}."
    )
    moved, made = choices.moved, step or pair
    if made is not None and made.host_bytes:
        waits = "" if moved is None else f", and the step waits {duration(moved.exposed)} for copies"
        sums += f" {size(made.host_bytes)} of it wait on the host{waits}."
    if inside := _inside_attention(choices, costs):
        among = f"{size(inside)} of it lie inside attention"
        sums += f" That is at most: {among}, captured as a CPU computes it; on the device one kernel keeps less."
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
        "waits": None if moved is None else moved.exposed,
        "inside_attention": inside,
        "step": whole,
        "peak": None if profile is None else profile.peak,
        "figures": None if run is None else {"step": run.seconds, "peaks": list(run.peaks)},
        "rows": [row.to_dict() for row in choices.rows],
        "changes": [change.to_dict() for change in changes],
    }
    return Explanation(data, tuple(said))


def _inside_attention(choices: RecomputeChoices, costs: Costs) -> int:
    """Return the saved bytes that lie inside attention for which the device has one kernel, and the graph has not."""
    flow, kernels = choices.problem.flow, kernels_of(costs)
    if kernels in (None, CPU):
        return 0
    inside = {node for nodes, *_ in decomposed_attention(flow.graph) for node in nodes}
    storages = {s for node in choices.saved if flow.producer(node) in inside for s in flow.storages.under(node)}
    return sum(flow.storages.nbytes[storage] for storage in storages)


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
    peak = bounded(profile.peak, profile.bounds, profile.unseen)
    return f"The peak is {peak}, in {half}, while {op} runs. Then {told} are alive."


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
        rate = "" if row.rate is None else duration(row.rate * 2**20, unit)
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


def staged_step(flow: JointFlow, plan: Plan, costs: Costs) -> tuple[StagedStep, ScheduleRun | None]:
    """Return the stages of a plan, and their step under the schedule of the plan; ``None`` if it knows none."""
    step = divide_stages(flow, plan)
    return step, planned_run(plan, step.stage_costs(costs))


def choices_of(flow: JointFlow, plan: Plan, costs: Costs) -> tuple[RecomputeChoices, Costs]:
    """Return the choices of a plan, in stages or not, and the checked prices."""
    costs = checked(priced(flow, costs, None))
    stage_of: dict[Node, int] = {}
    if is_staged(plan.parts):
        stage_of = {n: part.stage for n, keys in plan.items() if keys and (part := stage_part(keys[0])) is not None}
        plan = _without_stages(flow, plan)
    pair = divide(flow, plan, costs)
    assert pair.plan is not None
    pool = Pool(savings(flow, costs), Peaks(flow))
    moved = None if stage_of else offload_run(pool, pair.plan, costs)
    return RecomputeChoices(pool, pair.plan, stage_of, moved), costs


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
            hull = Hull(choices.problem)
            choice = hull.within(budget)
            if choice is None:
                least = min((one.nbytes for one in hull.choices), default=0)
                yield ChangedPlan(change, (), f"no plan saves less than {size(least)}")
                continue
            other = choices.pool.see(choice.runs)
        yield ChangedPlan(change, tuple(reversed(compared_steps(seen, other, unit, choices.has_peak))))


# Why each value of a training step is saved or recomputed, with equal layers folded, and what the other choice costs.
#
# A *row* stands for the values of equal layers: the same module but for its numbers, the same op, bytes and reason. The
# other choice is priced for the row's middle layer, by simulating the plan in which it alone is changed.


_MOST = 150
"""How many rows are priced, those with the most bytes first; each takes a simulation."""

SAVED, AGAIN = "saved", "recomputed"
HELD = "the caller holds it anyway"
"""Why an input or a parameter costs nothing to save."""


@dataclass(frozen=True)
class RecomputeRow:
    """Equal values of equal layers.

    Attributes:
        decision: ``"saved"`` or ``"recomputed"``.
        module: their module, with ``*`` for the numbers of layers.
        layers: the numbers, such as ``"0-11"``; empty if the module has none.
        op: the op that makes them.
        nodes: their names, in graph order.
        stages: the stages of a pipeline that they are in; empty without stages.
        nbytes: the bytes of one, as the storage that is saved or would be; 0 for what takes no memory of its own.
        forced: why there is no choice; empty if there is one.
        seconds: what recomputing one takes; with what it needs that is not there. ``None`` if it was not priced.
        saved_change: the bytes that the other choice adds to what is saved (negative: fewer); ``None`` likewise.
        peak_change: the bytes that it adds to the peak; ``None`` likewise, and for plans in stages.
        on_host: whether it waits on the host.
    """

    decision: str
    module: str
    layers: str
    op: str
    nodes: tuple[str, ...]
    stages: tuple[int, ...]
    nbytes: int
    forced: str
    seconds: float | None = None
    saved_change: int | None = None
    peak_change: int | None = None
    on_host: bool = False

    @property
    def rate(self) -> float | None:
        """Seconds of recompute for each byte that need not be saved; ``None`` if it is not known or saves none."""
        if self.seconds is None or not self.saved_change:
            return None
        fewer = -self.saved_change if self.decision == SAVED else self.saved_change
        return self.seconds / fewer if fewer > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "nodes": list(self.nodes), "stages": list(self.stages), "rate": self.rate}


@dataclass(frozen=True, eq=False)
class RecomputeChoices:
    """The choices of a plan for a joint graph.

    Attributes:
        pool: simulates plans.
        plan: the complete plan, with the parts ``"forward"`` and ``"backward"``.
        stage_of: node -> the stage that computes it first; empty without stages.
        moved: the step of a plan whose values wait on the host, if the plan knows the link.
    """

    pool: Pool
    plan: Plan
    stage_of: Mapping[Node, int]
    moved: OffloadRun | None

    @property
    def problem(self) -> Savings:
        """The problem that the plan solves."""
        return self.pool.savings

    @property
    def has_peak(self) -> bool:
        """Whether there is one peak, which the pool knows: not in stages, nor with values that wait on the host."""
        return not self.stage_of and not self.plan.offloaded

    @cached_property
    def runs(self) -> Bools:
        """(n,) bool; the ops that backward computes."""
        return np.array([BACKWARD in self.plan.get(op, ()) for op in self.problem.ops], np.bool_)

    @cached_property
    def seen(self) -> Seen:
        """The plan, as a choice of what is saved."""
        return self.pool.see(self.runs)

    @cached_property
    def _op(self) -> dict[Node, int]:
        return {op: i for i, op in enumerate(self.problem.ops)}

    @cached_property
    def _value(self) -> dict[Node, int]:
        return {value: i for i, value in enumerate(self.problem.values)}

    @cached_property
    def _saved_storages(self) -> Bools:
        return saved_storages(self.seen.choice)

    @cached_property
    def on_host(self) -> frozenset[int]:
        """The storages that wait on the host."""
        return frozenset(int(self.problem.storage[self._value[one.value]]) for one in self.plan.offloaded)

    def _waits(self, node: Node) -> bool:
        return node in self._value and int(self.problem.storage[self._value[node]]) in self.on_host

    @cached_property
    def saved(self) -> list[Node]:
        """The values that backward takes from forward, sizes left out, in graph order."""
        return [n for n in saved_for_backward(self.problem.flow, self.plan) if not is_size(n)]

    @cached_property
    def again(self) -> list[Node]:
        """The ops that both halves compute, in graph order."""
        places = self.plan.places
        return [n for n in self.problem.flow.nodes if FORWARD in places.get(n, ()) and BACKWARD in places.get(n, ())]

    @cached_property
    def returned(self) -> frozenset[Node]:
        """The values that forward returns to the caller."""
        return frozenset(output_nodes(self.problem.flow.outputs))

    def _has(self, value: int) -> bool:
        """Whether backward has a value without computing more."""
        problem = self.problem
        saved = problem.savable[value] or problem.fixed[problem.maker[value]]
        return bool(self.runs[problem.maker[value]] or (saved and self._saved_storages[problem.storage[value]]))

    def chain(self, node: Node) -> tuple[list[int], str]:
        """Return the ops that backward would also have to run to compute a saved value, or why it cannot."""
        problem = self.problem
        first = self._op[problem.flow.producer(node)]
        own = {int(problem.storage[v]) for v in np.flatnonzero(problem.maker == first)}
        found, stack = {first}, [first]
        while stack:
            op = stack.pop()
            if problem.fixed[op]:
                name = problem.ops[op]
                other = "" if op == first else f"it needs {name.name}, which is not saved, and "
                return [], other + problem.why[name]
            for value in problem.read_by[op]:
                maker = int(problem.maker[value])
                gone = int(problem.storage[value]) in own and not self.runs[maker]
                if maker not in found and (gone or not self._has(value)):
                    found.add(maker)
                    stack.append(maker)
        return sorted(found), ""

    def forced(self, node: Node) -> str:
        """Return why a saved value, or an op that runs again, has no other choice; empty if it has one."""
        problem, op = self.problem, self._op.get(self.problem.flow.producer(node))
        if node.op in ("placeholder", "get_attr") or (op is None and node in self.saved):
            return HELD
        if op is None:
            return "it takes no memory of its own"
        if self.runs[op]:
            if problem.forced[op]:
                return "its checkpoint recomputes it"
            if not any(problem.savable[v] for v in np.flatnonzero(problem.maker == op)):
                return "a view: it takes no memory of its own and no time"
            return ""
        return self.chain(node)[1]

    def other(self, node: Node) -> Seen | None:
        """Return the plan in which one choice differs; ``None`` if it cannot."""
        op = self._op.get(self.problem.flow.producer(node))
        if op is None or self.forced(node):
            return None
        runs = self.runs.copy()
        if runs[op]:
            runs[op] = False
        else:
            runs[self.chain(node)[0]] = True
        try:
            return self.pool.see(runs)
        except SplitError:
            return None

    def nbytes(self, node: Node) -> int:
        """Return the bytes of the storage of a value; of all results for an op with several."""
        problem, producer = self.problem, self.problem.flow.producer(node)
        if node in self._value and not isinstance(value_of(node), tuple | list):
            return int(problem.nbytes[problem.storage[self._value[node]]])
        op = self._op.get(producer)
        if op is None:
            return 0
        storages = {int(problem.storage[v]) for v in np.flatnonzero(problem.maker == op)}
        return sum(int(problem.nbytes[s]) for s in storages)

    @cached_property
    def _bases(self) -> Ints:
        """Storage -> the first value that lies in it."""
        return np.unique(self.problem.storage, return_index=True)[1]

    def base(self, node: Node) -> Node:
        """Return the value whose storage a view shares; any other node itself."""
        if node not in self._value or self.runs_again(node):
            return node
        return self.problem.values[int(self._bases[self.problem.storage[self._value[node]]])]

    def row(self, nodes: list[Node], priced: bool = True) -> RecomputeRow:
        """Return the row of equal values, priced for the middle one."""
        node = nodes[len(nodes) // 2]
        base = self.base(node)
        module, _ = without_numbers(module_path(base))
        layers = [numbers[0] for n in nodes if (numbers := without_numbers(module_path(self.base(n)))[1])]
        decision = AGAIN if self.runs_again(node) else SAVED
        stages = tuple(sorted({self.stage_of[n] for n in nodes if n in self.stage_of}))
        known = RecomputeRow(
            decision,
            module,
            ranges(layers),
            op_of(base) if base.op not in ("placeholder", "get_attr") else "input",
            tuple(n.name for n in nodes),
            stages,
            self.nbytes(node),
            self.forced(node),
            on_host=self._waits(node),
        )
        other = self.other(node) if priced else None
        if other is None:
            return known
        more = other.seconds - self.seen.seconds
        return replace(
            known,
            seconds=max(0.0, more if decision == SAVED else -more),
            saved_change=other.saved - self.seen.saved,
            peak_change=other.peak - self.seen.peak if self.has_peak else None,
        )

    def runs_again(self, node: Node) -> bool:
        """Whether backward computes what forward computed."""
        return BACKWARD in self.plan.get(self.problem.flow.producer(node), ())

    @cached_property
    def groups(self) -> list[list[Node]]:
        """The saved values and the recomputed ops, equal ones of equal layers together, the most bytes first."""
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self._decided():
            key = (
                self.runs_again(node),
                without_numbers(module_path(self.base(node)))[0],
                op_of(self.base(node)),
                self._ordinal[self.base(node)],
                self.nbytes(node),
                _kind(self.forced(node)),
                node in self.returned,
                self._waits(node),
            )
            found.setdefault(key, []).append(node)
        return sorted(found.values(), key=lambda nodes: -self.nbytes(nodes[0]) * len(nodes))

    @cached_property
    def _ordinal(self) -> dict[Node, int]:
        """Node -> how many nodes with the same op are before it in its module."""
        counts, found = Counter[tuple[str, str]](), dict[Node, int]()
        for node in self.problem.flow.index:
            key = (module_path(node), op_of(node))
            found[node] = counts[key]
            counts[key] += 1
        return found

    def _decided(self) -> Iterator[Node]:
        """Yield the saved values and the recomputed ops about which something can be said."""
        known = set[int]()  # one value stands for all that are views of its storage
        for node in self.saved:
            storage = int(self.problem.storage[self._value[node]]) if node in self._value else -1
            if node.op != "placeholder" and self.nbytes(node) and storage not in known:
                known.add(storage)
                yield node
        late = {op for op, is_late in zip(self.problem.ops, self.problem.late, strict=True) if is_late}
        for node in self.again:
            if node in self._op and node not in late and self.forced(node)[:6] != "a view":
                yield node

    @cached_property
    def rows(self) -> tuple[RecomputeRow, ...]:
        """A row for each group."""
        return tuple(self.row(nodes, number < _MOST) for number, nodes in enumerate(self.groups))


def _kind(reason: str) -> str:
    """Return a reason without the name of the node that it is about."""
    return reason.partition(", which is not saved, and ")[2] or reason
