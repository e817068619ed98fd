"""Turns a training step in pipeline stages into the data of its picture.

::

                forward        saved        backward          or, where backward is two graphs:
    stage 0   [ h.0     ] == 12 MiB == [ ∇ h.0 //// ]         ... [ ∇x h.0 ] == 3 MiB == [ ∇w h.0 ]
    - - - - - - - - - - - - - - - - - - - - - - - - -  ▼ 4 MiB  ▲ 4 MiB
    stage 1   [ h.1     ] == 10 MiB == [ ∇ h.1      ]

A row is a module of one stage. Hatched is what a part computes that another part of the same stage has computed before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch.fx import Node

from splitkit.engine.staged_step import StagedStep, StageGraphs
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import value_bytes
from splitkit.graph.storages import tensors, value_of
from splitkit.memory.graph_memory import GraphMemory, is_dense
from splitkit.pipeline.memory_by_stage import UNITS, memory_by_stage
from splitkit.pipeline.order import BACKWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Costs, Optimizer
from splitkit.training.flow import JointFlow
from splitkit.training.stage_parts import StagePart, known_part
from splitkit.training.stage_plan import computed_again
from splitkit.view.data.joint_ladder import LadderModel, LadderRows, ladder_rows, rounded, sums_of_makers

SCHEMA = "splitkit.stages/1"
COLUMNS = ("forward", "backward", "weight")
"""The columns of the picture. The second has backward or its input part."""
_COLUMN_OF = {"forward": 0, "backward": 1, "input": 1, "weight": 2}


class StoredValue(NamedTuple):
    """A storage that a stage holds for backward, or between the parts of backward.

    Attributes:
        stage: the stage.
        maker: the node that makes it, perhaps in another stage.
        nbytes: its bytes.
        rows: the row from which its ribbon goes, and the row to which.
    """

    stage: int
    maker: Node
    nbytes: int
    rows: tuple[int, int]


@dataclass(frozen=True, eq=False)
class StagedView(LadderModel):
    """A training step in stages, drawn as a ladder.

    Attributes:
        flow: facts about the joint graph.
        step: the stages.
        costs: the prices of the joint graph's nodes.
        title: the title above the picture.
        optimizer: as in `StagedStep.stage_costs`.
        memory: the memory limit of each device in bytes, if there is one.
        run: a simulated step of these stages, drawn below the ladder.
    """

    flow: JointFlow
    step: StagedStep
    costs: Costs
    title: str = ""
    optimizer: Optimizer = "adam"
    memory: int | None = None
    run: ScheduleRun | None = None

    @cached_property
    def _parts_of(self) -> dict[Node, list[StagePart]]:
        return {n: [known_part(key) for key in self.step.plan[n]] for n in self.flow.nodes}

    @cached_property
    def rows(self) -> LadderRows:
        """The rows from top to bottom; a stage without ops in forward has a row of its own."""
        count = len(self.step.stages)
        stage = {n: parts[0].stage for n, parts in self._parts_of.items() if parts}
        found = ladder_rows(self.flow, stage)
        missing = sorted({*range(count)}.difference(found.parts))
        names, parts = list(found.names), list(found.parts)
        order = sorted(range(len(names) + len(missing)), key=lambda i: (*parts, *missing)[i])
        place = {row: i for i, row in enumerate(order)}
        names, parts = [*names, *(f"stage {s}: no forward" for s in missing)], [*parts, *missing]
        of = {node: place[row] for node, row in found.of.items()}
        return LadderRows(tuple(names[i] for i in order), of, found.backward, tuple(parts[i] for i in order))

    def _row(self, node: Node, stage: int) -> int:
        """Return the row of a node in a stage: its own, or the nearest row of the stage."""
        return min(max(self.rows.of[node], self.borders[stage]), self.borders[stage + 1] - 1)

    @cached_property
    def nodes(self) -> list[Node]:
        """The forward nodes by row, then those of backward; nodes that no part computes are left out."""
        late = (node for node in self.flow.nodes if node in self.rows.backward)
        return [node for node in (*super().nodes, *late) if self._parts_of[node]]

    @cached_property
    def nodes_of_rows(self) -> list[list[Node]]:
        """The forward nodes of each row."""
        return [[node for node in nodes if node not in self.rows.backward] for nodes in super().nodes_of_rows]

    @cached_property
    def placed(self) -> dict[Node, list[tuple[int, int]]]:
        """Node -> row and column where it is drawn, for each part that computes it."""
        parts = {node: self._parts_of[node] for node in self.nodes}
        return {n: [(self._row(n, part.stage), _COLUMN_OF[part.half]) for part in own] for n, own in parts.items()}

    @cached_property
    def stages(self) -> tuple[StageCosts, ...]:
        """The costs of the stages."""
        return self.step.stage_costs(self.costs, optimizer=self.optimizer)

    @property
    def divided(self) -> bool:
        """Whether the backward of a stage is two graphs."""
        return any(stage.weight is not None for stage in self.step.stages)

    def still(self) -> dict[str, Any]:
        """Return what a still picture shows, as plain data; takes time linear in the graph."""
        times = {column: [0.0] * len(self.rows) for column in (*COLUMNS, "again")}
        counts = {column: [0] * len(self.rows) for column in (*COLUMNS, "again")}
        for node, places in self.placed.items():
            seconds, again = self.costs.seconds(node), computed_again(self.flow, self.step.plan, node)
            for part, (row, column) in zip(self._parts_of[node], places, strict=True):
                for what in (COLUMNS[column], *(["again"] if part in again and column == 1 else [])):
                    times[what][row] += seconds
                    counts[what][row] += 1
        steps, known = self.step.stages, self.step.plan.parts
        down = [0, *(stage.sent_bytes for stage in steps)]
        up = [*(stage.gradients_sent_bytes for stage in steps), 0]
        return self.common() | {
            "schema": SCHEMA,
            "note": self.step.plan.note,
            "trains": True,
            "divided": self.divided,
            "parts": [str(stage) for stage in range(len(steps))],
            "devices": [
                str(known[key].device or "") for s in range(len(steps)) if (key := StagePart("forward", s)) in known
            ],
            "times": {column: list(map(rounded, seconds)) for column, seconds in times.items()},
            "stages": self._stage_columns(),
            "counts": counts,
            "down": self._at_borders(down),
            "up": self._at_borders(up),
            "saved": sums_of_makers(self._ribbons(self.saved_values)),
            "waits": sums_of_makers(self._ribbons(self.waiting_values)),
            "rerun": [False] * len(steps),
            "host": self.step.host_bytes,
        }

    def _stage_columns(self) -> dict[str, list[float]]:
        """Return the figures of the stages: seconds of the parts, bytes, and the ops that are computed again."""
        again = [0] * len(self.stages)
        for node in self.nodes:
            for part in computed_again(self.flow, self.step.plan, node):
                again[part.stage] += part.half != "weight"
        return {
            "forward": [s.forward for s in self.stages],
            "backward": [s.backward_input for s in self.stages],
            "weight": [s.backward_weight for s in self.stages],
            "saved": [s.saved_bytes for s in self.stages],
            "waiting": [stage.waiting_bytes for stage in self.step.stages],
            "temporary": [s.temporary_bytes for s in self.stages],
            "fixed": [s.fixed_bytes for s in self.stages],
            "again": list(map(float, again)),
        }

    def _at_borders(self, nbytes: Sequence[int]) -> list[int]:
        """Return for each row, and below the last, the bytes that cross above it; 0 inside a stage."""
        found = [0] * (len(self.rows) + 1)
        for row, crossing in zip(self.borders, nbytes, strict=True):
            found[row] = crossing
        return found

    def common(self) -> dict[str, Any]:
        """Return the data that all ladders have; rows are of one kind if their ops run in the same parts, too."""
        found = super().common()
        for row, nodes in zip(found["rows"], self.nodes_of_rows, strict=True):
            halves = "|".join(" ".join(part.half for part in self._parts_of[node]) for node in nodes)
            row["kind"] = zlib.crc32(f"{row['kind']} {halves}".encode())
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all that the page shows, as plain data."""
        found = self.still()
        place = {node: i for i, node in enumerate(self.nodes)}
        return found | {
            "marks": self.borders,
            "ops": self.ops(),
            "late": sum(node not in self.rows.backward for node in self.nodes),
            "places": [[number for at in self.placed[node] for number in at] for node in self.nodes],
            "kept": [makers_of(of, place) for _, of in sorted(self._ribbons(self.saved_values).items())],
            "left": [makers_of(of, place) for _, of in sorted(self._ribbons(self.waiting_values).items())],
            "held": self._held(place),
            "crossing": [self._crossing(k, place) for k in range(len(self.step.stages) - 1)],
            "taken": [],
            "weights": self._fixed_of_rows(),
            "run": None if self.run is None else self._run(self.run),
            "beside": [],
        }

    def _held(self, place: dict[Node, int]) -> list[list[tuple[int, str, int]]]:
        """Return for each stage what it holds of a microbatch: op or -1, how it comes or goes, and bytes.

        The largest are first. Together they are the saved bytes of the stage.
        """
        found: list[dict[tuple[int, str], int]] = [{} for _ in self.step.stages]
        saved = {(value.stage, value.maker) for value in self.saved_values}
        for value in self.held_values:
            received = self._parts_of.get(value.maker, [StagePart("forward", value.stage)])[0].stage != value.stage
            kind = "received" if received else "saved" if (value.stage, value.maker) in saved else "sent"
            key, of = (place.get(value.maker, -1), kind), found[value.stage]
            of[key] = of.get(key, 0) + value.nbytes
        return [
            [(op, kind, nbytes) for (op, kind), nbytes in sorted(of.items(), key=lambda each: (-each[1], each[0]))]
            for of in found
        ]

    def _crossing(self, stage: int, place: dict[Node, int]) -> list[list[tuple[int, int]]]:
        """Return the ops whose values cross below a stage, -1 for an input, and bytes: activations, then gradients."""
        above, below = self.step.stages[stage], self.step.stages[stage + 1]
        found = []
        for graph, names in ((above.forward, above.sent), (below.backward, below.gradients_sent)):
            nodes = {node.name: node for node in graph.graph.nodes}
            of: dict[Node, int] = {}
            for name in names:
                node = self._by_name.get(name, nodes[name])
                of[node] = of.get(node, 0) + value_bytes(nodes[name])
            found.append(makers_of(of, place))
        return found

    def _fixed_of_rows(self) -> list[int]:
        """Return the bytes of weights, gradients and state of each row; what several rows read counts in the first."""
        found = [0] * len(self.rows)
        states = STATE_OF[self.optimizer] if self.optimizer else 0
        inputs = {n.name: n for n in self.flow.graph.find_nodes(op="placeholder")}
        for stage in range(len(self.step.stages)):
            own, gradients = self.step.parameter_bytes(stage)
            for name, nbytes in own.items():
                rows = [self._row(u, stage) for u in inputs[name].users if u in self.rows.of]
                row = min(rows, default=self.borders[stage])
                found[row] += nbytes + (1 + states) * gradients.get(name, 0)
        return found

    def _run(self, run: ScheduleRun) -> dict[str, Any]:
        return run_data(run, self.stages) | {"whatIf": None, "measured": None}

    @cached_property
    def saved_values(self) -> list[StoredValue]:
        """What the stages save for backward, each storage once; it sums to `StageGraphs.saved_bytes`."""
        return list(self._values(lambda stage: stage.kept, ("backward", "weight")))

    @cached_property
    def waiting_values(self) -> list[StoredValue]:
        """What waits between the parts of backward, each storage once; it sums to `StageGraphs.waiting_bytes`."""
        return list(self._values(lambda s: (*s.deferred, *s.waiting) if s.weight is not None else (), ("weight",)))

    @cached_property
    def held_values(self) -> list[StoredValue]:
        """What the stages hold from forward to backward: what they receive, send and save, each storage once."""
        return list(self._values(lambda s: (*s.received, *s.sent, *s.kept), ("backward", "weight")))

    def _values(self, names_of: Any, readers: Sequence[str]) -> Iterable[StoredValue]:
        known = {node.name: node for node in self.flow.index}
        for number, stage in enumerate(self.step.stages):
            seen: set[Any] = set()
            for name in names_of(stage):
                for origin, nbytes in stage.storages([name]).items():
                    if origin in seen:
                        continue
                    seen.add(origin)
                    maker = self.flow.producer(known[origin[0]])
                    start = self._row(maker, number) if maker in self.rows.of else None
                    end = self._first_reader(stage, number, name, readers)
                    start = self.borders[number] if start is None else start
                    yield StoredValue(number, maker, nbytes, (start, start if end is None else end))

    def _first_reader(self, stage: StageGraphs, number: int, name: str, graphs: Sequence[str]) -> int | None:
        """Return the row of the first op that reads a value in one of the named graphs of a stage."""
        known = [graph for half in graphs if (graph := getattr(stage, half)) is not None]
        given = (node for graph in known for node in graph.graph.find_nodes(op="placeholder") if node.name == name)
        reader = next((user.name for node in given for user in node.users if user.name in self._by_name), None)
        return None if reader is None else self._row(self._by_name[reader], number)

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        """Name -> the node, or the node that makes the tuple whose member it is."""
        found = {node.name: self.flow.producer(node) for node in self.flow.index}
        return {name: node for name, node in found.items() if node in self.rows.of}

    @staticmethod
    def _ribbons(values: Iterable[StoredValue]) -> dict[tuple[int, int], dict[Node, int]]:
        """Return (row, row) -> maker -> bytes of the values between them."""
        found: dict[tuple[int, int], dict[Node, int]] = {}
        for value in values:
            of = found.setdefault(value.rows, {})
            of[value.maker] = of.get(value.maker, 0) + value.nbytes
        return found


def makers_of(of: Mapping[Node, int], place: Mapping[Any, int]) -> list[tuple[int, int]]:
    """Return the places of the ops that make some values (-1: no op does), and bytes; the largest first."""
    found = [(place.get(maker, -1), nbytes) for maker, nbytes in of.items()]
    return sorted(found, key=lambda each: (-each[1], each[0]))


# Makes the data by which a page divides the memory of stages: storages, and how many microbatches each stage holds.
#
# The page divides any stage by it, also one whose borders have moved. What a stage of rows 2 to 4 holds of a
# microbatch::
#
#     saved       storages that one of these rows makes, and one of them saves: by the module that makes each
#     received    those of values that a row above 2 makes, and one of these rows reads
#     sent        those of values that one of these rows makes, and a row below 4 reads
#
# Each storage counts once.


@dataclass(frozen=True)
class HeldStorage:
    """A storage that autograd saves, or whose values another row reads.

    Attributes:
        nbytes: its bytes.
        maker: the node that makes it; ``None`` for an input of the graph, and for what an op makes inside it.
        savers: the first node of each row that saves it.
        crosses: (row that makes a value in it, other row that reads this value), sorted; an input of the graph is made
            in row -1, and what the graph returns is read in the row after the last. A value that is sent as a copy is
            left out.
    """

    nbytes: int
    maker: Node | None
    savers: tuple[Node, ...]
    crosses: tuple[tuple[int, int], ...]

    def owner(self, saver: Node) -> Node:
        """Return the node that makes the storage, or the node that saves it if no node makes it."""
        return saver if self.maker is None else self.maker

    def is_held(self, start: int, end: int) -> bool:
        """Whether a stage of the rows ``start`` to ``end - 1`` receives or sends a value in it."""
        inside = range(start, end)
        return any(read >= end if made in inside else made < start and read in inside for made, read in self.crosses)


def held_storages(flow: Dataflow, memory: GraphMemory, rows: Sequence[Sequence[Node]]) -> list[HeldStorage]:
    """Return the storages that stages of these rows may save, receive or send."""
    values = memory.activations.values
    first: dict[int, Node] = {}
    for node, storages in values.items():
        for storage in storages:
            first.setdefault(storage, flow.followers.get(node, node))
    maker = {storage: node for storage, node in first.items() if node in memory.nodes}
    row_of = {node: row for row, nodes in enumerate(rows) for node in nodes}
    savers: dict[int, dict[int, Node]] = {}
    for node, row in row_of.items():
        for storage in memory.nodes[node].saves:
            savers.setdefault(storage, {}).setdefault(row, node)
    crosses: dict[int, set[tuple[int, int]]] = {}
    reads = [(value, row) for node, row in row_of.items() for value in memory.nodes[node].reads]
    returned = [(value, len(rows)) for value in memory.kept_outputs() if value.op != "placeholder"]
    for value, row in (*reads, *returned):
        made = row_of.get(flow.followers.get(value, value), -1)
        if made != row and all(map(is_dense, tensors(value_of(value)))):
            for storage in values.get(value, ()):
                crosses.setdefault(storage, set()).add((made, row))
    return [
        HeldStorage(
            memory.storage_sizes[storage],
            maker.get(storage),
            tuple(savers.get(storage, {}).values()),
            tuple(sorted(crosses.get(storage, ()))),
        )
        for storage in sorted({*savers, *crosses})
    ]


def run_data(run: ScheduleRun, stages: Sequence[StageCosts]) -> dict[str, Any]:
    """Return a simulated step as the page draws it; ``stages`` are the picture's stages."""
    return {
        "name": run.order.name,
        "microbatches": run.order.microbatches,
        "stages": len(run.stages),
        "ranks": run.ranks,
        "seconds": run.seconds,
        "unit": run.unit,
        "bubble": run.bubble,
        "peaks": list(run.peaks),
        "rankOf": run.order.rank_of,
        "replicas": list(run.replicas),
        "events": [(e.rank, e.kind, e.stage, e.microbatch, e.start, e.end) for e in run.timeline],
        "by": memory_data(run, stages),
        "exchanges": [
            {kind: [[rounded(t) for t in times] for times in stage.exchanges(kind)] for kind in "FBIW"}
            for stage in (run.stages if any(stage.collectives for stage in run.stages) else ())
        ],
    }


def memory_data(run: ScheduleRun, stages: Sequence[StageCosts]) -> dict[str, Any]:
    """Return the memory of each rank of a step by stage and kind; ``stages`` are the picture's stages.

    ``counts`` is how many of the counts of `MemoryByStage` are told of each stage: the others are 0.
    """
    held = memory_by_stage(run)
    totals = [[nbytes for _, nbytes in held.nbytes(rank)] for rank in range(run.ranks)]
    counts = len(UNITS) if run.order.columns.kind.max() > BACKWARD else 2
    own, other = ([(s.fixed_bytes, s.saved_bytes, s.replicas) for s in each] for each in (run.stages, stages))
    return {
        "units": held.units,
        "owned": held.owned,
        "counts": counts,
        "points": [
            [[*point[:2], *(n for i, n in enumerate(point[2:]) if i % len(UNITS) < counts)] for point in points]
            for points in held.points
        ],
        "highest": [of.index(max(of)) for of in totals],
        "why": "" if own == other else "the step was simulated with other stages than the picture's",
    }
