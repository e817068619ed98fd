"""Makes the data by which a page divides the memory of stages: storages, and how many microbatches each stage holds.

The page divides any stage by it, also one whose borders have moved. What a stage of rows 2 to 4 holds of a microbatch::

    saved       storages that one of these rows makes, and one of them saves: by the module that makes each
    received    those of values that a row above 2 makes, and one of these rows reads
    sent        those of values that one of these rows makes, and a row below 4 reads

Each storage counts once. Weights that several rows read count in the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.segments.graph_memory import GraphMemory, is_dense
from splitkit.memory.segments.segment import OrderMemory
from splitkit.pipeline.memory_by_stage import UNITS, memory_by_stage
from splitkit.pipeline.order import BACKWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Optimizer


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

    def to_list(self, place: Mapping[Node, int]) -> list[Any]:
        """Return bytes, maker or -1, savers, and the rows of `crosses` one after the other, as plain data."""
        own = -1 if self.maker is None else place[self.maker]
        return [self.nbytes, own, [place[node] for node in self.savers], [row for rows in self.crosses for row in rows]]


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


def shared_weights(memory: OrderMemory, ends: Sequence[int], optimizer: Optimizer | None) -> list[list[int]]:
    """Return the parameters and buffers that several rows read: bytes with gradients and state, then the rows.

    Args:
        memory: the rows one after the other.
        ends: the position of the first node of each row, and the number of nodes.
        optimizer: as in `splitkit.stage_costs`.
    """
    items, positions = memory.parameters.item, memory.parameters.position
    rows: dict[int, list[int]] = {}
    for item, row in zip(items.tolist(), (np.searchsorted(ends, positions, side="right") - 1).tolist(), strict=True):
        of = rows.setdefault(item, [])
        if not of or of[-1] != row:
            of.append(row)
    states = 1 + STATE_OF[optimizer] if optimizer else 0
    nbytes = memory.parameter_bytes + states * memory.trained_bytes
    return [[int(nbytes[item]), *of] for item, of in rows.items() if len(of) > 1]


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
        "replicas": list(run.replicas),
        "events": [(e.rank, e.kind, e.stage, e.microbatch, e.start, e.end) for e in run.timeline],
        "by": memory_data(run, stages),
    }


def memory_data(run: ScheduleRun, stages: Sequence[StageCosts]) -> dict[str, Any]:
    """Return the memory of each rank of a step by stage and kind; ``stages`` are the picture's stages.

    ``counts`` is how many of the counts of `MemoryByStage` are told of each stage: the others are 0.
    """
    held = memory_by_stage(run)
    counts = len(UNITS) if run.order.columns.kind.max() > BACKWARD else 2
    own, other = ([(s.fixed_bytes, s.saved_bytes, s.replicas) for s in each] for each in (run.stages, stages))
    return {
        "units": held.units,
        "owned": held.owned,
        "counts": counts,
        "points": [[_shortened(point, counts) for point in points] for points in held.points],
        "static": run.static_buffers,
        "why": "" if own == other else "the step was simulated with other stages than the picture's",
    }


def _shortened(point: Sequence[float], counts: int) -> list[float]:
    return [*point[:2], *(n for i, n in enumerate(point[2:]) if i % len(UNITS) < counts)]
