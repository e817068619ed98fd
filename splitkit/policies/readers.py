"""Who reads what and who waits for whom, among the nodes that a policy places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.dataflow import Dataflow


def readers_of(flow: Dataflow) -> dict[Node, list[Node]]:
    """Placeable node -> the placeable nodes that read it or a member of its tuple, in graph order."""
    readers: dict[Node, list[Node]] = {node: [] for node in flow.nodes}
    for node in flow.nodes:
        for read in flow.inputs(node):
            readers[read].append(node)
    return readers


def given_back(flow: Dataflow) -> set[Node]:
    """What the output reads."""
    return {flow.producer(read) for n in flow.index if n.op == "output" for read in n.all_input_nodes}


def waits_for(flow: Dataflow, node: Node) -> tuple[Node, ...]:
    """The placeable nodes that must run before ``node``."""
    return (*flow.inputs(node), *flow.after.get(node, ()))


def crossing(flow: Dataflow, costs: Costs, nodes: Sequence[Node]) -> npt.NDArray[np.float64]:
    """(2, n + 1): how many values cross a cut before each of ``nodes``, and after the last, and their bytes: those made
    before it and read at or after it, each once.
    """
    position = {node: i for i, node in enumerate(nodes)}
    change = np.zeros((2, len(position) + 1))
    for value in flow.index:
        if (made := position.get(flow.producer(value))) is None:
            continue
        readers = [position[u] for u in value.users if u in position]  # members of the tuple count for themselves
        if readers and max(readers) > made:
            size = (1, costs.nbytes(value))
            change[:, made + 1] += size
            change[:, max(readers) + 1] -= size
    return change.cumsum(axis=1)
