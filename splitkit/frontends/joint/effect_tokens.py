"""Turn the ops with effects in a joint graph, which AOTAutograd orders by tokens, back into plain calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.errors import CaptureError
from splitkit.graph.ops import effects_of

# Tokens among the inputs and outputs of a joint graph, which order effects (2.11, 2.13, 2.15).
_TOKENS = (
    descriptors.ForwardTokenAOTInput,
    descriptors.BackwardTokenAOTInput,
    descriptors.ForwardTokenAOTOutput,
    descriptors.BackwardTokenAOTOutput,
)


def without_tokens(gm: fx.GraphModule) -> None:
    """Turn ``token, y = with_effects(token, op, x)`` into ``y = op(x)``, in place, and drop tokens from the signature.

    ``linalg.cholesky``, ``solve`` and ``inv`` check their results with such ops. Tokens are inputs and outputs that the
    model does not have, and order edges already keep calls with effects in order.

    Raises:
        CaptureError: SK410 for an op that is registered with an effect that its schema does not show: without the
            token, the effect would be invisible.
    """
    for node in _threaded(gm.graph):
        _call_plainly(gm, node)
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("desc"), _TOKENS)]
    output = gm.graph.output_node()
    described = output.meta.get("desc", ())
    if inputs or any(isinstance(d, _TOKENS) for d in described):
        values: Any = output.args[0]
        kept = [i for i, d in enumerate(described) if not isinstance(d, _TOKENS)]
        output.args = (type(values)(values[i] for i in kept),)
        output.meta["desc"] = type(described)(described[i] for i in kept)
        for node in inputs:
            gm.graph.erase_node(node)
    gm.recompile()


def _threaded(graph: fx.Graph) -> Iterator[Node]:
    return (node for node in list(graph.nodes) if node.target is torch.ops.higher_order.with_effects)


def _call_plainly(gm: fx.GraphModule, node: Node) -> None:
    token, op, *args = node.args
    with gm.graph.inserting_before(node):
        plain = gm.graph.call_function(op, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
    results = len(getattr(getattr(op, "_schema", None), "returns", ())) or 1
    plain.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = tuple(node.meta["val"])[1:] if "val" in node.meta else ()
    if values:
        plain.meta["val"] = values[0] if results == 1 else values
    found = effects_of(plain, gm)
    if not (found.check or found.impure):
        raise CaptureError(
            "SK410",
            f"{op} is registered with an effect that its schema does not show",
            "Train the model with splitkit.apply or splitkit.backend, or tell splitkit: "
            f"splitkit.extend.declare(torch.ops.{op}, impure=True).",
            [node.name],
        )
    for user in list(node.users):
        position: Any = user.args[1]
        if position == 0:
            user.replace_all_uses_with(token)  # type: ignore[arg-type]
        elif results == 1:
            user.replace_all_uses_with(plain)
        else:
            user.target, user.args = operator.getitem, (plain, position - 1)
            continue
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
