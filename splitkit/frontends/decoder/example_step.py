"""Make the inputs of one step of a decoder of transformers, with which it is captured."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from splitkit.frontends.decoder.example_caches import cache_like, empty_cache, fill, model_device
from splitkit.frontends.decoder.generate_calls import QUERY, GenerateCalls, in_order
from splitkit.graph.caches import ARGUMENTS


def example_step(model: nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    """Return keyword inputs of a causal language model: ``QUERY`` tokens, and caches of the positions before them.

    Args:
        model: the model.
        batch: sequences.
        tokens: positions in the caches and of the step together.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    device, cache, parameters = model_device(model), empty_cache(model), inspect.signature(model.forward).parameters
    name, (one, several) = _tokens(model, batch, device)
    kept = next((argument for argument in ARGUMENTS if argument in parameters), ARGUMENTS[0])
    (layers,) = fill(model, {name: one, kept: cache}, cache)
    past = tokens - QUERY
    cache_of = functools.partial(cache_like, layers, device=torch.device("meta"))
    calls = GenerateCalls(model, kept, cache_of, embedded=name == "inputs_embeds")
    further = calls.step(batch, tokens)
    if calls.embedded:
        return {**further, kept: cache_like(layers, batch, past, device), "logits_to_keep": 1, "use_cache": True}
    known = {
        name: several,
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "logits_to_keep": 1,
        kept: cache_like(layers, batch, past, device),
        "use_cache": True,
    }
    return in_order(model, known, further)


def _tokens(model: nn.Module, batch: int, device: torch.device) -> tuple[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the name of the input for tokens, one token, and those of the step; with images they are embedded."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    shapes = ((1, 1), (batch, QUERY))
    if text is config:
        one, several = (torch.zeros(shape, dtype=torch.long, device=device) for shape in shapes)
        return "input_ids", (one, several)
    dtype = getattr(model, "dtype", torch.float32)
    one, several = (torch.zeros(*shape, text.hidden_size, dtype=dtype, device=device) for shape in shapes)
    return "inputs_embeds", (one, several)
