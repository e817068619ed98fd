"""Costs that know nothing: every node takes as long as any other."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx import Node

from splitkit.brief import brief
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.scope import is_state_op
from splitkit.graph.sizes import read_bytes, value_bytes


def unit(gm: fx.GraphModule | Dataflow) -> Unit:
    """One FLOP, and one unit of time, for every node that a policy places: counts of nodes, printed as such.

    Args:
        gm: the graph, or facts about it.

    Raises:
        GraphError: SK101 when it is no graph.
    """
    return Unit(root_of(gm))


@dataclass(frozen=True)
class Unit:
    """See `unit`. Bytes are real where ``meta["val"]`` is there, else 0."""

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

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value, 0 if unknown."""
        return value_bytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return read_bytes(self.gm, node)
