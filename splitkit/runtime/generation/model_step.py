"""Runs a call of a model's ``forward`` as a step of a split decoder."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from splitkit.engine.split import Split
from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import ARGUMENTS, DEEPSTACK, ENCODER_CACHES
from splitkit.language_model import given_to_language_model
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.generation.decoder import ENCODED, MASK, DecoderInputs
from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.encoder_caches import EncoderCaches
from splitkit.runtime.generation.generation_request import unfit
from splitkit.runtime.generation.model_caches import cached_positions, put_into, require_plain, taken_from

_PASSED_ON = ("past_key_values", "use_cache", "logits_to_keep")
_READ_HERE = {"self", *ARGUMENTS, "return_dict", "use_cache", "logits_to_keep", "cache_position"}


class ModelStep:
    """A step that takes the arguments of a model's ``forward``, and returns its outputs.

    Attributes:
        decoder: the parts on their devices.
    """

    def __init__(self, model: Any, split: Split, devices: Devices = None) -> None:
        self.decoder = DecoderOnDevices(split, devices)
        has_encoder = ENCODER_CACHES in split.flow.root.meta
        self._encoder = EncoderCaches(split, self.decoder.caches, self.decoder.devices) if has_encoder else None
        names = DecoderInputs.among(self.decoder.inputs)
        if names is None:
            raise PipelineError(
                "SK801",
                "the graph reads neither tokens nor embeddings: its inputs are " + listed(self.decoder.inputs, 6),
                "Capture one step of the decoder: sk.capture_decoder(model).",
            )
        self._model, self._embedded = model, names.embedded
        self._tokens, self._mask, self._positions = names.tokens, names.mask, names.positions
        caches = self.decoder.caches
        self._cache = next(name for name in ARGUMENTS if caches[0].given.startswith(name))
        self._grows = any(cache.grows for cache in caches)
        given = {cache.given for cache in caches}
        tensors = {node.name: node.meta.get("val") for node in split.flow.graph.find_nodes(op="placeholder")}
        self._wanted = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor) and n not in given}
        self._without_images = {
            name: functools.partial(_no_features, x) for name, x in self._wanted.items() if name.startswith(DEEPSTACK)
        }
        self._masks = [name for name, x in self._wanted.items() if name.startswith(self._mask) and x.ndim == 4]
        # what is made here if it is not given, unless the graph reads it in another form than [sequences, positions]
        forms = {name: [w for w in self._wanted if w.startswith(name)] for name in (self._mask, self._positions)}
        self._made = {
            name for name, read in forms.items() if not read or (name in read and self._wanted[name].ndim == 2)
        }
        self._taken = {self._tokens, *self._made, *self.decoder.inputs}
        self._taken |= {"encoder_outputs"} if self._encoder else set()

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Run one call, with the arguments by name.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take.
        """
        given = self._to_language_model(given) if self._embedded else given
        self._require_known(given)
        ids: torch.Tensor = given[self._tokens]
        cache = given.get(self._cache)
        cache = self._empty_cache() if cache is None else cache
        require_plain(cache)
        past, mask = cached_positions(cache), given.get(self._mask)
        if not self._grows and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # states do not say how many positions came before, and the graph reads those of the step
            mask = mask[:, -ids.shape[1] :]
        inputs = {name: x for name, x in _leaves(given) if name in self._wanted and x is not None}
        if self._mask in self._made:
            inputs[self._mask] = mask = _mask(self._mask, mask, ids, past)
            if self._positions in self._made:
                inputs.setdefault(self._positions, (mask.cumsum(1) - 1).clamp(min=0)[:, past:])
        if (positions := inputs.get(self._positions)) is not None and positions.ndim == 2:
            inputs[self._positions] = positions.expand(len(ids), -1)
        hidden = given["encoder_outputs"][0] if self._encoder else None
        if hidden is not None:
            seen = given.get(MASK)
            inputs[ENCODED] = hidden
            inputs[MASK] = _ones(ids, *hidden.shape[:2]) if seen is None else seen
        inputs |= {name: empty(ids) for name, empty in self._without_images.items() if name not in inputs}
        inputs |= {name: self._no_mask(name, ids, past) for name in self._masks if name not in inputs}
        self._require_all(inputs)
        tensors = taken_from(cache, self.decoder, ids.shape[0], lambda: self._encoded(inputs))
        logits, tensors = self.decoder.step(inputs, tensors)
        put_into(cache, self.decoder.caches, tensors)
        return _output(logits, self._cache, cache if given.get("use_cache") is not False else None, hidden)

    def _to_language_model(self, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in given.items() if name != "self"}
        passed_on = {name: given[name] for name in _PASSED_ON if name in given}
        return {**given_to_language_model(self._model, own), **passed_on}

    def _no_mask(self, name: str, ids: torch.Tensor, past: int) -> torch.Tensor:
        """Return the mask that is the same as none: a model leaves it out where its attention can do without."""
        allowed = torch.ones(len(ids), 1, ids.shape[1], past + ids.shape[1], dtype=torch.bool, device=ids.device)
        if all(getattr(module, "is_causal", True) for module in self._model.get_decoder().modules()):
            allowed = allowed.tril(past)
        dtype = self._wanted[name].dtype
        return allowed if dtype == torch.bool else torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)

    def _encoded(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        assert self._encoder is not None
        return self._encoder.compute(inputs)

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self._encoder else DynamicCache()

    def _require_all(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a call without an input that the graph reads, or with one of other dimensions."""
        for name, like in self._wanted.items():
            found = inputs.get(name)
            if not isinstance(found, torch.Tensor) or found.ndim != like.ndim:
                has = f"is {list(found.shape)}" if isinstance(found, torch.Tensor) else "is missing"
                reason = f"{name} {has}, and the graph reads {like.ndim} dimensions"
                raise unfit(reason, "Give what generate gives the model.")

    def _require_known(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that the graph has no input for, and what it does not compute."""
        ids = given.get(self._tokens)
        if not isinstance(ids, torch.Tensor) or ids.ndim != (3 if self._embedded else 2) or not ids.numel():
            raise unfit(f"there are no {self._tokens}", "Give what the graph was captured with.")
        if self._encoder and given.get("encoder_outputs") is None:
            raise unfit("there are no encoder_outputs", "Give those of model.get_encoder(), as generate does.")
        for name, value in _leaves({name: x for name, x in given.items() if name not in _READ_HERE}):
            if name not in self._taken and value is not None and value is not False:
                raise unfit(f"the graph has no input {name}", f"Call it without {name}; it was captured without.")
        if given.get("return_dict") is False:
            raise unfit("return_dict is False", "Read logits and past_key_values by name.")
        keep = given.get("logits_to_keep", 0)
        if "logits_to_keep" in self.decoder.inputs and ids.shape[1] > 1 and keep != 1:
            wanted = "all" if isinstance(keep, int) and not keep else str(keep)
            raise unfit(
                f"the graph computes the logits of the last token, not {wanted}",
                "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has.",
            )


def _leaves(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name -> value for the inputs of a graph, with the names that export gives in dicts and lists."""
    for name, value in given.items():
        if type(value) is dict:
            yield from _leaves({f"{name}_{key}": x for key, x in value.items()})
        elif isinstance(value, (list, tuple)):
            yield from _leaves({f"{name}_{i}": x for i, x in enumerate(value)})
        else:
            yield name, value


def _output(logits: torch.Tensor, name: str, cache: Any, hidden: torch.Tensor | None) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
    from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

    if hidden is not None:
        return Seq2SeqLMOutput(logits=logits, past_key_values=cache, encoder_last_hidden_state=hidden)
    kind: Any = CausalLMOutputWithPast if name == ARGUMENTS[0] else MambaCausalLMOutput
    return kind(logits=logits, **{name: cache})


def _mask(name: str, mask: torch.Tensor | None, ids: torch.Tensor, past: int) -> torch.Tensor:
    sequences, query = ids.shape[:2]
    if mask is None:
        return _ones(ids, sequences, past + query)
    if not isinstance(mask, torch.Tensor) or mask.shape != (sequences, past + query):
        found = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise unfit(
            f"{name} is {found}, for {sequences} sequences of {past} cached and {query} new tokens",
            f"Give one of {[sequences, past + query]}.",
        )
    return mask


def _no_features(like: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Return what stands for no images: no token is one, and there are no features."""
    sizes = embedded.shape[:2] if like.dtype == torch.bool else (0, embedded.shape[2])
    return torch.zeros(sizes, dtype=like.dtype, device=embedded.device)


def _ones(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.long, device=like.device)
