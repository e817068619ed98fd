"""Who reads what and who waits for whom, among the nodes that a policy places."""

from __future__ import annotations

from torch.fx import Node

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
