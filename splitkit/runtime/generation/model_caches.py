"""Takes the tensors of a step from a cache of transformers, and puts them back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.generation_request import unfit
from splitkit.runtime.generation.kept_caches import KeptCache

_OWN = re.compile(
    r"(?:(self|cross)_attention_cache_)?layers_(\d+)_(keys|values|conv_states|recurrent_states)_?(\d*)_?$"
)
_KEYS = ("keys", "values")
_TRANSFORMERS = re.compile(r"(key|value)_cache_(\d+)$")


class _Place(NamedTuple):
    """Where a tensor is in a cache.

    Attributes:
        within: ``"self"`` or ``"cross"``, the cache of an ``EncoderDecoderCache``; empty for any other cache.
        layer: the number of the layer.
        kind: ``"keys"``, ``"values"``, ``"conv_states"`` or ``"recurrent_states"``.
        state: the number of a state of the layer.
    """

    within: str
    layer: int
    kind: str
    state: int = 0

    def tensor_in(self, layer: Any) -> Any:
        """Return the tensor in a layer of a cache; ``None`` if it is empty."""
        found = getattr(layer, self.kind, None)
        return found.get(self.state) if isinstance(found, dict) else found

    def put_into(self, layer: Any, tensor: torch.Tensor) -> None:
        """Let a layer of a cache hold a tensor."""
        layer.dtype, layer.device = tensor.dtype, tensor.device
        if self.kind in _KEYS:
            setattr(layer, self.kind, tensor)
            layer.is_initialized = True
            return
        getattr(layer, self.kind)[self.state] = tensor
        getattr(layer, f"is_{self.kind}_initialized")[self.state] = layer.has_previous_state[self.state] = True
        if self.kind == "conv_states":
            layer.conv_kernel_size[self.state] = tensor.shape[-1]


def require_plain(cache: Any) -> None:
    """Refuse a cache that is no ``DynamicCache``, or that moves layers to the CPU.

    Raises:
        PipelineError: SK802.
    """
    for inner in _caches_in(cache).values():
        offloads = " that offloads" if getattr(inner, "offloading", False) else ""
        if type(inner).__name__ != "DynamicCache" or offloads:
            raise unfit(
                f"the cache is a {type(inner).__name__}{offloads}, which the graph cannot keep on its devices",
                "Generate without cache_implementation, or give a DynamicCache.",
            )


def cached_positions(cache: Any) -> int:
    """Return the positions that a cache holds; 0 if it has states only, which do not say."""
    inside = _caches_in(cache).values()
    if not any(hasattr(layer, "get_seq_length") for inner in inside for layer in inner.layers):
        return 0
    return int(cache.get_seq_length())


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
            _require_layers(inner, [place for place in places if place.within == within], sequences)
    missing = any(kept.constant and not filled[p.within] for kept, p in zip(decoder.caches, places, strict=True))
    constants = iter(encoded() if missing else ())
    found = []
    for kept, place in zip(decoder.caches, places, strict=True):
        if filled[place.within]:
            tensor = place.tensor_in(inside[place.within].layers[place.layer]).to(decoder.home(kept))
        elif kept.constant:
            tensor = next(constants)
        else:
            tensor = torch.zeros(kept.sizes(sequences, 0), dtype=kept.like.dtype, device=decoder.home(kept))
        found.append(tensor)
    for inner in inside.values():
        for layer in inner.layers:
            _forget(layer)
    return found


def put_into(cache: Any, caches: Sequence[KeptCache], tensors: Sequence[torch.Tensor]) -> None:
    """Let a cache hold the tensors of a step, each on its device; every layer with keys keeps all positions."""
    inside, places = _caches_in(cache), [_place(kept) for kept in caches]
    for within, inner in inside.items():
        inner.layers = [_class_of(kinds)() for kinds in _kinds([place for place in places if place.within == within])]
    for place, tensor in zip(places, tensors, strict=True):
        place.put_into(inside[place.within].layers[place.layer], tensor)
    if "cross" in inside:
        cache.is_updated = dict.fromkeys(range(len(inside["cross"].layers)), True)


def _kinds(places: Sequence[_Place]) -> list[set[str]]:
    """Return the kinds of tensors of each layer; none for a layer that keeps nothing, such as one of experts only."""
    found: list[set[str]] = [set() for _ in range(1 + max((place.layer for place in places), default=-1))]
    for place in places:
        found[place.layer].add(place.kind)
    return found


def _class_of(kinds: set[str]) -> Any:
    """Return the class of transformers for a layer with these kinds of tensors."""
    from transformers import cache_utils

    has_keys, has_states = not kinds.isdisjoint(_KEYS), not kinds.issubset(_KEYS)
    if has_states:
        return cache_utils.LinearAttentionAndFullAttentionLayer if has_keys else cache_utils.LinearAttentionLayer
    return cache_utils.DynamicLayer if has_keys else cache_utils.DummyLayer


def _forget(layer: Any) -> None:
    """Let a layer hold no tensors, so that those of the last step can be freed."""
    for kind in _KEYS:
        if getattr(layer, kind, None) is not None:
            setattr(layer, kind, None)
    for table in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        table.update(dict.fromkeys(table))


def _caches_in(cache: Any) -> Mapping[str, Any]:
    if type(cache).__name__ == "EncoderDecoderCache":
        return {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    return {"": cache}


def _is_filled(cache: Any) -> bool:
    for layer in cache.layers:
        keys, states = getattr(layer, "keys", None), getattr(layer, "has_previous_state", {})
        if (isinstance(keys, torch.Tensor) and keys.numel()) or any(states.values()):
            return True
    return False


def _require_layers(cache: Any, places: Sequence[_Place], sequences: int) -> None:
    layers, wanted = cache.layers, [_class_of(kinds) for kinds in _kinds(places)]
    # behind the last layer that keeps something there may be some that keep nothing
    wanted += [_class_of(set())] * (len(layers) - len(wanted))
    if [type(layer) for layer in layers] != wanted:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise unfit(f"the cache has {len(layers)} layers of {kinds}", "Give the cache that an earlier call returned.")
    count = next(tensor.shape[0] for place in places if (tensor := place.tensor_in(layers[place.layer])) is not None)
    if count != sequences:
        raise unfit(f"there are {sequences} sequences, and the cache has {count}", "Give as many.")


def _place(kept: KeptCache) -> _Place:
    if found := _OWN.search(kept.given):
        return _Place(found[1] or "", int(found[2]), found[3], int(found[4] or 0))
    # where transformers' own registration of the class came first
    if found := _TRANSFORMERS.search(kept.given):
        return _Place("", int(found[2]), f"{found[1]}s")
    raise unfit(f"the cache {kept.given} is not keys, values or a state of a layer", "Capture with sk.capture_decoder.")
