"""Takes the tensors of a step from a cache of transformers, and puts them back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.kept_caches import KeptCache

_OWN = re.compile(r"(?:(self|cross)_attention_cache_)?layers_(\d+)_(keys|values)$")
_TRANSFORMERS = re.compile(r"(key|value)_cache_(\d+)$")


class _Place(NamedTuple):
    """Where a tensor is in a cache.

    Attributes:
        within: ``"self"`` or ``"cross"``, the cache of an ``EncoderDecoderCache``; empty for any other cache.
        layer: the number of the layer.
        kind: ``"keys"`` or ``"values"``.
    """

    within: str
    layer: int
    kind: str


def require_plain(cache: Any) -> None:
    """Refuse a cache that is no ``DynamicCache``, or that moves layers to the CPU.

    Raises:
        PipelineError: SK802.
    """
    for inner in _caches_in(cache).values():
        offloads = " that offloads" if getattr(inner, "offloading", False) else ""
        if type(inner).__name__ != "DynamicCache" or offloads:
            raise _bad(
                f"the cache is a {type(inner).__name__}{offloads}, which the graph cannot keep on its devices",
                "Generate without cache_implementation, or give a DynamicCache.",
            )


def taken_from(
    cache: Any, decoder: DecoderOnDevices, sequences: int, encoded: Callable[[], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Take the tensors out of a cache, in the order of a step.

    Args:
        cache: from an earlier step, or without tensors.
        decoder: the decoder.
        sequences: the number of sequences.
        encoded: computes the constant tensors, if the cache does not have them.

    Raises:
        PipelineError: SK802 for a cache of another kind, or for other sequences; nothing is taken out then.
    """
    inside, places = _caches_in(cache), [_place(kept) for kept in decoder.caches]
    filled = {within: _is_filled(inner) for within, inner in inside.items()}
    for within, inner in inside.items():
        if filled[within]:
            _require_layers(inner, 1 + max(place.layer for place in places if place.within == within), sequences)
    missing = any(kept.constant and not filled[p.within] for kept, p in zip(decoder.caches, places, strict=True))
    constants = iter(encoded() if missing else ())
    found = []
    for kept, place in zip(decoder.caches, places, strict=True):
        if filled[place.within]:
            tensor = getattr(inside[place.within].layers[place.layer], place.kind).to(decoder.home(kept))
        elif kept.constant:
            tensor = next(constants)
        else:
            tensor = torch.empty(kept.sizes(sequences, 0), dtype=kept.like.dtype, device=decoder.home(kept))
        found.append(tensor)
    for inner in inside.values():
        for layer in inner.layers:
            layer.keys = layer.values = None
    return found


def put_into(cache: Any, caches: Sequence[KeptCache], tensors: Sequence[torch.Tensor]) -> None:
    """Let a cache hold the tensors of a step, each on its device; every layer keeps all positions."""
    from transformers.cache_utils import DynamicLayer

    inside = _caches_in(cache)
    made: dict[str, dict[int, Any]] = {within: {} for within in inside}
    for kept, tensor in zip(caches, tensors, strict=True):
        place = _place(kept)
        layer = made[place.within].setdefault(place.layer, DynamicLayer())
        setattr(layer, place.kind, tensor)
        layer.dtype, layer.device, layer.is_initialized = tensor.dtype, tensor.device, True
    for within, inner in inside.items():
        inner.layers = [layer for _, layer in sorted(made[within].items())]
    if "cross" in inside:
        cache.is_updated = dict.fromkeys(made["cross"], True)


def _caches_in(cache: Any) -> Mapping[str, Any]:
    if type(cache).__name__ == "EncoderDecoderCache":
        return {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    return {"": cache}


def _is_filled(cache: Any) -> bool:
    return any(isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel() for layer in cache.layers)


def _require_layers(cache: Any, count: int, sequences: int) -> None:
    layers = cache.layers
    if len(layers) != count or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise _bad(f"the cache has {len(layers)} layers of {kinds}", "Give the cache that an earlier call returned.")
    if layers[0].keys.shape[0] != sequences:
        raise _bad(f"there are {sequences} sequences, and the cache has {layers[0].keys.shape[0]}", "Give as many.")


def _place(kept: KeptCache) -> _Place:
    if found := _OWN.search(kept.given):
        return _Place(found[1] or "", int(found[2]), found[3])
    # where transformers' own registration of the class came first
    if found := _TRANSFORMERS.search(kept.given):
        return _Place("", int(found[2]), f"{found[1]}s")
    raise _bad(f"the cache {kept.given} is not keys or values of a layer", "Capture with sk.capture_decoder.")


def _bad(reason: str, remedy: str) -> PipelineError:
    return PipelineError("SK802", reason, remedy)
