"""Runs a call of a model's ``forward`` as a step of a split decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.caches import ENCODER_CACHES
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.encoder_caches import EncoderCaches
from splitkit.runtime.generation.model_caches import put_into, require_plain, taken_from

_HIDDEN = "encoder_outputs_last_hidden_state"
_READ_HERE = {"self", "past_key_values", "return_dict", "use_cache", "logits_to_keep", "cache_position"}


class ModelStep:
    """What takes the arguments of a model's ``forward``, and returns its outputs.

    Attributes:
        decoder: the parts on their devices.
    """

    def __init__(self, split: Split, devices: Devices = None) -> None:
        self.decoder = DecoderOnDevices(split, devices)
        has_encoder = ENCODER_CACHES in split.flow.root.meta
        self._encoder = EncoderCaches(split, self.decoder.caches, self.decoder.devices) if has_encoder else None
        before = "decoder_" if self._encoder else ""
        self._tokens, self._mask, self._positions = (
            f"{before}{name}" for name in ("input_ids", "attention_mask", "position_ids")
        )
        self._taken = {self._tokens, self._mask, self._positions, *self.decoder.inputs}
        self._taken |= {"encoder_outputs"} if self._encoder else set()

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Run one call, with the arguments by name.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take.
        """
        self._require_known(given)
        ids: torch.Tensor = given[self._tokens]
        cache = given.get("past_key_values")
        cache = self._empty_cache() if cache is None else cache
        require_plain(cache)
        past = cache.get_seq_length()
        mask = _mask(self._mask, given.get(self._mask), ids, past)
        positions = given.get(self._positions)
        if positions is None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        inputs: dict[str, Any] = {self._tokens: ids, self._mask: mask, self._positions: positions}
        hidden = given["encoder_outputs"][0] if self._encoder else None
        if hidden is not None:
            seen = given.get("attention_mask")
            inputs[_HIDDEN] = hidden
            inputs["attention_mask"] = ids.new_ones(hidden.shape[:2]) if seen is None else seen
        tensors = taken_from(cache, self.decoder, ids.shape[0], lambda: self._encoded(inputs))
        logits, tensors = self.decoder.step(inputs, tensors)
        put_into(cache, self.decoder.caches, tensors)
        return _output(logits, cache if given.get("use_cache") is not False else None, hidden)

    def _encoded(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        assert self._encoder is not None
        return self._encoder.compute(inputs)

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self._encoder else DynamicCache()

    def _require_known(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that the graph has no input for, and what it does not compute."""
        ids = given.get(self._tokens)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
            raise _bad(f"there are no {self._tokens}", "Give token ids, [sequences, tokens]; it takes no embeddings.")
        if self._encoder and given.get("encoder_outputs") is None:
            raise _bad("there are no encoder_outputs", "Give those of model.get_encoder(), as generate does.")
        for name, value in given.items():
            if name not in self._taken | _READ_HERE and value is not None and value is not False:
                raise _bad(f"the graph has no input {name}", f"Call it without {name}; it was captured without.")
        if given.get("return_dict") is False:
            raise _bad("return_dict is False", "Read logits and past_key_values by name.")
        keep = given.get("logits_to_keep", 0)
        if "logits_to_keep" in self.decoder.inputs and ids.shape[1] > 1 and keep != 1:
            wanted = "all" if isinstance(keep, int) and not keep else str(keep)
            raise _bad(
                f"the graph computes the logits of the last token, not {wanted}",
                "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has.",
            )


def _output(logits: torch.Tensor, cache: Any, hidden: torch.Tensor | None) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

    if hidden is None:
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)  # type: ignore[arg-type]
    return Seq2SeqLMOutput(logits=logits, past_key_values=cache, encoder_last_hidden_state=hidden)  # type: ignore[arg-type]


def _mask(name: str, mask: torch.Tensor | None, ids: torch.Tensor, past: int) -> torch.Tensor:
    sequences, query = ids.shape
    if mask is None:
        return ids.new_ones(sequences, past + query)
    if mask.shape != (sequences, past + query):
        raise _bad(
            f"{name} is {list(mask.shape)}, for {sequences} sequences of {past} cached and {query} new tokens",
            f"Give one of {[sequences, past + query]}.",
        )
    return mask


def _bad(reason: str, remedy: str) -> PipelineError:
    return PipelineError("SK802", reason, remedy)
