"""Describes the state of a learning rate scheduler apart from the parameter groups, which differ between ranks.

A scheduler keeps lists with a value for each parameter group. Where they repeat what the groups say themselves, only
that is saved, so that the state fits optimizers with other numbers of groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from splitkit.engine.serialization.json_fields import JsonField
from splitkit.errors import FileError, PipelineError
from splitkit.runtime.folder.state_data import decode_state, encode_state

_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr", "lr_lambdas": ""}
"""Lists with a value for each group, and the option that has this value; lambdas are saved as ``None``."""

_MARK = "of each group"


def encode_scheduler(scheduler: Any, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the class and the state of a scheduler as JSON-ready data.

    Args:
        scheduler: has ``state_dict`` and ``load_state_dict``.
        optimizer: its optimizer.
        tensors: name -> tensor; the tensors of the state are added.

    Raises:
        FileError: SK506 for what is not data.
    """
    state = _marked(scheduler.state_dict(), optimizer)
    return {"class": type(scheduler).__name__, "state": encode_state(state, "scheduler", tensors)}


def merge_schedulers(every: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the description that all ranks have.

    Raises:
        PipelineError: SK804 if ranks differ; names the first field that does.
    """
    for rank, other in enumerate(every):
        if other != every[0]:
            where = _difference(every[0], other)
            raise PipelineError(
                "SK804",
                f"the scheduler of rank {rank} differs from rank 0's in {where}",
                "Step all schedulers in the same way; one that reads the loss needs the same loss on every rank.",
            )
    return every[0]


def load_scheduler(data: JsonField, scheduler: Any, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Set the state of a scheduler, after its optimizer's.

    Raises:
        FileError: SK505 for damaged data, SK507 if it is the state of another scheduler.
    """
    kind = data["class"].text()
    if kind != type(scheduler).__name__:
        raise FileError(
            "SK507",
            f"the checkpoint has the state of a {kind}, but this scheduler is a {type(scheduler).__name__}",
            "Create the scheduler as in the run that wrote the checkpoint.",
        )
    scheduler.load_state_dict(_unmarked(decode_state(data["state"], tensors), optimizer))


def _values(option: str, optimizer: Optimizer) -> list[Any]:
    found = [group.get(option) if option else None for group in optimizer.param_groups]
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in found]


def _marked(value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, list):
        return [_marked(item, optimizer) for item in value]
    if type(value) is not dict:
        return value
    found = {key: _marked(item, optimizer) for key, item in value.items()}
    for key, option in _OF_GROUPS.items():
        same = _values(option, optimizer)
        # a scheduler that waits in a SequentialLR shows the rate that it set last, and reads it nowhere
        if key in value and (value[key] == same or (key == "_last_lr" and len(value[key]) == len(same))):
            found[key] = {_MARK: option}
    return found


def _unmarked(value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, list):
        return [_unmarked(item, optimizer) for item in value]
    if type(value) is not dict:
        return value
    if value.keys() == {_MARK}:
        return _values(str(value[_MARK]), optimizer)
    return {key: _unmarked(item, optimizer) for key, item in value.items()}


def _difference(one: Any, other: Any) -> str:
    if one is None or other is None or one["class"] != other["class"]:
        return "its class"
    rows, others = one["state"]["dict"], other["state"]["dict"]
    return next((str(row[0]) for row in rows if row not in others), "its fields")
