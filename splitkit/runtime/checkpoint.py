"""A pipeline and its optimizer on disk, by the names of the unsplit model: any other number of stages reads it.

The files are those of ``torch.distributed.checkpoint``; each rank writes what it holds, a shared parameter once.
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
from splitkit.runtime.pipeline import Pipeline
from splitkit.runtime.weights import quiet

_PREFIX = "step-"


def save(folder: Path, pipe: Pipeline, optimizer: Optimizer) -> Path:
    """Write the state after the pipeline's last step; all ranks call it.

    Returns:
        The folder of this step. It is complete once ``.metadata`` is in it, which torch writes last.
    """
    place = folder / f"{_PREFIX}{pipe.steps}"
    with quiet():
        write(_state(pipe.named_tensors(), optimizer), checkpoint_id=place, process_group=pipe.group)
    return place


def load_last(
    folder: Path, pipe: Pipeline, optimizer: Optimizer, whole: tuple[nn.Module, Optimizer] | None = None
) -> int:
    """Take the state of the last complete step in a folder; all ranks call it.

    Args:
        folder: where `save` wrote.
        pipe: takes the model, and how many steps were done.
        optimizer: of the pipeline's parameters.
        whole: the unsplit model and its optimizer, which take theirs from it too; of this rank alone.

    Returns:
        How many steps were done, which the pipeline goes on from: 0 where there is none.

    Raises:
        FileError: SK504 where it cannot be read into this pipeline.
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
    with quiet():
        load(_state(named, optimizer), checkpoint_id=place, **how)


def _known(place: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model that a checkpoint has; it knows one name of what has several."""
    known = FileSystemReader(place).read_metadata().state_dict_metadata
    return {name: tensor for name, tensor in parameters_and_buffers(model).items() if f"model.{name}" in known}


def _state(named: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Tensors that alias those of a model and its optimizer."""
    state = {f"model.{name}": tensor.detach() for name, tensor in named.items()}
    for name, tensor in named.items():
        held = optimizer.state.get(tensor, {}) if isinstance(tensor, nn.Parameter) else {}
        state |= {f"optimizer.{name}.{key}": value for key, value in held.items() if isinstance(value, torch.Tensor)}
    return state


def _begin(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, without a change to the parameters."""
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
