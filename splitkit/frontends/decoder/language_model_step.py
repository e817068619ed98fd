"""Lets a model with images be captured from its language model on: with the arguments that this is given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from splitkit.graph.caches import ARGUMENTS

_OF_THE_WHOLE = (*ARGUMENTS, "use_cache", "logits_to_keep")


@contextmanager
def language_model_entered(model: Any, step: Mapping[str, Any]) -> Iterator[None]:
    """Let a model's ``forward`` take the arguments of its language model, whatever it computes in front of that.

    Args:
        model: the model.
        step: arguments with these names: the language model's, and caches and settings.
    """
    decoder = model.get_decoder()
    whole, inner, own = model.forward, decoder.forward, inspect.signature(decoder.forward)
    taken = inspect.signature(whole).parameters
    given: dict[str, Any] = {}

    def forward(**arguments: Any) -> Any:
        given.update({name: x for name, x in arguments.items() if name not in _OF_THE_WHOLE})
        # nothing that is computed in front of the language model is read; it has to run like a prompt of text
        embeds = arguments["inputs_embeds"]
        ids = embeds.new_zeros(embeds.shape[:2], dtype=torch.long)
        named = {name: arguments[name] for name in ("position_ids", *_OF_THE_WHOLE) if name in arguments}
        return whole(input_ids=ids, **{name: x for name, x in named.items() if name in taken})

    def enter(*args: Any, **arguments: Any) -> Any:
        return inner(**{**own.bind_partial(*args).arguments, **arguments, **given})

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in step]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    hidden = [(module, vars(module).get("forward")) for module in (model, decoder)]
    model.forward, decoder.forward = forward, enter
    try:
        yield
    finally:
        given.clear()
        for module, before in hidden:
            del module.forward
            if before is not None:
                module.forward = before


def drop_unread(gm: fx.GraphModule) -> None:
    """Remove ops that nothing reads from a graph, in place: the ops in front of the language model."""
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    gm.recompile()
