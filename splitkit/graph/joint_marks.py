"""Read AOTAutograd's notes on the nodes of a joint graph: their half, and the forward node of a backward node.

Autograd numbers its nodes in the order in which forward makes them. AOTAutograd writes these numbers on the nodes of
the joint graph, as ``meta["seq_nr"]``: on a forward node the number that was given last, on a backward node the number
of the autograd node that runs it::

    addmm         7     made autograd node 7
    arange        7     made none, so it has the number before
    mm (backward) 7  -> addmm, the first node with this number

Autograd has no node for adding up the gradients of several readers. Such a sum belongs to the forward node of one of
its summands.
"""

from __future__ import annotations

from typing import Literal

from torch import fx
from torch.fx import Node

_COMPUTES = ("call_function", "call_method", "call_module")
Mark = Literal["is_forward", "is_backward", "must_be_in_forward", "must_be_in_backward"]


def mark_of(node: Node) -> Mark | None:
    """Return the half that AOTAutograd traced a node in, or requires it to be in; ``None`` without a mark."""
    # meta["partitioner_tag"] and meta["seq_nr"] are private to torch: 2.11, 2.13, 2.15
    mark: Mark | None = node.meta.get("partitioner_tag")
    return mark


def is_marked_backward(node: Node) -> bool:
    """Whether AOTAutograd traced a node in backward."""
    return mark_of(node) in ("is_backward", "must_be_in_backward")


def is_joint(graph: fx.Graph) -> bool:
    """Whether a graph is a joint graph: it takes tangents, as AOTAutograd names them, or has nodes marked backward."""
    return any(_is_tangent(node) or is_marked_backward(node) for node in graph.nodes)


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def backward_nodes(graph: fx.Graph) -> dict[Node, None]:
    """Return the nodes that backward runs, in order: nodes with its mark, and all that depend on a tangent."""
    tainted: dict[Node, None] = {}
    for node in graph.nodes:
        late = is_marked_backward(node) or _is_tangent(node)
        if node.op != "output" and (late or any(n in tainted for n in node.all_input_nodes)):
            tainted[node] = None
    return {node: None for node in tainted if node.op in _COMPUTES}


def forward_outputs(graph: fx.Graph) -> int:
    """Return how many outputs belong to forward: those before the first gradient (which may be ``None``)."""
    late = backward_nodes(graph)
    outputs = graph.output_node().args[0]
    found = 0
    for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
        if not isinstance(output, Node) or output in late or is_marked_backward(output) or _is_tangent(output):
            break
        found += 1
    return found


def forward_owners(graph: fx.Graph) -> dict[Node, Node]:
    """Return backward node -> forward node, for every backward node; empty if forward computes nothing."""
    backward = backward_nodes(graph)
    forward = [node for node in graph.nodes if node.op in _COMPUTES and node not in backward]
    if not forward:
        return {}
    made: dict[int, Node] = {}
    for node in forward:
        number = node.meta.get("seq_nr")
        if number is not None:
            made.setdefault(number, node)
    found: dict[Node, Node] = {}
    for node in backward:
        own = made.get(node.meta.get("seq_nr", -1))
        near = next((found[n] for n in reversed(node.all_input_nodes) if n in found), None)
        # Without either, a backward node runs before all others of backward: it belongs to the end of forward.
        found[node] = own or near or forward[-1]
    return found
