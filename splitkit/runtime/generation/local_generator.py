"""Generates on several devices of one process, with the ``generate`` of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from splitkit._torch import attributes_of
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import runs_outside
from splitkit.graph.storages import attribute, parameters_and_buffers
from splitkit.runtime.devices.accelerators import same_device
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.devices.move_tensors import move_tensors
from splitkit.runtime.generation.model_step import ModelStep


def generator(model: Any, split: Split, devices: Devices = None) -> Any:
    """Return a model like the given one whose steps run on the parts of a split, each on its device.

    ::

        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
        generator = sk.generator(model, split, ["cuda:0", "cuda:1"])
        tokens = generator.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=20)

    ``generate`` is transformers' own, with greedy search, sampling, beam search, logits processors, stopping criteria,
    streamers and ``prefill_chunk_size``. Prompts of a decoder alone may be on any device, and are padded on the left;
    what an encoder or images need is on ``generator.device``. The keys and values
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
    before = parameters_and_buffers(split.flow.root)
    # what load has read
    _share(model, {}, before)
    _require_weights(model, split)
    rest, signature = _unread(model, split), inspect.signature(kind.forward)
    step = ModelStep(model, split, devices)
    _share(model, before, parameters_and_buffers(step.decoder.tensors))
    first = next(iter(step.decoder.devices.values()))
    move_tensors(model, nn.Module(), dict.fromkeys(rest, first))
    _require_there(_runs_whole(model, step), first)

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


def _unread(model: nn.Module, split: Split) -> list[int]:
    """Return the ids of parameters and buffers that no part reads, such as those of an encoder."""
    root = split.flow.root
    nodes = [node for node in split.flow.graph.find_nodes(op="get_attr") if node.users]
    read = {id(attribute(root, str(node.target))) for node in nodes}
    return [id(t) for t in (*model.parameters(), *model.buffers()) if id(t) not in read and not t.is_meta]


def _require_weights(model: nn.Module, split: Split) -> None:
    """Refuse a model on ``meta`` of which an encoder, or what images need, runs whole.

    Raises:
        PipelineError: SK807.
    """
    if not runs_outside(split.flow.root):
        return
    read = {str(node.target) for node in split.flow.graph.find_nodes(op="get_attr") if node.users}
    named: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(tensor), []).extend([name] if tensor.is_meta else [])
    lacking = [names[0] for names in named.values() if names and read.isdisjoint(names)]
    if lacking:
        raise PipelineError(
            "SK807",
            f"{listed(lacking, 2)} are on meta: an encoder, or what images need, runs whole and is in no part",
            "Load the weights first: splitkit.load(split, folder, devices).",
            lacking,
        )


def _share(model: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Let a model hold the tensors of the parts: its own may be on ``meta``, or of a kind that cannot move in place."""
    new = {id(tensor): after[name] for name, tensor in before.items()}
    named = parameters_and_buffers(model)
    new |= {id(tensor): after[name] for name, tensor in named.items() if name in after and tensor.is_meta}
    for module in model.modules():
        for table in attributes_of(module)[:2]:
            held: dict[str, Any] = table
            held.update({name: new.get(id(tensor), tensor) for name, tensor in held.items()})


def _runs_whole(model: Any, step: ModelStep) -> nn.Module:
    """Return the module that may share a weight with a part, and that runs on the first device."""
    if getattr(model.config, "is_encoder_decoder", False):
        return cast(nn.Module, model.get_encoder())
    return cast(nn.Module, model.get_input_embeddings()) if "inputs_embeds" in step.decoder.inputs else nn.Module()


def _require_there(module: nn.Module, device: torch.device) -> None:
    """Refuse a module of which a part on another device has a weight.

    Raises:
        PipelineError: SK808.
    """
    for name, tensor in module.named_parameters():
        if not tensor.is_meta and not same_device(tensor.device, device):
            raise PipelineError(
                "SK808",
                f"{name} is read on {device} by what runs whole, and by a part on {tensor.device}",
                "Untie the weight, or let the first part read it.",
                [name],
            )
