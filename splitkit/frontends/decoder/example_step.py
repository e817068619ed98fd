"""Make the inputs of one step of a decoder of transformers, with which it is captured."""

from __future__ import annotations

import inspect
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
    accepted = inspect.signature(model.forward).parameters
    optional = {
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "logits_to_keep": 1,
    }
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        **{name: value for name, value in optional.items() if name in accepted},
        "past_key_values": _cache(model, batch, past),
        "use_cache": True,
    }


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _cache(model: nn.Module, batch: int, past: int) -> Any:
    """Return a cache with as many layers as the model fills, and with their sizes, which may differ."""
    from transformers import DynamicCache

    device, cache = _device_of(model), DynamicCache()
    for i, layer in enumerate(_filled(model)):
        keys, values = (
            torch.zeros(batch, x.shape[1], past, x.shape[3], dtype=x.dtype, device=device)
            for x in (layer.keys, layer.values)
        )
        cache.update(keys, values, i)
    return cache


def _filled(model: nn.Module) -> list[Any]:
    """Return the layers of a cache after one token; the tensors are fake, or on ``meta`` as the model is."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    with torch.no_grad(), as_in_export(), FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, 1, dtype=torch.long, device=_device_of(model))
        try:
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        except (TypeError, ValueError, AttributeError) as error:
            why = f"called with tokens and a cache, it raises {type(error).__name__}: {error}"
            raise not_a_decoder(model, why) from error
    if not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in cache.layers):
        raise not_a_decoder(model, "it keeps other things than keys and values of each layer in its cache")
    return list(cache.layers)


def not_a_decoder(model: nn.Module, why: str) -> CaptureError:
    """Return the error for a model whose step cannot be captured."""
    return CaptureError(
        "SK401",
        f"{type(model).__name__} cannot be captured as a decoder: {why}",
        "Capture causal language models with a cache of keys and values.",
    )
