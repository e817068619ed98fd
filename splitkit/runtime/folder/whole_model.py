"""Gathers the model that a pipeline trains on rank 0, one tensor at a time: in memory, or as a file of safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from splitkit import files
from splitkit.errors import PipelineError
from splitkit.graph.shards import full_tensor
from splitkit.graph.storages import names_of, parameters_and_buffers
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.folder.tensorfiles import dtype_name, write_tensors
from splitkit.runtime.ranks.faults import beating
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.planned_chain import captured_model
from splitkit.runtime.ranks.rank_agreement import from_every, from_first


@dataclass(frozen=True)
class _Entry:
    """A tensor of the model.

    Attributes:
        names: its names in the unsplit model; a tied weight has several.
        held: the name under which the ranks have it.
        source: the first rank that has it.
        like: a tensor on ``meta`` of its shape and dtype.
    """

    names: tuple[str, ...]
    held: str
    source: int
    like: torch.Tensor


def full_state_dict(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsplit model on rank 0, on the CPU, and an empty one elsewhere.

    All ranks must call it. Tensors are sent one at a time. A tied weight is one tensor under all of its names.
    """
    whole: dict[str, torch.Tensor] = {}
    for entry, tensor in _sent(pipe, _entries(pipe)):
        # A tensor of this rank is copied, so that the next step of the optimizer leaves the result as it is.
        copy = tensor.cpu() if entry.source else tensor.to("cpu", copy=True)
        whole |= dict.fromkeys(entry.names, copy)
    order = [name for name in pipe.split.module.state_dict() if name in whole]
    if (model := captured_model(pipe.split)) is not None:
        order = list(model.state_dict())
    return {name: whole[name] for name in dict.fromkeys([*order, *whole]) if name in whole}


def save_safetensors(pipe: Pipeline, path: str | os.PathLike[str]) -> None:
    """Write the parameters and persistent buffers of the unsplit model to a safetensors file, on rank 0.

    All ranks must call it. Rank 0 holds one tensor at a time. A tied weight is written once, under the first of its
    names; ``safetensors.torch.load_model`` and `open_stages` know the others.

    Raises:
        FileError: SK504 on every rank if the file cannot be created, SK506 for a tensor that the format cannot hold.
    """
    entries, place = _entries(pipe), Path(path)
    described = {entry.names[0]: entry.like for entry in entries}

    def create() -> None:
        for name, like in described.items():
            dtype_name(name, like)
        try:
            place.touch()
        except OSError as error:
            raise files.refusal(place, error) from error

    from_first(create, pipe.group)
    sent = (tensor for _, tensor in _sent(pipe, entries))
    if pipe.rank:
        for _ in sent:
            pass
        return
    try:
        write_tensors(place, described, sent)
    except OSError as error:
        raise files.refusal(place, error) from error


def save_pretrained(pipe: Pipeline, model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write the trained weights like transformers' ``model.save_pretrained``, on rank 0.

    All ranks must call it. ``from_pretrained(folder)`` then loads the trained model.

    Args:
        pipe: the pipeline.
        model: the model that was captured; its own weights are not read.
        folder: the folder, created if necessary.
        options: further arguments of ``model.save_pretrained``.

    Raises:
        PipelineError: SK802 on every rank if the model has no ``save_pretrained``, or its names differ from
            the captured names.
    """

    def require_model() -> None:
        if not callable(getattr(model, "save_pretrained", None)):
            what = f"{type(model).__name__} has no save_pretrained"
            raise PipelineError("SK802", what, "Use splitkit.runtime.folder.whole_model.save_safetensors(pipe, path).")
        if lost := sorted(set(model.state_dict()) ^ set(names)):
            raise PipelineError(
                "SK802",
                f"the model and the graph that was captured do not both have {lost[0]}",
                "Pass the model that was captured, not a part of it or a module around it.",
                lost,
            )

    names = [name for entry in _entries(pipe) for name in entry.names]
    from_first(require_model, pipe.group)
    state = full_state_dict(pipe)
    if pipe.rank == 0:
        model.save_pretrained(folder, state_dict=state, **options)


def _entries(pipe: Pipeline) -> list[_Entry]:
    """Return the tensors of the model, the same on all ranks."""
    own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pipe.state_dict().items()}
    with beating(dist.get_rank(), dist.get_process_group_ranks(pipe.group), "for all ranks to gather the weights"):
        every = from_every(own, pipe.group)
    names_of, seen, found = _ties(pipe), set[str](), list[_Entry]()
    for source, held in enumerate(every):
        for name, (shape, dtype) in held.items():
            names = names_of.get(name, (name,))
            if seen.isdisjoint(names):
                found.append(_Entry(names, name, source, torch.empty(shape, dtype=dtype, device="meta")))
                seen.update(names)
    return found


def _ties(pipe: Pipeline) -> dict[str, tuple[str, ...]]:
    """Return name of a tensor -> all of its names in the state dict of the unsplit model."""
    split = pipe.split
    if isinstance(split, StageFolder):
        return {name: tuple(names) for names, _ in split.named for name in names}
    model = captured_model(split)
    assert model is not None, "only stages of a folder have none"
    saved = model.state_dict()
    groups = names_of({name: tensor for name, tensor in parameters_and_buffers(model).items() if name in saved})
    return {name: tuple(names) for names in groups.values() for name in names}


def _sent(pipe: Pipeline, entries: list[_Entry]) -> Iterator[tuple[_Entry, torch.Tensor]]:
    """Yield the tensors on rank 0, and nothing elsewhere; each is sent when the one before has been used."""
    own = pipe.state_dict()
    row_of = {rank: row for row in pipe.replicas.ranks for rank in row}
    for entry in entries:
        like, source = entry.like, entry.source
        held = None
        if pipe.rank in row_of[source] and entry.held in own:
            # All replicas of the stage take part where it is sharded.
            held = full_tensor(own[entry.held])
        if pipe.rank == source and source and like.numel() and held is not None:
            dist.send(held.contiguous(), group=pipe.group, group_dst=0)
        if pipe.rank == 0:
            if source:
                held = torch.empty(like.shape, dtype=like.dtype, device=pipe.device)
                if like.numel():
                    dist.recv(held, group=pipe.group, group_src=source)
            assert held is not None
            yield entry, held
