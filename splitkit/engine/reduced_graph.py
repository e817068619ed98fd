"""Reduces a graph to the nodes that some of its values need."""

from __future__ import annotations

from torch import fx
from torch.fx import Node


def reduce_to(graph: fx.Graph, wanted: tuple[Node, ...]) -> None:
    """Let a graph return these values only, and erase what they do not need, inputs too; in place."""
    output = graph.output_node()
    output.args = (wanted,)
    needed = {output}
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= {*node.all_input_nodes}
        else:
            graph.erase_node(node)
