"""Generates on several devices of one process, with the ``generate`` of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.generation.decoder_on_devices import DecoderOnDevices
from splitkit.runtime.generation.model_caches import put_into, require_plain, taken_from

_TAKEN = {"self", "input_ids", "attention_mask", "position_ids", "past_key_values"}
_READ_HERE = {"return_dict", "use_cache", "logits_to_keep", "cache_position"}


def generator(model: Any, split: Split, devices: Devices = None) -> Any:
    """Return a model like the given one whose steps run on the parts of a split, each on its device.

    ::

        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
        generator = sk.generator(model, split, ["cuda:0", "cuda:1"])
        tokens = generator.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=20)

    ``generate`` is transformers' own, with greedy search, sampling, beam search, logits processors, stopping criteria,
    streamers and ``prefill_chunk_size``. Prompts may be on any device, and are padded on the left. The keys and values
    of a layer stay on the device of its part. They are never copied to another one: they grow in a ``DynamicCache``
    whose layers are on several devices, which you may keep and pass on as ``past_key_values``.

    Parameters and buffers are moved, as by `splitkit.runtime.to_devices`; the given model shares them, so that only the
    result can be called afterwards.

    Args:
        model: the model that was captured, for its configuration and its ``generate``; its weights may be on ``meta`` if
            the split has some.
        split: of the graph of `splitkit.capture_decoder`.
        devices: part -> device, or devices in the order of the parts, or one for all; by default the devices in the
            plan.

    Raises:
        PipelineError: SK801 for a split that is not of a decoder, or of which a cache would cross a border; SK807 and
            SK808 as `splitkit.runtime.to_devices`. A call raises SK802 for arguments that the graph does not take: the
            message names them.
    """
    kind = type(model)
    if not hasattr(model, "generate") or not hasattr(model, "prepare_inputs_for_generation"):
        raise PipelineError("SK801", f"{kind.__name__} has no generate", "Give a model of transformers that generates.")
    decoder = DecoderOnDevices(split, devices)

    signature = inspect.signature(kind.forward)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        more = given.pop("kwargs", {})
        return _step(decoder, {**given, **more})

    first = next(iter(decoder.devices.values()))
    made = type(f"Split{kind.__name__}", (kind,), {"forward": forward, "device": property(lambda self: first)})
    made.__module__ = kind.__module__
    new = made.__new__(made)
    new.__dict__.update(vars(model))
    new.generation_config = copy.deepcopy(model.generation_config)
    return new


def _step(decoder: DecoderOnDevices, given: dict[str, Any]) -> Any:
    """Run one call of ``forward``, with its arguments by name."""
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    ids, cache = given.get("input_ids"), given.get("past_key_values")
    _require_known(given, decoder)
    if cache is None:
        cache = DynamicCache()
    require_plain(cache)
    sequences, query = ids.shape
    past = cache.get_seq_length()
    inputs = {
        "input_ids": ids,
        "attention_mask": _mask(given.get("attention_mask"), ids, past),
        "position_ids": given.get("position_ids"),
    }
    if inputs["position_ids"] is None:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, past:]
    logits, tensors = decoder.step(inputs, taken_from(cache, decoder, sequences))
    put_into(cache, decoder.caches, tensors)
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache if given.get("use_cache") is not False else None)


def _require_known(given: dict[str, Any], decoder: DecoderOnDevices) -> None:
    """Refuse arguments that the graph has no input for, and what it does not compute.

    Raises:
        PipelineError: SK802.
    """
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        raise _bad("there are no input_ids", "Give token ids, [sequences, tokens]; the graph takes no embeddings.")
    for name, value in given.items():
        if name not in _TAKEN | _READ_HERE and value is not None and value is not False:
            raise _bad(f"the graph has no input {name}", f"Call it without {name}; it was captured without.")
    if given.get("return_dict") is False:
        raise _bad("return_dict is False", "Read logits and past_key_values by name.")
    keep = given.get("logits_to_keep", 0)
    if "logits_to_keep" in decoder.inputs and ids.shape[1] > 1 and keep != 1:
        wanted = "all" if isinstance(keep, int) and not keep else str(keep)
        raise _bad(
            f"the graph computes the logits of the last token, not {wanted}",
            "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has.",
        )


def _mask(mask: torch.Tensor | None, ids: torch.Tensor, past: int) -> torch.Tensor:
    sequences, query = ids.shape
    if mask is None:
        return ids.new_ones(sequences, past + query)
    if mask.shape != (sequences, past + query):
        raise _bad(
            f"attention_mask is {list(mask.shape)}, for {sequences} sequences of {past} cached and {query} new tokens",
            f"Give one of {[sequences, past + query]}.",
        )
    return mask


def _bad(reason: str, remedy: str) -> PipelineError:
    return PipelineError("SK802", reason, remedy)
