"""Takes the tensors of a step from a ``DynamicCache`` of transformers, and puts them back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.kept_caches import KeptCache

_OWN = re.compile(r"layers_(\d+)_(keys|values)$")
_TRANSFORMERS = re.compile(r"(key|value)_cache_(\d+)$")


def require_plain(cache: Any) -> None:
    """Refuse a cache that is no ``DynamicCache``, or that moves layers to the CPU.

    Raises:
        PipelineError: SK802.
    """
    offloads = " that offloads" if getattr(cache, "offloading", False) else ""
    if type(cache).__name__ != "DynamicCache" or offloads:
        raise _bad(
            f"the cache is a {type(cache).__name__}{offloads}, which the graph cannot keep on its devices",
            "Generate without cache_implementation, or give a DynamicCache.",
        )


def taken_from(cache: Any, decoder: DecoderOnDevices, sequences: int) -> list[torch.Tensor]:
    """Return the tensors of a cache in the order of a step, and take them out of it; empty ones for a cache without any.

    Raises:
        PipelineError: SK802 for a cache of another kind, or for other sequences; nothing is taken out then.
    """
    if not _is_filled(cache):
        return [
            torch.empty(kept.sizes(sequences, 0), dtype=kept.like.dtype, device=decoder.home(kept))
            for kept in decoder.caches
        ]
    layers, places = cache.layers, [_place(kept) for kept in decoder.caches]
    if len(layers) != max(layer for layer, _ in places) + 1 or any(type(x).__name__ != "DynamicLayer" for x in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise _bad(f"the cache has {len(layers)} layers of {kinds}", "Give the cache that an earlier call returned.")
    found = [getattr(layers[layer], kind) for layer, kind in places]
    if found[0].shape[0] != sequences:
        raise _bad(f"there are {sequences} sequences, and the cache has {found[0].shape[0]}", "Give as many.")
    for layer in layers:
        layer.keys = layer.values = None
    return [tensor.to(decoder.home(kept)) for kept, tensor in zip(decoder.caches, found, strict=True)]


def put_into(cache: Any, caches: Sequence[KeptCache], tensors: Sequence[torch.Tensor]) -> None:
    """Let a ``DynamicCache`` hold the tensors of a step, each on its device; every layer keeps all positions."""
    from transformers.cache_utils import DynamicLayer

    layers: dict[int, Any] = {}
    for kept, tensor in zip(caches, tensors, strict=True):
        number, kind = _place(kept)
        layer = layers.setdefault(number, DynamicLayer())
        setattr(layer, kind, tensor)
        layer.dtype, layer.device, layer.is_initialized = tensor.dtype, tensor.device, True
    cache.layers = [layers[number] for number in sorted(layers)]


def _is_filled(cache: Any) -> bool:
    return any(isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel() for layer in cache.layers)


def _place(kept: KeptCache) -> tuple[int, str]:
    """Return the layer of a cache, and ``"keys"`` or ``"values"``, from its name."""
    if found := _OWN.search(kept.given):
        return int(found[1]), found[2]
    # where transformers' own registration of the class came first
    if found := _TRANSFORMERS.search(kept.given):
        return int(found[2]), f"{found[1]}s"
    raise _bad(f"the cache {kept.given} is not keys or values of a layer", "Capture with sk.capture_decoder.")


def _bad(reason: str, remedy: str) -> PipelineError:
    return PipelineError("SK802", reason, remedy)
