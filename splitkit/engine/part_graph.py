"""Make a networkx graph of the parts of a split: the values that they exchange, and the effects that order them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from splitkit.engine.subgraphs import Subgraph
from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.node_values import value_bytes
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan

if TYPE_CHECKING:
    from networkx import DiGraph


def part_graph(
    flow: Dataflow,
    plan: Plan,
    subgraphs: Mapping[PartKey, Subgraph],
    names: Mapping[PartKey, str],
    own: Iterable[Node],
) -> DiGraph[Any]:
    """Return the graph that `splitkit.engine.split.Split.to_networkx` documents.

    Args:
        flow: facts about the original graph.
        plan: the complete plan.
        subgraphs: the parts, in the order of execution.
        names: part -> the name of its module.
        own: the nodes that the parent computes itself.
    """
    from networkx import DiGraph

    graph: DiGraph[Any] = DiGraph()
    own = sorted(own, key=flow.index.__getitem__)
    for node in own:
        if flow.is_placeable(node):
            _add(graph, node, kind=node.op, name=node.name, nodes=1, device=None)
    for key, sub in subgraphs.items():
        _add(graph, key, kind="part", name=names[key], nodes=len(sub.nodes), device=plan.parts[key].device)
    # value -> the vertex that it comes from: its home, or the part before in a relay
    holder: dict[Node, Any] = {node: flow.producer(node) for node in own}
    for key, sub in subgraphs.items():
        for value in sub.inputs:
            _carry(graph, holder[value], key, value)
        holder |= dict.fromkeys(sub.outputs, key)
    for node in own:
        for value in reads(node):
            _carry(graph, holder[value], flow.producer(node), value)
    for node in flow.scope:
        for earlier in flow.after[node]:
            for edge in product(_vertices(earlier, plan), _vertices(node, plan)):
                if edge[0] != edge[1] and edge[0] in graph and edge[1] in graph and not graph.has_edge(*edge):
                    graph.add_edge(*edge, values=(), bytes=0, effect=True)
    return graph


def _add(graph: DiGraph[Any], vertex: Any, **attributes: Any) -> None:
    graph.add_node(vertex, **attributes, inputs=(), input_bytes=0, outputs=(), output_bytes=0)


def _carry(graph: DiGraph[Any], source: Any, reader: Any, value: Node) -> None:
    """Record a value on the edge from ``source`` to ``reader``, or on the one of them that is in the graph."""
    if source == reader:
        return
    if source not in graph or reader not in graph:
        vertex, field, total = (
            (reader, "inputs", "input_bytes") if reader in graph else (source, "outputs", "output_bytes")
        )
        if vertex in graph:
            graph.nodes[vertex][field] += (value.name,)
            graph.nodes[vertex][total] += value_bytes(value)
        return
    if not graph.has_edge(source, reader):
        graph.add_edge(source, reader, values=(), bytes=0, effect=False)
    edge = graph.edges[source, reader]
    edge["values"] += (value.name,)
    edge["bytes"] += value_bytes(value)


def _vertices(node: Node, plan: Plan) -> list[Any]:
    return [node if key is PARENT else key for key in plan[node]]
