"""Makes the data by which a page divides the memory of stages: storages that autograd saves, and who holds how many.

The page divides any stage by it, also one whose borders have moved::

    stage of rows 2 to 4     the storages that a row of it saves, each once: by the module that makes each, or received
    + weights of the rows    those that several rows read count in the first of them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.memory.segments.graph_memory import GraphMemory
from splitkit.memory.segments.segment import OrderMemory
from splitkit.pipeline.memory_by_stage import UNITS, memory_by_stage
from splitkit.pipeline.order import BACKWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Optimizer


@dataclass(frozen=True)
class SavedStorage:
    """A storage that autograd saves.

    Attributes:
        nbytes: its bytes.
        maker: the node that makes it; ``None`` for an input of the graph, and for what an op makes inside it.
        readers: the first node of each row that saves it.
    """

    nbytes: int
    maker: Node | None
    readers: tuple[Node, ...]

    def owner(self, reader: Node) -> Node:
        """Return the node that makes it, or the reader that saves what no node makes."""
        return reader if self.maker is None else self.maker


def saved_storages(flow: Dataflow, memory: GraphMemory, rows: Iterable[Iterable[Node]]) -> list[SavedStorage]:
    """Return the storages that autograd saves of the nodes in rows, each once."""
    known, maker = memory.activations, dict[int, Node]()
    for node, storages in known.values.items():
        for storage in storages:
            maker.setdefault(storage, flow.followers.get(node, node))
    readers: dict[int, dict[int, Node]] = {}
    for row, nodes in enumerate(rows):
        for node in nodes:
            for storage in memory.nodes[node].saves:
                readers.setdefault(storage, {}).setdefault(row, node)
    return [
        SavedStorage(
            memory.storage_sizes[storage],
            made if (made := maker.get(storage)) in memory.nodes else None,
            tuple(of.values()),
        )
        for storage, of in sorted(readers.items())
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


def memory_data(run: ScheduleRun, stages: Sequence[StageCosts]) -> dict[str, Any]:
    """Return the memory of each rank of a step by stage and kind; ``stages`` are those of the picture.

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
        "why": "" if own == other else "the step was simulated with other stages than those of the picture",
    }


def _shortened(point: Sequence[float], counts: int) -> list[float]:
    return [*point[:2], *(n for i, n in enumerate(point[2:]) if i % len(UNITS) < counts)]
