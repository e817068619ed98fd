"""Find the nodes of a split's parent that check its inputs and compute nothing."""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from splitkit.graph.input_overlap import CHECKS
from splitkit.graph.object_inputs import refuse_objects


def check_nodes(graph: fx.Graph) -> dict[Node, None]:
    """Return the nodes of a parent that check its inputs, and those that only read attributes for such checks."""
    found = {n: None for check in (*CHECKS, refuse_objects) for n in graph.find_nodes(op="call_function", target=check)}
    left = list(found)
    while left:
        for node in left.pop().all_input_nodes:
            reads = node.op == "get_attr" or node.target is getattr
            if reads and node not in found and all(user in found for user in node.users):
                found[node] = None
                left.append(node)
    return found
