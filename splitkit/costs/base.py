"""Base classes of cost models."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.node_values import read_bytes, value_bytes
from splitkit.graph.scope import is_state_op
from splitkit.prices import Costs
from splitkit.short_repr import brief


class GraphCosts:
    """Cost model of one graph that counts the bytes of the graph's tensors."""

    gm: fx.GraphModule

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value; 0 where ``meta["val"]`` is missing."""
        return value_bytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return read_bytes(self.gm, node)


class WrappedCosts:
    """Cost model that changes the seconds of another one and keeps its bytes."""

    costs: Costs

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value; its gradient, if there is one, has the same size."""
        return self.costs.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.costs.param_bytes(node)


# Price every node the same.


def unit(gm: fx.GraphModule | Dataflow) -> Unit:
    """Return costs of one FLOP and one second for every node that a policy places; reports print them as node counts.

    Args:
        gm: the graph, or facts about it.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph.
    """
    return Unit(root_of(gm))


@dataclass(frozen=True)
class Unit(GraphCosts):
    """The costs of `unit`. Bytes are those of ``meta["val"]``, or 0 without it."""

    gm: fx.GraphModule
    unit: ClassVar[str] = "nodes"

    __repr__ = brief

    def seconds(self, node: Node) -> float:
        """1 for a node that computes, 0 for inputs, attributes, ``getitem`` and state ops."""
        computes = node.op in ("call_function", "call_method", "call_module")
        return float(computes and node.target is not operator.getitem and not is_state_op(node))

    def flops(self, node: Node) -> float:
        """As `seconds`."""
        return self.seconds(node)
