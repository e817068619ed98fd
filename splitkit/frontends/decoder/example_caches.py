"""Make caches for an example: with the layers and sizes of those that a model fills itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from splitkit._torch import FakeTensorMode
from splitkit.errors import CaptureError
from splitkit.frontends.trace_settings import as_in_export


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def cache_like(layers: list[Any], batch: int, positions: int, device: torch.device) -> Any:
    """Return a ``DynamicCache`` of zeros with the heads, sizes and dtypes of other layers, which may differ."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for i, layer in enumerate(layers):
        keys, values = (
            torch.zeros(batch, x.shape[1], positions, x.shape[3], dtype=x.dtype, device=device)
            for x in (layer.keys, layer.values)
        )
        cache.update(keys, values, i)
    return cache


def fill(model: nn.Module, inputs: Mapping[str, Any], *caches: Any) -> list[list[Any]]:
    """Run a model on inputs that hold empty caches, on fake tensors or on ``meta``, and return the layers of each.

    Raises:
        CaptureError: SK401 for a model that does not run, or that puts other things into a cache.
    """
    with torch.no_grad(), as_in_export(), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            model(**inputs, use_cache=True)
        except (TypeError, ValueError, AttributeError) as error:
            why = f"called with {', '.join(inputs)}, it raises {type(error).__name__}: {error}"
            raise not_a_decoder(model, why) from error
    for layer in (layer for cache in caches for layer in cache.layers):
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            raise not_a_decoder(model, "it keeps other things than keys and values of each layer in its cache")
    return [list(cache.layers) for cache in caches]


def not_a_decoder(model: nn.Module, why: str) -> CaptureError:
    """Return the error for a model whose step cannot be captured."""
    return CaptureError(
        "SK401",
        f"{type(model).__name__} cannot be captured as a decoder: {why}",
        "Capture models of transformers that generate text with a cache of keys and values.",
    )
