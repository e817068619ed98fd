"""A part of a split in one line: what it computes, holds, takes and gives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.fx import Node

from splitkit.engine.cut import Subgraph
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.sizes import value_bytes
from splitkit.graph.storages import attribute
from splitkit.plans.record import Plan
from splitkit.units import size

NAMED = 2


def line_of(name: str, sub: Subgraph, flow: Dataflow, plan: Plan) -> str:
    """``submod_0: 12 ops, 1.50 MiB of parameters; takes x (256 B); gives add, mul and 3 more (2.00 KiB)``."""
    device = plan.parts[sub.key].device
    ops = sum(flow.is_placeable(n) for n in sub.nodes)
    held = size(_parameter_bytes(sub, flow))
    head = f"{name}{f' on {device}' if device else ''}: {ops} ops, {held} of parameters"
    return f"{head}; takes {_values(sub.inputs)}; gives {_values(sub.outputs)}"


def _values(nodes: Sequence[Node]) -> str:
    """The first names, how many more there are, and the bytes of all as far as they are known."""
    if not nodes:
        return "nothing"
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    nbytes = sum(map(value_bytes, nodes))
    return f"{', '.join(n.name for n in nodes[:NAMED])}{more}{f' ({size(nbytes)})' if nbytes else ''}"


def _parameter_bytes(sub: Subgraph, flow: Dataflow) -> int:
    """Of the parameters that a part reads, each once, wherever they are held."""
    computed = [n for n in sub.nodes if n.op in ("get_attr", "call_module")]
    read = [*computed, *(n for n in sub.inputs if n.op == "get_attr")]
    found: dict[int, nn.Parameter] = {}
    for value in (attribute(flow.root, str(n.target)) for n in read):
        own = value.parameters() if isinstance(value, nn.Module) else [value]
        found |= {id(p): p for p in own if isinstance(p, nn.Parameter)}
    return sum(p.nbytes for p in found.values())
