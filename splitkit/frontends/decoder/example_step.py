"""Make the inputs of one step of a decoder of transformers, with which it is captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splitkit._torch import FakeTensorMode
from splitkit.errors import CaptureError
from splitkit.frontends.trace_settings import as_in_export

QUERY = 3
"""Tokens of the step; more than one, so that no branch for a single token is taken."""


def example_step(model: nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    """Return keyword inputs: ``QUERY`` tokens, and caches of the positions before them.

    Args:
        model: a causal language model.
        batch: sequences.
        tokens: positions in the caches and of the step together.

    Raises:
        CaptureError: SK401 for a model that is no causal language model of transformers, or has caches of other kinds.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise not_a_decoder(model, "it is not a model of transformers")
    device = _device_of(model)
    ids = torch.zeros(batch, QUERY, dtype=torch.long, device=device)
    past = tokens - QUERY
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "past_key_values": _cache(model, batch, past),
        "use_cache": True,
    }


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _cache(model: nn.Module, batch: int, past: int) -> Any:
    """Return a cache that has the layers and sizes of the one that the model fills, which may differ from layer to layer."""
    from transformers import DynamicCache

    filled = _filled(model)
    device, cache = _device_of(model), DynamicCache()
    for i, (keys, values) in enumerate(filled):
        made = [torch.zeros(batch, x.shape[1], past, x.shape[3], dtype=x.dtype, device=device) for x in (keys, values)]
        cache.update(*made, i)
    return cache


def _filled(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer after one token, as fake tensors, or on ``meta`` as the model is."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad(), as_in_export(), FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, 1, dtype=torch.long, device=_device_of(model))
        try:
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        except (TypeError, ValueError, AttributeError) as error:
            raise not_a_decoder(
                model, f"called with tokens and a cache, it raises {type(error).__name__}: {error}"
            ) from error
    layers = [
        (layer.keys, layer.values) for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)
    ]
    if not layers or len(layers) < len(cache.layers):
        raise not_a_decoder(model, "it keeps other things than keys and values of each layer in its cache")
    return layers


def not_a_decoder(model: nn.Module, why: str) -> CaptureError:
    """Return the error for a model whose step cannot be captured."""
    return CaptureError(
        "SK401",
        f"{type(model).__name__} cannot be captured as a decoder: {why}",
        "Capture causal language models with a cache of keys and values.",
    )
