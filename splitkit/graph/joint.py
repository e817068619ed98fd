"""What AOTAutograd notes on the nodes of a joint graph: the half they are of, and which forward node each came from.

Autograd numbers its nodes as forward makes them. AOTAutograd writes that number on every node of the joint graph, as
``meta["seq_nr"]``: on a forward node the number that was last given, on a backward node that of the autograd node which
runs it::

    addmm         7     made autograd node 7
    arange        7     made none: the number before it stays
    mm (backward) 7  -> addmm, the first of its number

Where gradients of several readers are added up, autograd runs no node of its own: the sum goes to the forward node of
what it adds.
"""

from __future__ import annotations

from typing import Literal

from torch import fx
from torch.fx import Node

_COMPUTES = ("call_function", "call_method", "call_module")
Mark = Literal["is_forward", "is_backward", "must_be_in_forward", "must_be_in_backward"]


def mark_of(node: Node) -> Mark | None:
    """The half in which AOTAutograd traced a node, or says that it must be, if it says so.

    It is ``meta["partitioner_tag"]``, as `owners` reads ``meta["seq_nr"]``: 2.11, 2.13, 2.15.
    """
    mark: Mark | None = node.meta.get("partitioner_tag")
    return mark


def is_marked_backward(node: Node) -> bool:
    """Whether AOTAutograd traced a node in backward."""
    return mark_of(node) in ("is_backward", "must_be_in_backward")


def is_joint(graph: fx.Graph) -> bool:
    """Whether it is a joint graph: it takes tangents, as AOTAutograd names them, or has nodes marked backward."""
    return any(_is_tangent(node) or is_marked_backward(node) for node in graph.nodes)


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def backward_nodes(graph: fx.Graph) -> dict[Node, None]:
    """The nodes that backward runs, in order: those marked so, and whatever needs a tangent."""
    tainted: dict[Node, None] = {}
    for node in graph.nodes:
        late = is_marked_backward(node) or _is_tangent(node)
        if node.op != "output" and (late or any(n in tainted for n in node.all_input_nodes)):
            tainted[node] = None
    return {node: None for node in tainted if node.op in _COMPUTES}


def forward_outputs(graph: fx.Graph) -> int:
    """How many outputs are forward's: those before the first that is a gradient, or that has none."""
    late = backward_nodes(graph)
    outputs = graph.output_node().args[0]
    found = 0
    for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
        if not isinstance(output, Node) or output in late or is_marked_backward(output) or _is_tangent(output):
            break
        found += 1
    return found


def owners(graph: fx.Graph) -> dict[Node, Node]:
    """Backward node -> forward node, for every backward node of a graph that computes something in forward."""
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
        # the last: what backward does before anything else belongs to where forward ended
        found[node] = own or near or forward[-1]
    return found
