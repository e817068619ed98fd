"""Whether the values of a graph (``meta["val"]``) show which nodes share memory."""

from __future__ import annotations

from functools import cache

from torch import fx

from splitkit import _torch
from splitkit.costs.sizes import tensors
from splitkit.effects import storage_key
from splitkit.symbols import value_of


def shares_memory(gm: fx.GraphModule) -> bool:
    """Whether values show who shares memory: they do not if an op that must share has a storage of its own."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and _must_share(node.target) and node.all_input_nodes:
            first = node.all_input_nodes[0]
            mine, other = (set(map(storage_key, tensors(value_of(n)))) for n in (node, first))
            if first.op != "get_attr" and mine.isdisjoint(other):
                return False
    return True


# Ops whose result is a view, whatever they are given; `reshape` and `to` may copy.
_VIEWS = frozenset(
    [
        "view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "split",
    ]
)


@cache
def _must_share(target: object) -> bool:
    """Whether the result of an op is always (a view of) its first argument."""
    if not isinstance(target, _torch.OpOverload):
        return False
    packet = target.overloadpacket
    if str(packet).removeprefix("aten.") in _VIEWS:
        return True
    returned = target._schema.returns  # OpOverload._schema, .alias_info: 2.11, 2.13, 2.15
    return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write
