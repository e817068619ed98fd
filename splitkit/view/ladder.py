"""The picture of a plan as data: rows, what forward saves for backward, cuts, and what every stretch of rows costs.

All bytes and seconds that are shown come from here. Of a stage that is any stretch of rows the page knows the price,
as `splitkit.pipeline.stageprices.StagePrices` says it, so that a cut that is dragged shows what a plan would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, readers_of
from splitkit.memory.autograd import activations
from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.pipeline.stageprices import Optimizer, StagePrices, run_order
from splitkit.plans.parts import HOST
from splitkit.plans.record import Plan
from splitkit.prices import Costs
from splitkit.view.opdata import kind_of, ops_data, rounded
from splitkit.view.rows import LadderRows, rows_of

SCHEMA = "splitkit.ladder/1"
COLUMNS = ("forward", "backward", "saved", "temporary", "fixed")
"""What is known of each stretch of rows: seconds, seconds, and bytes of the three."""


@dataclass(frozen=True, eq=False)
class LadderView:
    """A plan of a graph, drawn as a ladder.

    Attributes:
        flow: facts about the graph.
        plan: its plan.
        costs: prices.
        title: above the picture.
        optimizer: as in `splitkit.stage_costs`; ``None`` for inference.
        memory: bytes of each device, if they are limited.
        run: a simulated step of these stages, to be drawn below.
        beside: another plan of the graph, to be compared with.
    """

    flow: Dataflow
    plan: Plan
    costs: Costs
    title: str = ""
    optimizer: Optimizer | None = "adam"
    memory: int | None = None
    run: ScheduleRun | None = None
    beside: Plan | None = None

    @cached_property
    def _keys(self) -> list[Any]:
        return run_order(self.flow, self.plan)

    @cached_property
    def _ranks(self) -> list[tuple[int, int]]:
        """The parts of both plans in which a node may stand, in an order in which they may run.

        A part of either plan reads only from itself and earlier ones, so a pair reads only from pairs that are no
        greater in either, and none of those comes later in the order of the pairs.
        """
        return sorted(set(self._parts.values()))

    @cached_property
    def _parts(self) -> dict[Node, tuple[int, int]]:
        """Node -> the numbers of its parts in the plan and in the one beside it."""
        own = _numbers(self.flow, self.plan)
        other = own if self.beside is None else _numbers(self.flow, self.beside)
        return {node: (part, other.get(node, 0)) for node, part in own.items()}

    @cached_property
    def rows(self) -> LadderRows:
        """From top to bottom; where two plans are compared, each row is in one part of either."""
        number = {pair: i for i, pair in enumerate(self._ranks)}
        return rows_of(self.flow, {node: number[pair] for node, pair in self._parts.items()})

    @cached_property
    def _nodes(self) -> list[list[Node]]:
        found: list[list[Node]] = [[] for _ in range(len(self.rows))]
        for node in self.flow.nodes:
            if node not in self.rows.backward:
                found[self.rows.of[node]].append(node)
        return found

    @cached_property
    def _prices(self) -> StagePrices:
        return StagePrices(self.flow, self.costs, self.optimizer)

    @property
    def trains(self) -> bool:
        """Whether there is a backward to be drawn."""
        return self.optimizer is not None and bool(self._prices.activations and self._prices.activations.saved)

    def to_dict(self) -> dict[str, Any]:
        """All that the page shows, as plain data."""
        line = self._prices.units.line(self._nodes)
        ends = [0]
        for nodes in self._nodes:
            ends.append(ends[-1] + len(nodes))
        stretches = {
            (a, b): self._prices.stage(line, ends[a], ends[b], [n for row in self._nodes[a:b] for n in row])
            for a in range(len(self.rows))
            for b in range(a + 1, len(self.rows) + 1)
        }
        return {
            "schema": SCHEMA,
            "title": self.title,
            "note": self.plan.note,
            "unit": next(iter(stretches.values())).unit,
            "trains": self.trains,
            "memory": self.memory,
            "parts": _names(self._keys),
            "devices": [str(p.device) if (p := self.plan.parts.get(k)) and p.device else "" for k in self._keys],
            "rows": [
                {"name": name, "part": self._ranks[rank][0], "ops": len(nodes), "kind": kind_of(nodes)}
                for name, rank, nodes in zip(self.rows.names, self.rows.parts, self._nodes, strict=True)
            ],
            "stretches": {c: [rounded(_figure(s, c)) for s in stretches.values()] for c in COLUMNS},
            "stages": {c: [_figure(s, c) for s in self._prices.of(self.plan)] for c in COLUMNS},
            "down": [int(line.messages[end]) for end in ends],
            "up": [int(line.gradient_messages[end]) if self.trains else 0 for end in ends],
            "edges": _triples(self._edges()),
            "saved": _triples(self._saved()),
            "ops": ops_data(self.flow, [n for row in self._nodes for n in row], self.rows.of.__getitem__, self.costs),
            "run": None if self.run is None else _run(self.run),
            "beside": None if self.beside is None else self._beside(self.beside),
        }

    def _beside(self, plan: Plan) -> dict[str, Any]:
        """The other plan: the part of each row, and its stages."""
        return {
            "note": plan.note,
            "parts": _names(run_order(self.flow, plan)),
            "rows": [self._ranks[rank][1] for rank in self.rows.parts],
            "stages": {c: [_figure(s, c) for s in self._prices.of(plan)] for c in COLUMNS},
        }

    def _edges(self) -> dict[tuple[int, int], int]:
        """(row, lower row that reads from it) -> bytes of the values, each once."""
        found: dict[tuple[int, int], int] = {}
        for node, readers in readers_of(self.flow).items():
            own = self.rows.of[node]
            for row in sorted({self.rows.of[reader] for reader in readers} - {own}):
                found[own, row] = found.get((own, row), 0) + self.costs.nbytes(node)
        return found

    def _saved(self) -> dict[tuple[int, int], int]:
        """(row that makes it, row whose backward wants it) -> bytes of storages, each once."""
        if not self.trains:
            return {}
        known = self.flow.fact(activations)
        maker: dict[int, int] = {}
        for node, storages in known.values.items():
            row = self.rows.of.get(node, -1)
            for storage in storages:
                maker.setdefault(storage, row)
        found: dict[tuple[int, int], int] = {}
        wanted = {(s, self.rows.of[n]) for n, kept in known.saved.items() if n in self.rows.of for s in kept}
        for storage, row in sorted(wanted):
            made = maker.get(storage, -1)
            key = made if made >= 0 else row, row  # inputs of the graph are there anyway
            found[key] = found.get(key, 0) + known.nbytes[storage]
        return found


def _numbers(flow: Dataflow, plan: Plan) -> dict[Node, int]:
    """Node -> the number of its part in the order in which the parts run."""
    number = {key: i for i, key in enumerate(run_order(flow, plan))}
    homes = {node: plan.home(node) for node in flow.nodes if node in plan.places}
    return {node: number[key] for node, key in homes.items() if key is not HOST}


def _names(keys: Iterable[Any]) -> list[str]:
    return [" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in keys]


def _run(run: ScheduleRun) -> dict[str, Any]:
    """A simulated step: what each rank computes when, and what it holds then."""
    return {
        "name": run.order.name,
        "microbatches": run.order.microbatches,
        "ranks": run.ranks,
        "seconds": run.seconds,
        "unit": run.unit,
        "bubble": run.bubble,
        "peaks": list(run.peaks),
        "events": [(e.rank, e.kind, e.stage, e.microbatch, e.start, e.end) for e in run.timeline],
        "memory": [list(map(list, held)) for held in memory_over_time(run)],
    }


def _figure(stage: StageCosts, column: str) -> float:
    if column == "backward":
        return stage.backward_input + stage.backward_weight
    whole: float = (
        stage.fixed_bytes
        if column == "fixed"
        else getattr(stage, "forward" if column == "forward" else f"{column}_bytes")
    )
    return whole


def _triples(found: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    return [(a, b, nbytes) for (a, b), nbytes in sorted(found.items())]
