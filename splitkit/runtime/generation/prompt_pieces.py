"""Divides a long prompt into pieces that take about equally long, though attention grows with the tokens before them.

A piece of ``x`` tokens after ``p`` others costs ``x (1 + (p + x / 2) / r)``: the layers cost the same for each token,
and attention as much as they do after ``r`` positions, which follows from the FLOPs of the captured graph. SGLang
shortens the chunks of its pipelines in the same way (sgl-project/sglang#11857).
"""

from __future__ import annotations

import math

from torch import fx

from splitkit.costs.flop_formulas import counter_of
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.node_values import hints, op_name
from splitkit.graph.storages import value_of

_ATTENTION, _TOKENS = "scaled_dot_product_attention", ("input_ids", "inputs_embeds")
_SHORTEST = 4
"""A piece has at least this fraction of the first one's tokens, since kernels are slow for few of them."""


def costly_positions(gm: fx.GraphModule | Dataflow) -> int | None:
    """Return the positions after which attention costs as much as all else, by the FLOPs of a decoder's step.

    ``None`` for a graph without ``input_ids`` or ``inputs_embeds``, or without ``scaled_dot_product_attention``.
    """
    flow = facts_of(gm)
    if not any(flow.graph.find_nodes(op="placeholder", target=name) for name in _TOKENS):
        return None
    counts, layers, attention = counter_of(flow), 0.0, 0.0
    for node in flow.graph.nodes:
        if node.op != "call_function":
            continue
        if op_name(node.target) == _ATTENTION:
            attention += counts.flops(node) / hints(value_of(node.args[1]).shape)[-2]
        else:
            layers += counts.flops(node)
    return max(1, round(layers / attention)) if attention else None


def piece(most: int, before: int, costly: int | None) -> int:
    """Return the tokens of the next piece of a prompt, which takes about as long as the first.

    Args:
        most: the tokens of the first piece.
        before: the tokens of the prompt that have run.
        costly: the positions after which attention costs as much as all else; ``None``: it costs nothing.
    """
    if costly is None or not before:
        return most
    cost, slope = most * (1 + most / 2 / costly), 1 + before / costly
    even = costly * (math.sqrt(slope**2 + 2 * cost / costly) - slope)
    return max(1, most // _SHORTEST, min(most, int(even)))
