"""Relates nodes of a split's parent to the parts that they call and to the nodes that were split."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch.fx import Node

from splitkit.engine.split import Split
from splitkit.graph.input_overlap import check_nodes
from splitkit.plans.parts import PARENT, PartKey


def calls_of(graph: fx.Graph, names: Mapping[PartKey, str]) -> Mapping[Node, PartKey]:
    """Return node -> part for the nodes that run a part, in order: calls of its module, or of ``checkpoint`` with it.

    Args:
        graph: the parent's graph.
        names: part -> the name of its module in the parent.
    """
    keys = {name: key for key, name in names.items()}
    found: dict[Node, PartKey] = {}
    checks = check_nodes(graph)  # they may read tensors of a part's module
    for node in graph.nodes:
        if node in checks:
            continue
        body = node.args[0] if node.op == "call_function" and node.args else None
        named = body if isinstance(body, Node) and body.op == "get_attr" else node
        if (named is body or node.op == "call_module") and str(named.target) in keys:
            found[node] = keys[str(named.target)]
    return found


def values_of(graph: fx.Graph, split: Split) -> Mapping[Node, Node]:
    """Map the values that parts return, in the parent's graph or a copy of it, to the nodes that were split."""
    found: dict[Node, Node] = {}
    for node, key in calls_of(graph, split.names).items():
        outputs = split.subgraphs[key].outputs
        if len(outputs) == 1:
            found[node] = outputs[0]
        else:
            found |= {user: outputs[int(str(user.args[1]))] for user in node.users}
    return found


def steps_of(split: Split) -> Mapping[Node, int]:
    """Map each node that was split to the position in the parent's graph at which its first copy runs."""
    steps = {node: i for i, node in enumerate(split.module.graph.nodes)}
    calls = {str(n.target): i for n, i in steps.items() if n.op in ("call_module", "get_attr")}
    found = {node: steps[copied] for node, copied in split.copies[PARENT].items() if copied in steps}
    for key, sub in split.subgraphs.items():
        for node in sub.nodes:
            found[node] = min(calls[split.names[key]], found.get(node, len(steps)))
    return found
