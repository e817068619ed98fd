"""Make caches for an example: with the layers and sizes of those that a model fills itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from splitkit._torch import FakeTensorMode
from splitkit.errors import CaptureError
from splitkit.frontends.capture.capture_errors import construct_of
from splitkit.frontends.decoder.recurrent_states import continued_states
from splitkit.frontends.output_classes import has_states
from splitkit.frontends.trace_settings import as_in_export


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def empty_cache(model: Any) -> Any:
    """Return an empty cache for a model, in which every layer with keys keeps all positions."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    new_layer: Any = DynamicLayer
    cache, known = DynamicCache(), DynamicCache(config=model.config).layers
    if any(map(has_states, known)):
        cache.layers = [layer if has_states(layer) or _is_dummy(layer) else new_layer() for layer in known]
    return cache


def cache_like(layers: list[Any], batch: int, positions: int, device: torch.device) -> Any:
    """Return a ``DynamicCache`` of zeros with the layers of another one: heads, sizes and dtypes, which may differ."""
    from transformers import DynamicCache

    def zeros(like: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.zeros(batch, *sizes, dtype=like.dtype, device=device)

    cache = DynamicCache()
    cache.layers = []
    for layer in layers:
        new = copy.copy(layer)
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            pair = layer.keys, layer.values
            new.keys, new.values = (zeros(x, x.shape[1], positions, x.shape[3]) for x in pair)
        if has_states(layer):
            new.conv_states, new.recurrent_states = (
                {i: state if state is None else zeros(state, *state.shape[1:]) for i, state in table.items()}
                for table in (layer.conv_states, layer.recurrent_states)
            )
        cache.layers.append(new)
    return cache


def fill(model: nn.Module, inputs: Mapping[str, Any], *caches: Any) -> list[list[Any]]:
    """Run a model on inputs that hold empty caches, on fake tensors or on ``meta``, and return the layers of each.

    Raises:
        CaptureError: SK401 for a model that does not run, or that puts other things into a cache.
    """
    with torch.no_grad(), as_in_export(), FakeTensorMode(allow_non_fake_inputs=True), continued_states(model) as states:
        try:
            model(**inputs, use_cache=True)
        except Exception as error:
            why = f"called with {', '.join(inputs)}, it fails: {construct_of(error)}"
            raise not_a_decoder(model, why) from error
    if not all(cache.layers for cache in caches):
        raise not_a_decoder(model, "it puts no keys and values into past_key_values, as models with other states do")
    if states.refused:
        raise not_a_decoder(model, states.refused)
    for layer in (layer for cache in caches for layer in cache.layers):
        if not (isinstance(getattr(layer, "keys", None), torch.Tensor) or has_states(layer) or _is_dummy(layer)):
            raise not_a_decoder(model, "it keeps other things than keys and values of each layer in its cache")
    return [list(cache.layers) for cache in caches]


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"


WITHOUT_SPLIT = 'Generate with model.generate; of a model loaded with device_map="auto", layers are on several devices.'


def not_a_decoder(model: nn.Module, why: str, remedy: str = WITHOUT_SPLIT) -> CaptureError:
    """Return the error for a model whose step cannot be captured."""
    return CaptureError(
        "SK401",
        f"{type(model).__name__} cannot be captured as a decoder: {why}",
        remedy,
    )
