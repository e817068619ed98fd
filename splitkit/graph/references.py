"""Views that only take a reference: when they may run before or after a write to the memory that they refer to.

A view may always run after a write that follows it in the graph. Before one that comes earlier it may run only where
autograd allows it: not if it yields several tensors, is made without gradients, or is itself written afterwards; of
those torch says that their base has been modified in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from splitkit.graph.ops import Effects, base_of_view
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.scope import Scope


@dataclass(frozen=True)
class Reference:
    """What a view is to its base.

    Attributes:
        base: the tensor whose memory it is.
        may_be_early: whether it may run before a write to its base that comes before it in the graph.
    """

    base: Node
    may_be_early: bool


def references_of(
    effects: Mapping[Node, Effects], scope: Mapping[Node, Scope], root: nn.Module, known: Known
) -> Mapping[Node, Reference]:
    """The views of a graph that read nothing of their bases.

    Args:
        effects: what each node does, in graph order.
        scope: the ambient state of each node.
        root: the module that owns the graph's attributes.
        known: what is known of which nodes yield tuples.
    """
    if not any(e.writes for e in effects.values()):
        return {}
    found = {n: b for n, e in effects.items() if e.aliases and (b := base_of_view(n, e, root, known)) is not None}
    written = {w for e in effects.values() for w in e.writes}
    for node in reversed(list(effects)):
        if node in written:  # what is written is part of what it was taken from
            written.update(effects[node].aliases)
    return {
        view: Reference(
            base, view not in written and scope[view].grad is not False and is_tuple(view, root, known) is False
        )
        for view, base in found.items()
    }
