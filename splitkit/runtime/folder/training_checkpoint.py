"""Saves and loads the state of a pipeline and its optimizer, for pipelines with any number of stages.

Names are those of the unsplit model. The files are those of ``torch.distributed.checkpoint``; each rank writes the
tensors that it holds, and a shared parameter is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer

from splitkit.errors import FileError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.folder.checkpoint_weights import without_planner_log
from splitkit.runtime.ranks.pipeline import Pipeline

_PREFIX = "step-"


def save_checkpoint(folder: Path, pipe: Pipeline, optimizer: Optimizer) -> Path:
    """Write the state after the pipeline's last step. All ranks must call it.

    Returns:
        The folder of this step. It is complete once it contains ``.metadata``, which torch writes last.
    """
    place = folder / f"{_PREFIX}{pipe.steps}"
    with without_planner_log():
        write(_state(pipe.named_tensors(), optimizer), checkpoint_id=place, process_group=pipe.group)
    return place


def load_last_checkpoint(
    folder: Path, pipe: Pipeline, optimizer: Optimizer, whole: tuple[nn.Module, Optimizer] | None = None
) -> int:
    """Load the state of the last complete step in a folder. All ranks must call it.

    Args:
        folder: the folder to which `save_checkpoint` wrote.
        pipe: the pipeline whose parameters, buffers and number of steps are set.
        optimizer: the optimizer of the pipeline's parameters.
        whole: the unsplit model and its optimizer, to be loaded as well; on this rank only.

    Returns:
        The number of steps done, after which the pipeline continues; 0 if there is no checkpoint.

    Raises:
        FileError: SK504 if the checkpoint cannot be read into this pipeline.
    """
    found: list[Any] = [_last(folder)]
    dist.broadcast_object_list(found, group=pipe.group, group_src=0)
    step = int(found[0])
    if not step:
        return 0
    place = folder / f"{_PREFIX}{step}"
    try:
        _read(place, pipe.named_tensors(), optimizer, process_group=pipe.group)
        if whole is not None:
            model, other = whole
            _read(place, _known(place, model), other, no_dist=True)
    except Exception as error:
        reason = f"{place} does not fit this model: {error}"
        raise FileError("SK504", reason[:600], "Name the folder of a checkpoint of the same model.") from error
    pipe.steps = step
    return step


def _last(folder: Path) -> int:
    done = [p.name.removeprefix(_PREFIX) for p in folder.glob(f"{_PREFIX}*") if (p / ".metadata").exists()]
    return max((int(number) for number in done if number.isdigit()), default=0)


def _read(place: Path, named: Mapping[str, torch.Tensor], optimizer: Optimizer, **how: Any) -> None:
    _begin(optimizer)
    with without_planner_log():
        load(_state(named, optimizer), checkpoint_id=place, **how)


def _known(place: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors that a checkpoint has. It has one name of each tensor with several."""
    known = FileSystemReader(place).read_metadata().state_dict_metadata
    return {name: tensor for name, tensor in parameters_and_buffers(model).items() if f"model.{name}" in known}


def _state(named: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return a state dict whose tensors alias those of a model and its optimizer."""
    state = {f"model.{name}": tensor.detach() for name, tensor in named.items()}
    for name, tensor in named.items():
        held = optimizer.state.get(tensor, {}) if isinstance(tensor, nn.Parameter) else {}
        state |= {f"optimizer.{name}.{key}": value for key, value in held.items() if isinstance(value, torch.Tensor)}
    return state


def _begin(optimizer: Optimizer) -> None:
    """Let the optimizer create its state, by a step with learning rate 0 that changes no parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, grad in before.items():
        parameter.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
