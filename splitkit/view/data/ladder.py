"""Turns a plan in stages into the data of its picture: rows, saved values, borders, and prices of possible stages.

All bytes and seconds that a picture shows come from here. The page gets the price of the stage between any two
`splitkit.view.data.page_data.border_marks`, as `splitkit.pipeline.stage_prices.StagePrices` computes it, so that
dragging a border shows exactly what a plan with that border would. A still picture needs none of these prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch import fx
from torch.fx import Node

from splitkit.graph.caches import given_caches
from splitkit.graph.dataflow import Dataflow
from splitkit.memory.segments.graph_memory import GraphMemory
from splitkit.memory.segments.segment import OrderMemory
from splitkit.pipeline.measured_step import MeasuredStep
from splitkit.pipeline.placed_prices import in_part
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan
from splitkit.prices import Costs, Optimizer
from splitkit.view.data.ladder_model import LadderModel, sums_of_makers
from splitkit.view.data.op_columns import ops_data
from splitkit.view.data.page_data import border_marks, resimulated
from splitkit.view.data.plan_template import plan_template
from splitkit.view.data.rerun_parts import Taken, kept_between, rerun, step_choices, taken_values
from splitkit.view.data.rows import LadderRows, ladder_rows
from splitkit.view.data.stage_memory import HeldStorage, held_storages, run_data, shared_weights
from splitkit.view.data.what_if import what_if

SCHEMA = "splitkit.ladder/2"
COLUMNS = ("forward", "backward", "saved", "temporary", "fixed")
"""The figures of a stage: seconds of forward and backward, then bytes."""
_BYTES = COLUMNS[2:]


@dataclass(frozen=True, eq=False)
class LadderView(LadderModel):
    """A plan of a graph, drawn as a ladder.

    Attributes:
        flow: facts about the graph.
        plan: the plan that is drawn.
        costs: the prices of the graph's nodes.
        title: the title above the picture.
        optimizer: as in `splitkit.stage_costs`; ``None`` for inference.
        memory: the memory limit of each device in bytes, if there is one.
        run: a simulated step of these stages, drawn below the ladder.
        measured: what the ranks did when that step ran, with the same actions.
        beside: other plans of the graph to compare with.
    """

    flow: Dataflow
    plan: Plan
    costs: Costs
    title: str = ""
    optimizer: Optimizer | None = "adam"
    memory: int | None = None
    run: ScheduleRun | None = None
    measured: MeasuredStep | None = None
    beside: tuple[Plan, ...] = ()

    @cached_property
    def _keys(self) -> list[Any]:
        return run_order(self.flow, self.plan)

    @cached_property
    def _ranks(self) -> list[tuple[int, ...]]:
        """The tuples (part in the plan, parts in the plans beside) that have nodes, in an order in which they may run.

        A part of each plan reads only from itself and from earlier parts, so a tuple reads only from tuples that are
        no greater in any component, and the lexicographic order has all of those first.
        """
        return sorted(set(self._parts.values()))

    @cached_property
    def _parts(self) -> dict[Node, tuple[int, ...]]:
        """Node -> the numbers of its parts in the plan and in the plans beside it."""
        others = [_numbers(self.flow, plan) for plan in self.beside]
        own = _numbers(self.flow, self.plan)
        self._prices.require_all(own)
        return {node: (part, *(other.get(node, 0) for other in others)) for node, part in own.items()}

    @cached_property
    def rows(self) -> LadderRows:
        """The rows from top to bottom; where plans are compared, a row lies in one part of each."""
        number = {parts: i for i, parts in enumerate(self._ranks)}
        return ladder_rows(self.flow, {node: number[parts] for node, parts in self._parts.items()})

    @cached_property
    def _optimizer(self) -> Optimizer | None:
        """The optimizer; none for a step of generation, which nothing trains."""
        root = self.flow.root
        return None if isinstance(root, fx.GraphModule) and given_caches(root) else self.optimizer

    @cached_property
    def _prices(self) -> StagePrices:
        return StagePrices(self.flow, self.costs, self._optimizer, divided=False)

    @cached_property
    def stages(self) -> tuple[StageCosts, ...]:
        """The costs of the plan's parts; backward is not divided, so nothing waits for its weight part."""
        return self._prices.of(self.plan)

    @cached_property
    def _graph_memory(self) -> GraphMemory:
        """The memory of the graph, each node on the device of its part."""
        return self._prices.memory_of(self.plan)

    @cached_property
    def _memory(self) -> OrderMemory:
        return self._graph_memory.order(self.nodes_of_rows)

    @cached_property
    def _ends(self) -> list[int]:
        """The number of nodes above each row, and the number of all nodes."""
        return list(accumulate(map(len, self.nodes_of_rows), initial=0))

    @cached_property
    def _alone(self) -> list[StageCosts]:
        """The costs of each row as a stage of its own that is not run again, on the device of its part."""
        return [self._stage_of_rows(row, row + 1) for row in range(len(self.rows))]

    @cached_property
    def _elsewhere(self) -> dict[str, Any]:
        """Where devices differ, the times of each row on the device of each part; else nothing."""
        if all(in_part(self.costs, key) is self.costs for key in self._keys):
            return {}
        found = [[self._prices.times(nodes, key) for nodes in self.nodes_of_rows] for key in self._keys]
        forward = [[times[0] for times in part] for part in found]
        return {"on": {"forward": forward, "backward": [[sum(times[1:]) for times in part] for part in found]}}

    @cached_property
    def _rerun(self) -> list[bool]:
        """Whether backward runs each part again."""
        return [again and self.trains for again in rerun(self.plan, self._keys)]

    def _is_rerun(self, row: int) -> bool:
        """Return whether backward runs the part of a row again."""
        return self._rerun[self.part_of_row(row)]

    def _stage_of_rows(self, start: int, end: int, again: bool = False) -> StageCosts:
        """Return the costs of the rows ``start`` to ``end - 1`` as one stage, which backward may run again."""
        nodes = [node for row in self.nodes_of_rows[start:end] for node in row]
        order = self._memory
        if self._alternating[end - 1] > self._alternating[start]:
            nodes.sort(key=self.flow.index.__getitem__)
            order = self._graph_memory.order([*self.nodes_of_rows[:start], nodes, *self.nodes_of_rows[end:]])
        key = self._keys[self.part_of_row(start)]
        return self._prices.stage(order, self._ends[start], self._ends[end], nodes, again, key)

    @cached_property
    def _alternating(self) -> list[int]:
        """For each row, how many rows up to it begin before the row above ends.

        A stage runs its nodes in graph order, where modules may alternate: the decoder's embedding runs before the
        encoder ends. Such a stage has another peak than its rows one after the other.
        """
        index = [[self.flow.index[node] for node in nodes] for nodes in self.nodes_of_rows]
        begins = [own[0] < above[-1] for above, own in pairwise(index)]
        return list(accumulate(begins, initial=0))

    def saved_bytes(self, start: int, end: int) -> int:
        """Return the bytes that the rows ``start`` to ``end - 1``, as one stage, would save for backward."""
        return self._stage_of_rows(start, end, self._is_rerun(start)).saved_bytes

    @property
    def trains(self) -> bool:
        """Whether there is a backward to draw."""
        return self._optimizer is not None and bool(self._prices.activations and self._prices.activations.saved)

    def still(self) -> dict[str, Any]:
        """Return what a still picture shows, as plain data; takes time linear in the graph."""
        return self.common() | {
            "schema": SCHEMA,
            "note": self.plan.note,
            "trains": self.trains,
            "parts": _part_names(self._keys),
            "devices": [self._device(key) for key in self._keys],
            "times": {c: [_figure(row, c) for row in self._alone] for c in ("forward", "backward")} | self._elsewhere,
            "stages": {c: [_figure(s, c) for s in self.stages] for c in COLUMNS},
            "down": [int(self._memory.messages[end]) for end in self._ends],
            "up": [int(self._memory.gradient_messages[end]) if self.trains else 0 for end in self._ends],
            "saved": kept_between(self._saved, self._taken, self.rows.of.__getitem__, self.part_of_row, self._rerun),
            "rerun": self._rerun,
        }

    def _device(self, key: Any) -> str:
        """Return the torch device of a part, or the kind of device that it was planned for; empty for neither."""
        part = self.plan.parts.get(key)
        if part is None or part.device is not None or part.planned_on is None:
            return str(part.device) if part is not None and part.device is not None else ""
        return self.plan.request.devices[part.planned_on].name

    def to_dict(self) -> dict[str, Any]:
        """Return all that the page shows, as plain data."""
        found = self.still()
        at = border_marks(self._borders(), [row.forward + row.backward for row in self._alone])
        # `stretches` has one entry for each pair of marks, in the order in which page/scripts/prices.js looks them up
        stretches = [(a, b) for i, a in enumerate(at) for b in at[i + 1 :]]
        alone = [self._stage_of_rows(r, r + 1, True) if self._is_rerun(r) else row for r, row in enumerate(self._alone)]
        nodes = [node for row in self.nodes_of_rows for node in row]
        place = {node: i for i, node in enumerate(nodes)}
        return found | {
            "marks": at,
            "stretches": None if all(self._rerun) else self._bytes_of(stretches, False),
            "again": self._bytes_of(stretches, True) if any(self._rerun) else None,
            "alone": {c: [_figure(row, c) for row in alone] for c in _BYTES},
            "saved": sums_of_makers(self._saved),
            "ops": ops_data(self.flow, nodes, self.rows.of.__getitem__, self.costs),
            "stored": [storage.to_list(place) for storage in self._held],
            "shared": shared_weights(self._memory, self._ends, self._optimizer),
            "taken": self._taken_by(nodes),
            "plan": plan_template(self.plan, self._keys),
            "run": None if self.run is None else self._run(self.run),
            "beside": [self._beside(number, plan) for number, plan in enumerate(self.beside, 1)],
        }

    def _bytes_of(self, stretches: Sequence[tuple[int, int]], again: bool) -> dict[str, list[float]]:
        """Return the figures in bytes of the stages from one row to another."""
        stages = [self._stage_of_rows(start, end, again) for start, end in stretches]
        return {c: [_figure(stage, c) for stage in stages] for c in _BYTES}

    @cached_property
    def _taken(self) -> list[Taken]:
        """The values that parts keep which backward runs again."""
        return taken_values(self.flow) if any(self._rerun) else []

    def _taken_by(self, nodes: Sequence[Node]) -> list[tuple[int, int, list[int]]]:
        """Return these values by the places of their makers (-1 for an input) and readers among the nodes."""
        place = {node: i for i, node in enumerate(nodes)}
        return [(place.get(of, -1) if of else -1, size, [place[n] for n in read]) for of, size, read in self._taken]

    def part_of_row(self, row: int) -> int:
        """Return the number of the part in the plan that a row lies in."""
        return self._ranks[self.rows.parts[row]][0]

    def _borders(self) -> list[int]:
        """Return the first row of each part, and the number of rows."""
        parts = [self.part_of_row(row) for row in range(len(self.rows))]
        return [0, *(row for row in range(1, len(parts)) if parts[row] != parts[row - 1]), len(parts)]

    def _run(self, run: ScheduleRun) -> dict[str, Any]:
        """Return a simulated step: actions and memory of each rank, and the same stages otherwise."""
        return run_data(run, self.stages) | {
            "whatIf": what_if(run, step_choices(replace(self._prices, divided=True), self.plan, run)),
            "measured": None if self.measured is None else _measured(self.measured, run),
        }

    def _beside(self, number: int, plan: Plan) -> dict[str, Any]:
        """Return a plan beside as data: the part of each row, the stages, and the step if it can be simulated."""
        stages = self._prices.of(plan)
        step = None if self.run is None else resimulated(self.run, stages)
        return {
            "note": plan.note,
            "parts": _part_names(run_order(self.flow, plan)),
            "rows": [self._ranks[rank][number] for rank in self.rows.parts],
            "stages": {c: [_figure(s, c) for s in stages] for c in COLUMNS},
            "step": None
            if step is None
            else {"seconds": step.seconds, "bubble": step.bubble, "peak": max(step.peaks), "unit": step.unit},
        }

    @cached_property
    def _held(self) -> list[HeldStorage]:
        return held_storages(self.flow, self._graph_memory, self.nodes_of_rows) if self.trains else []

    @cached_property
    def _saved(self) -> dict[tuple[int, int], dict[Node, int]]:
        """Return (row that makes storages, row whose backward reads them) -> their makers and bytes.

        Each storage counts once.
        """
        found: dict[tuple[int, int], dict[Node, int]] = {}
        for storage in self._held:
            for saver in storage.savers:
                own = storage.owner(saver)
                of = found.setdefault((self.rows.of[own], self.rows.of[saver]), {})
                of[own] = of.get(own, 0) + storage.nbytes
        return found


def _measured(step: MeasuredStep, run: ScheduleRun) -> dict[str, Any]:
    """Return a measured step: the start and end of each action of ``run.timeline``, and the memory of each rank."""
    times = {(e.kind, e.stage, e.microbatch): (e.start, e.end) for e in step.timeline}
    return {
        "seconds": step.seconds,
        "times": [times[e.kind, e.stage, e.microbatch] for e in run.timeline],
        "memory": [list(map(list, held)) for held in step.memory],
    }


def _numbers(flow: Dataflow, plan: Plan) -> dict[Node, int]:
    """Return node -> the number of its part in the order in which the parts run."""
    number = {key: i for i, key in enumerate(run_order(flow, plan))}
    homes = {node: plan.home(node) for node in flow.nodes if node in plan.places}
    return {node: number[key] for node, key in homes.items() if key is not PARENT}


def _part_names(keys: Iterable[Any]) -> list[str]:
    return [" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in keys]


def _figure(stage: StageCosts, column: str) -> float:
    if column == "backward":
        return stage.backward_input + stage.backward_weight
    whole: float = (
        stage.fixed_bytes
        if column == "fixed"
        else getattr(stage, "forward" if column == "forward" else f"{column}_bytes")
    )
    return whole
