"""Describe a part of a split in one line: its ops, parameters, inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.fx import Node

from splitkit.engine.subgraphs import Subgraph
from splitkit.errors import listed
from splitkit.graph.byte_sizes import tensor_bytes, value_bytes
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.units import size

NAMED = 2  # how many values a line names


def part_summary(name: str, sub: Subgraph, flow: Dataflow, plan: Plan) -> str:
    """Return ``submod_0: 12 ops, 1.50 MiB of parameters; takes x (256 B); gives add, mul and 3 more (2.00 KiB)``."""
    device = plan.parts[sub.key].device
    ops = sum(flow.is_placeable(n) for n in sub.nodes)
    held = size(sum(map(tensor_bytes, (t for t in flow.owned(*sub.nodes) if isinstance(t, nn.Parameter)))))
    head = f"{name}{f' on {device}' if device else ''}: {ops} ops, {held} of parameters"
    return f"{head}; takes {_values(sub.inputs)}; gives {_values(sub.outputs)}"


def _values(nodes: Sequence[Node]) -> str:
    """Return the first names, how many more there are, and the bytes of all values whose size is known."""
    if not nodes:
        return "nothing"
    nbytes = sum(map(value_bytes, nodes))
    return f"{listed(nodes, NAMED)}{f' ({size(nbytes)})' if nbytes else ''}"
