"""Finds what of a model is in no stage and runs whole on the first rank, and puts its weights there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from splitkit.engine.split import Split
from splitkit.errors import PipelineError, listed
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.move_tensors import move_tensors, replace_tensor, tables_of
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.folder.load_weights import empty_like
from splitkit.runtime.generation.before_stages import BeforeStages, BehindEmbeddings, BehindEncoder
from splitkit.runtime.generation.decoder import DecoderInputs
from splitkit.runtime.generation.model_tokens import ModelTokens


def before_stages(
    model: Any, split: Split | StageFolder, inputs: DecoderInputs, tokens: ModelTokens, device: torch.device
) -> BeforeStages:
    """Return what prepares the inputs of the first stage, on the device of the first rank.

    Args:
        model: the model that was captured, if it has an encoder or reads images. With a folder of stages, its weights
            are read from the same place as the stages' weights.
        split: the stages.
        inputs: the inputs of a step.
        tokens: the tokens of the model.
        device: the device.

    Raises:
        PipelineError: SK801 without a model that is needed, or if it was not captured; SK802 in training mode; SK804
            with other weights; SK807 for weights on ``meta``.
        FileError: SK507 if the folder has no such weights.
    """
    if not inputs.whole:
        return BeforeStages(tokens, device)
    what = "an encoder's output" if inputs.has_encoder else "embeddings with images among them"
    if model is None:
        raise PipelineError(
            "SK801",
            f"the decoder reads {what}, computed by what is in no stage, and the first rank has no model",
            "Give the model that was captured: sk.serve(split, model=model).",
        )
    if not hasattr(model, "get_encoder") or inputs.has_encoder != bool(model.config.is_encoder_decoder):
        raise PipelineError(
            "SK801",
            f"{type(model).__name__} is not the model that was captured: the decoder reads {what}",
            "Give that model.",
        )
    if model.training:
        raise PipelineError(
            "SK802", "the model is in training mode, where dropout changes tokens", "Call model.eval()."
        )
    held = _whole_tensors(model, inputs)
    held = _read_from(split, model, held) if isinstance(split, StageFolder) else held
    _require_data(held)
    if isinstance(split, Split):
        _require_captured(held, parameters_and_buffers(split.flow.root))
    move_tensors(model, nn.Module(), dict.fromkeys(map(id, held.values()), device))
    kind = BehindEncoder if inputs.has_encoder else BehindEmbeddings
    return kind(model, tokens, device)


def _whole_tensors(model: Any, inputs: DecoderInputs) -> dict[str, torch.Tensor]:
    """Return name -> parameter or buffer of what runs whole; a tied one has several names."""
    every = parameters_and_buffers(model)
    if inputs.has_encoder:
        own = set(map(id, parameters_and_buffers(model.get_encoder()).values()))
    else:
        stages = [model.get_decoder(), model.get_output_embeddings()]
        of_stages = {id(t) for one in stages if one is not None for t in parameters_and_buffers(one).values()}
        own = set(map(id, every.values())) - of_stages
        own |= set(map(id, parameters_and_buffers(model.get_input_embeddings()).values()))
    return {name: tensor for name, tensor in every.items() if id(tensor) in own}


def _read_from(folder: StageFolder, model: nn.Module, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let a model hold the weights that a folder of stages, or the checkpoint it was opened with, has."""
    saved, groups = set(model.state_dict()), dict[int, tuple[torch.Tensor, list[str]]]()
    for name, tensor in held.items():
        if name in saved:
            groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    new = {key: empty_like(old, torch.device("cpu")) for key, (old, _) in groups.items()}
    folder.read([(names, new[key]) for key, (_, names) in groups.items()])
    unsaved = {name: old for name, old in held.items() if name not in saved and old.is_meta}
    filled = folder.read_unsaved({name: empty_like(old, torch.device("cpu")) for name, old in unsaved.items()})
    new |= {id(unsaved[name]): buffer for name, buffer in filled.items()}
    tables = tables_of(model)
    for old in held.values():
        if id(old) in new:
            replace_tensor(tables, old, new[id(old)])
    return {name: new.get(id(tensor), tensor) for name, tensor in held.items()}


def _require_data(held: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors on ``meta``.

    Raises:
        PipelineError: SK807.
    """
    if lacking := [name for name, tensor in held.items() if tensor.is_meta]:
        raise PipelineError(
            "SK807",
            f"{listed(lacking, 2)} are on meta: what is in no stage runs whole on the first rank",
            "Give the first rank a model with its weights, for example by from_pretrained.",
            lacking,
        )


def _require_captured(held: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model with other weights than the one that was captured.

    Raises:
        PipelineError: SK804.
    """
    for name, tensor in held.items():
        other = known.get(name, tensor)
        if other is tensor or other.is_meta:
            continue
        if other.shape != tensor.shape or not torch.equal(other.to(tensor.device), tensor):
            raise PipelineError(
                "SK804",
                f"{name} of the model differs from the one that was captured",
                "Give the model that was captured, or capture this one.",
                [name],
            )
