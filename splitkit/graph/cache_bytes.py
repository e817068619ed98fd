"""How many bytes of keys and values each attention of a graph keeps per token, read off the shapes of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from splitkit.graph.byte_sizes import tensor_bytes
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.fake_calls import hints, op_name, target_of
from splitkit.graph.symbols import value_of

_ATTENTION = "scaled_dot_product_attention"
# Ops that only repeat or rearrange keys and values, as where several query heads share a key.
_SAME_VALUES = frozenset(
    (
        *("expand", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "contiguous"),
        *("clone", "repeat", "repeat_interleave", "flatten", "unflatten", "alias", "detach", "slice", "__getitem__"),
    )
)


def cache_bytes(gm: GraphModule | Dataflow) -> Mapping[Node, int]:
    """Return the bytes that each attention keeps per token when the model generates: attention node -> bytes.

    An attention is a node that calls ``scaled_dot_product_attention`` (transformers: ``attn_implementation="sdpa"``,
    the default). Its keys and values count before heads are repeated, in their captured dtype, divided by the tokens of
    the capture (batch times length of the keys). If the cache has another dtype, or a sliding window that holds less,
    change the numbers and pass the mapping to `splitkit.policies.Stages`. Do the same for models with an encoder: its
    attention is counted here, although it keeps nothing from token to token.

    Args:
        gm: a captured forward graph, or facts about it.
    """
    flow = facts_of(gm)
    return {node: nbytes for node, nbytes in _each(flow) if nbytes}


def _each(flow: Dataflow) -> Iterator[tuple[Node, int]]:
    for node in flow.nodes:
        if op_name(target_of(flow.root, node)) != _ATTENTION:
            continue
        given = [*node.args, *node.kwargs.values()][1:3] if len(node.args) >= 3 else [*map(node.kwargs.get, _NAMES)]
        kept = [arg for arg in given if isinstance(arg, Node)]
        value = value_of(kept[0]) if kept else None
        if isinstance(value, torch.Tensor) and value.dim() >= 3:
            shape = hints(value.shape)
            batch = shape[0] if len(shape) > 3 else 1
            tokens = batch * shape[-2]
            yield node, sum(-(-_least_bytes(flow, arg) // tokens) for arg in kept) if tokens else 0


_NAMES = ("key", "value")


def _least_bytes(flow: Dataflow, node: Node) -> int:
    """Return the bytes of keys or values before they are repeated."""
    least = _nbytes(node)
    while op_name(target_of(flow.root, node)) in _SAME_VALUES and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        least = min(least, _nbytes(node) or least)
    return least


def _nbytes(node: Node) -> int:
    value = value_of(node)
    return tensor_bytes(value) if isinstance(value, torch.Tensor) else 0
