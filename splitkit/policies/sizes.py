"""A `torch.Size` does not cross from part to part: each reader asks the tensor itself."""

from __future__ import annotations

import torch
from torch.fx import Node

from splitkit.dataflow import Dataflow, reads
from splitkit.plan import PartKey, Plan
from splitkit.rewrite import prune


def ask_sizes_again(flow: Dataflow, plan: Plan) -> Plan:
    """Copy ``x.size()`` into each part that reads it whole; compilers of single parts take tensors and ints only.

    Its members are ints and may cross. A size that is asked before its tensor is written or resized stays where it
    is: asked again later, it could be another one, so it crosses after all::

        part 0: x -> s = x.size()      ──s──>  part 1: y.view(s)
        part 0: x                      ──x──>  part 1: s = x.size(); y.view(s)
    """
    fixed = {earlier for before in flow.after.values() for earlier in before}
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for node in flow.nodes:
        if _is_size(node) and node not in fixed and node not in flow.once:
            keys = dict.fromkeys(plan[node])
            for reader in node.users:
                if reader not in flow.followers:
                    keys |= dict.fromkeys(plan.places.get(reader, ()))
            if len(keys) > 1:
                changes[node] = tuple(keys)
    return prune(flow, plan.place(changes)) if changes else plan


def _is_size(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is not None:
        return isinstance(value, torch.Size)
    if node.op == "call_method" and node.target == "size":
        return len(node.args) + len(node.kwargs) == 1
    return node.target is getattr and node.args[1:2] == ("shape",) and len(reads(node)) == 1
