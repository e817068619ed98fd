"""Cut a complete plan into subgraphs: which nodes each part computes, what it takes and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.dataflow import Dataflow, reads
from splitkit.order import part_order
from splitkit.plan import PartKey, Plan


@dataclass(frozen=True)
class Subgraph:
    """One part cut out: data, no fx surgery yet. All three are in graph order, so that any two parts agree on the
    order of what they exchange.

    Attributes:
        key: the part.
        nodes: what it computes, attributes included.
        inputs: values that it takes from other parts or the host.
        outputs: values that other parts or the host take from it.
    """

    key: PartKey
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def cut(flow: Dataflow, plan: Plan) -> tuple[Subgraph | Node, ...]:
    """The subgraphs, and the host's own nodes between them, in the order in which the parent runs them.

    Raises:
        CycleError: SK203 when parts depend on each other in a circle.
    """
    nodes: dict[PartKey, list[Node]] = {}
    inputs: dict[PartKey, dict[Node, None]] = {}
    outputs: dict[PartKey, dict[Node, None]] = {}
    for node, keys in plan.items():
        for key in keys:
            nodes.setdefault(key, []).append(node)
            for read in reads(node):
                source = plan.source(read, key)
                if source != key:
                    inputs.setdefault(key, {})[read] = None
                    outputs.setdefault(source, {})[read] = None

    def in_order(of: Mapping[PartKey, dict[Node, None]], key: PartKey) -> tuple[Node, ...]:
        return tuple(sorted(of.get(key, ()), key=flow.index.__getitem__))

    return tuple(
        Subgraph(key, tuple(nodes[key]), in_order(inputs, key), in_order(outputs, key)) if node is None else node
        for key, node in part_order(flow, plan)
    )
