"""Turns a plan in stages into the data of its picture: rows, saved values, borders, and prices of possible stages.

All bytes and seconds that a picture shows come from here. The page gets the price of the stage between any two
`splitkit.view.data.ladder.border_marks`, as `splitkit.pipeline.stage_prices.StagePrices` computes it, so that
dragging a border shows exactly what a plan with that border would. A still picture needs none of these prices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
from torch import fx
from torch.fx import Node

from splitkit.costs.links import Links, links_of
from splitkit.errors import PlanError, SplitError
from splitkit.graph.caches import given_caches
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import value_bytes
from splitkit.memory.graph_memory import GraphMemory
from splitkit.memory.segment import OrderMemory
from splitkit.pipeline.placed_prices import in_part
from splitkit.pipeline.purpose import planned_order
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import known_schedules, schedule_of
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.pipeline.trace import MeasuredStep
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan, checkpointed
from splitkit.prices import Costs, Optimizer
from splitkit.search.plan_figures import StagePricing
from splitkit.solvers.line.priced_cuts import best_borders
from splitkit.view.data.joint_ladder import LadderModel, LadderRows, as_triples, ladder_rows, sums_of_makers
from splitkit.view.data.report import part_title
from splitkit.view.data.staged_ladder import HeldStorage, held_storages, makers_of, run_data

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
        return self._stages_of(self.plan)

    def _stages_of(self, plan: Plan) -> tuple[StageCosts, ...]:
        return self._prices.of(plan) if self._pricing is None else self._pricing.stages_with_cache(plan)

    @cached_property
    def _pricing(self) -> StagePricing | None:
        """The pricing of a plan that leaves room for a cache, while no optimizer is drawn."""
        asked = self.plan.request.tokens and self._optimizer is None
        return StagePricing.of(self.flow, self.plan, self.costs) if asked else None

    @cached_property
    def _longer(self) -> int:
        """How much more memory a step of the planned length takes for a while than the captured one, about."""
        pairs = zip(self.stages, self._prices.of(self.plan), strict=True)
        return max(0, *(long.temporary_bytes - one.temporary_bytes for long, one in pairs))

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
        return [self.trains and self.plan.parts[key].call == "checkpoint" for key in self._keys]

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
        stage = self._prices.stage(order, self._ends[start], self._ends[end], nodes, again, key)
        if self._pricing is None:
            return stage
        kept = stage.parameter_bytes + sum(self._pricing.request.cache.get(node, 0) for node in nodes)
        return replace(stage, parameter_bytes=kept, temporary_bytes=stage.temporary_bytes + self._longer)

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
            **({} if self._pricing is None else {"tokens": self.plan.request.tokens}),
            "parts": list(map(part_title, self._keys)),
            "devices": [self._device(key) for key in self._keys],
            "times": _columns(self._alone, COLUMNS[:2]) | self._elsewhere,
            "stages": _columns(self.stages),
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
        at = border_marks(self.borders, [row.forward + row.backward for row in self._alone])
        # `stretches` has one entry for each pair of marks, in the order in which page/scripts/prices.js looks them up
        stretches = [(a, b) for i, a in enumerate(at) for b in at[i + 1 :]]
        alone = [self._stage_of_rows(r, r + 1, True) if self._is_rerun(r) else row for r, row in enumerate(self._alone)]
        place: dict[Node | None, int] = {node: i for i, node in enumerate(self.nodes)}
        return found | {
            "marks": at,
            "even": even_borders(at, alone if all(self._rerun) else self._alone, len(self._keys)),
            "stretches": None if all(self._rerun) else self._bytes_of(stretches, False),
            "again": self._bytes_of(stretches, True) if any(self._rerun) else None,
            "alone": _columns(alone, _BYTES),
            "saved": sums_of_makers(self._saved),
            "ops": self.ops(),
            "kept": [makers_of(of, place) for _, of in sorted(self._saved.items())],
            "held": [] if self.run is None else self._held_in(self.run, place),
            "weights": [] if self.run is None else self._weights(),
            "taken": [(place.get(of, -1), nbytes, [place[n] for n in read]) for of, nbytes, read in self._taken],
            "plan": self._plan_file(),
            "run": None if self.run is None else self._run(self.run),
            "beside": [self._beside(number, plan) for number, plan in enumerate(self.beside, 1)],
        }

    def _bytes_of(self, stretches: Sequence[tuple[int, int]], again: bool) -> dict[str, list[float]]:
        """Return the figures in bytes of the stages from one row to another."""
        return _columns([self._stage_of_rows(start, end, again) for start, end in stretches], _BYTES)

    def _plan_file(self) -> dict[str, Any]:
        """Return the plan file that a page can save, without what the page fills in from its borders.

        The parts are in the order in which they run, as the page numbers its stages. The names of nodes are not
        repeated (they are in the columns of ops), so the file is bound to a graph of equal names.
        """
        data = self.plan.to_dict()
        written = dict(zip(self.plan.parts, data["parts"], strict=True))
        kept = {name: data[name] for name in data if name not in ("nodes", "note", "claim", "places")}
        return kept | {"parts": [written[key] for key in self._keys]}

    @cached_property
    def _taken(self) -> list[Taken]:
        """The values that parts keep which backward runs again."""
        return taken_values(self.flow) if any(self._rerun) else []

    def part_of_row(self, row: int) -> int:
        """Return the number of the part in the plan that a row lies in."""
        return self._ranks[self.rows.parts[row]][0]

    def _run(self, run: ScheduleRun) -> dict[str, Any]:
        """Return a simulated step: actions and memory of each rank, and the same stages otherwise."""
        return run_data(run, self.stages) | {
            "whatIf": what_if(run, step_choices(replace(self._prices, divided=True), self.plan, run)),
            "measured": None if self.measured is None else _measured(self.measured, run),
        }

    def _beside(self, number: int, plan: Plan) -> dict[str, Any]:
        """Return a plan beside as data: the part of each row, the stages, and the step if it can be simulated."""
        stages = self._stages_of(plan)
        step = None if self.run is None else resimulated(self.run, stages)
        return {
            "note": plan.note,
            "parts": list(map(part_title, run_order(self.flow, plan))),
            "rows": [self._ranks[rank][number] for rank in self.rows.parts],
            "stages": _columns(stages),
            "step": None
            if step is None
            else {"seconds": step.seconds, "bubble": step.bubble, "peak": max(step.peaks), "unit": step.unit},
        }

    @cached_property
    def _held(self) -> list[HeldStorage]:
        return held_storages(self.flow, self._graph_memory, self.nodes_of_rows) if self.trains else []

    def _held_in(self, run: ScheduleRun, place: Mapping[Node | None, int]) -> list[list[tuple[int, str, int]]]:
        """Return for each stage what it holds of a microbatch of a step: op or -1, how it comes or goes, and bytes.

        The largest are first. Copies of values that it sends are left out.
        """
        found = []
        for stage, (start, end) in enumerate(pairwise(self.borders)):
            rank = run.order.rank_of[stage]
            # a received value in a static buffer is among the messages
            buffered = run.static_buffers and not (stage and run.order.rank_of[stage - 1] == rank)
            own: dict[Node | None, tuple[str, int]] = {}
            for storage in self._held:
                # a stage that backward runs again keeps only what it receives and sends
                savers = () if self._rerun[stage] else storage.savers
                saver = next((node for node in savers if start <= self.rows.of[node] < end), None)
                maker = saver if storage.maker is None else storage.maker
                row = None if maker is None else self.rows.of[maker]
                if (saver is None and not storage.is_held(start, end)) or (
                    buffered and row is not None and row < start
                ):
                    continue
                made = "received" if row is None or not start <= row < end else "sent" if saver is None else "saved"
                kind, nbytes = own.get(maker, (made, 0))
                own[maker] = kind, nbytes + storage.nbytes // run.replicas[rank]
            values = [(place.get(n, -1), kind, nbytes) for n, (kind, nbytes) in own.items()]
            found.append(sorted(values, key=lambda each: (-each[2], each[0])))
        return found

    def _weights(self) -> list[int]:
        """Return the bytes of weights and state in each row; what several rows of a part read counts in the first."""
        found: list[int] = []
        for start, end in pairwise(self.borders):
            until = [self._stage_of_rows(start, row + 1).fixed_bytes for row in range(start, end)]
            found += [after - before for before, after in pairwise([0, *until])]
        return found

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


def _columns(stages: Sequence[StageCosts], columns: Sequence[str] = COLUMNS) -> dict[str, list[float]]:
    """Return figures of stages by column."""
    names = {column: f"{column}_bytes" if column in _BYTES else column for column in columns}
    return {column: [getattr(stage, name) for stage in stages] for column, name in names.items()}


# The steps that the same stages would take under other schedules, numbers of microbatches, links, and with recompute.
#
# The page picks among them at once: they are computed here, by the simulator, so that no number is the page's own.


LINKS = ("pcie4", "nvlink4", "ethernet100", "ethernet400")
"""The presets that can be chosen, besides the links of the step itself and none."""
_FACTORS = (0.5, 1, 2, 4)  # times the microbatches of the plan: the choices of the page
_MOST_ACTIONS = 2_000
"""A longer step is left out. All others together took 0.3 s for 4 stages, 8 microbatches, recompute or not."""


def what_if(run: ScheduleRun, recompute: Mapping[str, Sequence[StageCosts]] | None = None) -> dict[str, Any] | None:
    """Return the other steps as columns: ``schedules``, ``microbatches``, ``links`` and ``recompute`` to choose from.

    Each of ``rows`` is ``[schedule, microbatches, links, ranks, seconds, bubble, highest peak, recompute]``; the first
    three and the last are indices. A combination that a schedule refuses has no row. ``own`` is the row of the step
    itself. Replicated stages, very long steps, and orders of one's own have no other steps: ``None``.

    Args:
        run: the step itself.
        recompute: a word for which parts are run again in backward -> the costs of the stages; those of ``run`` first.
    """
    recompute = {"as planned": run.stages} if recompute is None else recompute
    words = [schedule.word for schedule in known_schedules()]
    schedule = schedule_of(run.order)
    if schedule is None or run.transport is None or max(run.replicas) > 1:
        return None
    counts = sorted({max(1, int(run.order.microbatches * factor)) for factor in _FACTORS})
    links: dict[str, Any] = {"as given": run.transport.links, "none": None, **{preset: preset for preset in LINKS}}
    if run.transport.links is None:
        del links["as given"]
    rows: list[list[float]] = []
    own = None
    for s, word in enumerate(words):
        ranks = run.ranks if word == schedule.word else None
        for m, count in enumerate(counts):
            if count * len(run.stages) * 2 > _MOST_ACTIONS:
                continue
            for (k, given), (r, stages) in product(enumerate(links.values()), enumerate(recompute.values())):
                step = _simulated(run, stages, word, count, ranks, given)
                if step is None:
                    break
                if (word, count, k, r) == (schedule.word, run.order.microbatches, 0, 0):
                    own = len(rows)
                rows.append([s, m, k, step.ranks, step.seconds, step.bubble, max(step.peaks), r])
    if own is None:  # too long
        return None
    choices = {"schedules": words, "microbatches": counts, "links": list(links), "recompute": list(recompute)}
    return choices | {"rows": rows, "own": own}


def _simulated(
    run: ScheduleRun,
    stages: Sequence[StageCosts],
    schedule: str,
    microbatches: int,
    ranks: int | None,
    links: Any,
) -> ScheduleRun | None:
    try:
        return simulate_schedule(
            stages,
            schedule,
            microbatches,
            ranks=ranks,
            links=links,
            static_buffers=run.static_buffers,
        )
    except SplitError:  # the schedule does not go with these numbers, or the links do not know these ranks
        return None


# What a picture shows of parts that backward runs again: what they keep, and what the step takes with and without.


Taken = tuple[Node | None, int, list[Node]]
"""A value: the node that makes it (``None`` for an input of the graph), its bytes, and the nodes that read it."""


def taken_values(flow: Dataflow) -> list[Taken]:
    """Return the values that a part keeps if it takes them and backward runs it again, in graph order."""
    found: list[Taken] = []
    for node in flow.index:
        if node.op in ("get_attr", "output"):
            continue
        maker = flow.producer(node)
        readers = {flow.producer(user) for user in node.users} - {maker}
        read = sorted(filter(flow.is_placeable, readers), key=flow.index.__getitem__)
        if read and (nbytes := value_bytes(node)):
            found.append((None if node.op == "placeholder" else maker, nbytes, read))
    return found


def kept_between(
    saved: Mapping[tuple[int, int], Mapping[Node, int]],
    taken: Sequence[Taken],
    row_of: Callable[[Node], int],
    part_of: Callable[[int], int],
    again: Sequence[bool],
) -> list[tuple[int, int, int]]:
    """Return (row that makes, row that keeps, bytes) of what lies between forward and backward.

    A part that backward runs again keeps the values of other parts that it reads, up to its first reader; other parts
    keep what autograd saves. `page/scripts/crossing.js` does the same after a border has moved.

    Args:
        saved: (row, row) -> what autograd saves, as if no part were run again.
        taken: the values of the graph.
        row_of: node -> its row.
        part_of: row -> its part.
        again: for each part whether it is run again.
    """
    found = {rows: sum(of.values()) for rows, of in saved.items() if not again[part_of(rows[1])]}
    for maker, nbytes, readers in taken:
        first: dict[int, int] = {}
        for row in map(row_of, readers):
            first[part_of(row)] = min(row, first.get(part_of(row), row))
        own = None if maker is None else part_of(row_of(maker))
        for part, row in first.items():
            if again[part] and part != own:
                key = (row if maker is None else row_of(maker), row)
                found[key] = found.get(key, 0) + nbytes
    return as_triples(found)


def step_choices(prices: StagePrices, plan: Plan, run: ScheduleRun) -> dict[str, Sequence[StageCosts]]:
    """Return a word for which parts are run again -> their costs; first as planned.

    There is nothing else to choose in inference, where parts have effects, and where the step has other prices.
    """
    again = [part.call == "checkpoint" for part in plan.parts.values()]
    own = "yes" if all(again) else "in some parts" if any(again) else "no"
    found: dict[str, Sequence[StageCosts]] = {own: run.stages}
    if prices.optimizer is None or prices.of(plan) != tuple(run.stages):
        return found
    plain = replace(plan, parts={key: replace(part, call="plain") for key, part in plan.parts.items()})
    for word, made in {"no": plain, "yes": checkpointed(plan)}.items():
        if word not in found:
            with suppress(PlanError):
                found[word] = prices.of(made)
    return found


# Computes where the borders on the page may go, and simulates the step of a plan again for other stages.
#
# The price of every segment of rows would be quadratic in the graph, so a tall ladder has prices only between its
# `border_marks`.


_MOST_STAGES = 16
"""The most stages that the slider sets, unless the plan has more."""
MOST_MARKS = 64
"""The number of segments between `border_marks` where there are more rows than this. The page has a price for every run
of segments: 64 * 65 / 2 = 2,080 of them."""


def border_marks(borders: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the rows above which a border may go.

    All rows where they are few. Otherwise rows that divide the rows and their seconds evenly, and the borders of the
    plan itself unless these are too many.

    Args:
        borders: the first row of each stage of the plan, and the number of rows.
        seconds: the seconds of each row.
    """
    rows = len(seconds)
    if rows <= MOST_MARKS:
        return list(range(rows + 1))
    # rows of about equal time, so that even plans exist, but not too many rows between two marks either
    found = {0, rows, *(borders if len(borders) <= MOST_MARKS else ())}
    mean = sum(seconds) / rows or 1.0
    past = list(accumulate(second / mean + 1 for second in seconds))  # time and rows weigh the same
    parts = MOST_MARKS + 2 - len(found)
    found.update(1 + bisect_left(past, past[-1] * part / parts, hi=rows - 2) for part in range(1, parts))
    return sorted(found)


def even_borders(marks: Sequence[int], rows: Sequence[StageCosts], own: int) -> list[list[int]]:
    """Return the borders of 1, 2, 3 ... stages whose longest is shortest, and then the others as even as possible.

    Args:
        marks: the rows above which a border may go.
        rows: the costs of each row.
        own: the number of stages of the plan.
    """
    before = np.array([0.0, *accumulate(row.forward + row.backward for row in rows)])
    work, found = np.diff(before[marks]), []
    for count in range(1, 1 + min(len(work), max(_MOST_STAGES, own))):
        free, bytes_of = np.zeros((count - 1, len(work) + 1)), np.zeros((count, len(work)), np.int64)
        (starts,) = best_borders(work, free, bytes_of, np.zeros(count))
        found.append([marks[start] for start in (*starts, len(work))])
    return found


def resimulated(run: ScheduleRun, stages: Sequence[StageCosts]) -> ScheduleRun | None:
    """Simulate the same step with other stages; return ``None`` if the schedule does not allow that many.

    Its schedule must make an order for any number of stages, and all links must be alike.
    """
    schedule, transport = schedule_of(run.order), run.transport
    if schedule is None or schedule.window is None or transport is None:
        return None
    links = transport.links
    if links is not None and (not isinstance(links, Links) or links.size or links.pairs):
        return None
    return _simulated(run, stages, schedule.name, run.order.microbatches, None, links)


# Simulates the step of the schedule that a plan in stages was made for.


def planned_run(plan: Plan, stages: Sequence[StageCosts]) -> ScheduleRun | None:
    """Return the step of the schedule, microbatches and links that a plan was made for.

    It is ``None`` if the plan does not know a schedule, if the schedule does not go with the stages, or if values wait
    on the host and it is not known how long their copies take.
    """
    asked = plan.request
    if asked.schedule is None or (plan.offloaded and all(stage.copies is None for stage in stages)):
        return None
    try:
        order = planned_order(asked, asked.schedule, None, len(stages))
        return simulate_schedule(stages, order, links=links_of(asked.links))
    except SplitError:  # a plan file of another hand may name what does not go together
        return None
