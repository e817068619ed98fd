"""What the nodes of a split's parent stand for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch.fx import Node

from splitkit.engine.split import Split
from splitkit.plans.parts import PartKey


def calls_of(graph: fx.Graph, names: Mapping[PartKey, str]) -> Mapping[Node, PartKey]:
    """The nodes that run a part, in order: calls of its module, and of ``checkpoint`` with it.

    Args:
        graph: of the parent.
        names: part -> what its module is called there.
    """
    keys = {name: key for key, name in names.items()}
    found: dict[Node, PartKey] = {}
    for node in graph.nodes:
        body = node.args[0] if node.op == "call_function" and node.args else None
        named = body if isinstance(body, Node) and body.op == "get_attr" else node
        if (named is body or node.op == "call_module") and str(named.target) in keys:
            found[node] = keys[str(named.target)]
    return found


def values_of(graph: fx.Graph, split: Split) -> Mapping[Node, Node]:
    """The values that parts give, in the parent's graph or a copy of it -> the nodes that were split."""
    found: dict[Node, Node] = {}
    for node, key in calls_of(graph, split.names).items():
        outputs = split.subgraphs[key].outputs
        if len(outputs) == 1:
            found[node] = outputs[0]
        else:
            found |= {user: outputs[int(str(user.args[1]))] for user in node.users}
    return found
