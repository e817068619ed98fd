"""Generates on several devices of one process, with the ``generate`` of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime.devices.accelerators import same_device
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.generation.model_step import ModelStep


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

    The encoder of a model such as T5 runs whole on the device of the first part.

    Parameters and buffers are moved, as by `splitkit.runtime.to_devices`; the given model shares them, so that only the
    result can be called afterwards.

    Args:
        model: the model that was captured, for its configuration and its ``generate``; its weights may be on ``meta``
            if the split has some.
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
    step, signature = ModelStep(split, devices), inspect.signature(kind.forward)
    first = next(iter(step.decoder.devices.values()))
    if getattr(model.config, "is_encoder_decoder", False):
        _move_encoder(model.get_encoder(), step.decoder.tensors, first)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        more = given.pop("kwargs", {})
        return step({**given, **more})

    own = {"forward": forward, "device": property(lambda self: first), "__module__": kind.__module__}
    made: Any = type(f"Split{kind.__name__}", (kind,), own)
    new = made.__new__(made)
    new.__dict__.update(vars(model))
    new.generation_config = copy.deepcopy(model.generation_config)
    return new


def _move_encoder(encoder: nn.Module, held: nn.Module, device: torch.device) -> None:
    """Move an encoder, which runs whole, to a device.

    Raises:
        PipelineError: SK808 if it shares a tensor with a part on another device.
    """
    parts = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
    for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
        if id(tensor) in parts and not same_device(tensor.device, device):
            raise PipelineError(
                "SK808",
                f"{name} of the encoder, which runs on {device}, is on {tensor.device} with the part that reads it",
                "Let the first part read it.",
                [name],
            )
        tensor.data = tensor.data.to(device)
