"""Assert that a split can be put together again."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import fx

from splitkit.engine.inlining.inline import inline
from splitkit.engine.split import Split
from splitkit.errors import CheckError


def assert_inlines(split: Split) -> None:
    """Assert that `splitkit.inline` restores the original graph, node by node, with its parameters and buffers.

    Raises:
        CheckError: SK701, with the first node that differs.
    """
    original, again = split.flow.root, inline(split)
    before, after = _node_records(original), _node_records(again)
    for one, other in zip_longest(before, after):
        if one != other:
            raise CheckError("SK701", f"inline gives {other} instead of {one}")
    if _tensors(original) != _tensors(again) or original.training != again.training:
        raise CheckError("SK701", f"inline gives the tensors {list(_tensors(again))}, not {list(_tensors(original))}")


def _node_records(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all fields of each node. Values of meta go by identity, since inlining passes them on."""
    return [
        (n.name, n.op, n.target, repr((n.args, n.kwargs)), n.type, {field: id(v) for field, v in n.meta.items()})
        for n in gm.graph.nodes
    ]


def _tensors(gm: fx.GraphModule) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in gm.state_dict(keep_vars=True).items()]
