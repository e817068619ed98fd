"""Loads the weights of a split from a checkpoint, each tensor straight to the device that reads it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from splitkit.engine.split import Split
from splitkit.errors import FileError, PipelineError
from splitkit.graph.caches import ENCODER_CACHES, runs_outside
from splitkit.graph.storages import attribute, fills_its_range, known_value, parameters_and_buffers
from splitkit.runtime.devices.accelerators import replace_tensors, tables_of
from splitkit.runtime.devices.device_map import Devices, devices_of, places_of
from splitkit.runtime.devices.on_devices import OnDevices, to_devices
from splitkit.runtime.folder.checkpoint_weights import Weights, require_captured


def load(
    split: Split, folder: str | os.PathLike[str], devices: Devices = None, dtype: torch.dtype | None = None
) -> OnDevices:
    """Load the weights of a split from a checkpoint, and put each part on its device.

    If you capture the model on ``meta``, it is never in memory as a whole: each tensor is read directly to the device
    of the part that reads it, one at a time, and nothing is held twice. In a terminal, a bar shows the progress. ::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        split = sk.split(sk.capture(model, **inputs), sk.policies.Stages(2))
        model = sk.load(split, "Llama-3-8B", ["cuda:0", "cuda:1"])

    Files may have any names that transformers can convert: one name of a tied weight is enough, a checkpoint of a base
    model is accepted, and experts that are stored separately are merged. Non-persistent buffers come from the
    capture (see `splitkit.capture`). Everything is checked before the first tensor is read; if loading fails, the split
    is unchanged. Of a decoder, an encoder or what images need is loaded too, onto the device of the first part.

    Args:
        split: from `splitkit.split`. Its tensors are replaced, so that only the result can be called afterwards; the
            captured model is not changed.
        folder: a folder of ``safetensors`` in Hugging Face's layout, one such file, or a folder of
            ``torch.distributed.checkpoint``.
        devices: as in `splitkit.runtime.to_devices`.
        dtype: converts floating-point values of the files to this dtype, which must be the one in which the model was
            captured; by default, a different dtype in the files is refused.

    Raises:
        FileError: SK504, SK505 for files that cannot be read or are damaged; SK507 for missing or unexpected names,
            tensors with a different shape or dtype, and buffers without a value.
        PipelineError: SK807, SK808 as in `splitkit.runtime.to_devices`.
    """
    if not isinstance(split, Split):
        raise PipelineError(
            "SK807",
            f"load was given a {type(split).__name__}, which is not a split",
            "Give it splitkit.split(gm, plan). A rank with stages on disk loads open_stages(stages, weights=folder).",
        )
    parts = devices_of(split, devices)
    places = dict(places_of(split, parts).tensors)
    if runs_outside(split.flow.root):
        first = next(iter(parts.values()))
        places = {id(tensor): first for _, tensor in _named(split)} | places
    weights = Weights.at(folder, convert=dtype is not None)
    held = _held(split, places)
    require_captured(dtype, [slot.old.dtype for slot in held])
    _require_known(split, weights, held)
    made = [(slot, empty_like(slot.old, slot.device)) for slot in held if slot.saved or slot.old.is_meta]
    wanted = [(slot.names, new) for slot, new in made if slot.saved]
    with _bar(sum(new.numel() * new.element_size() for _, new in wanted)) as advance:
        weights.read(wanted, advance)
    for slot, new in made:
        value = None if slot.saved else known_value(split.flow.root, slot.names, slot.old)
        if value is not None:
            with torch.no_grad():
                new.copy_(value)
    return _on_devices(split, devices, [(slot.old, new) for slot, new in made])


@dataclass(frozen=True)
class _Slot:
    """A tensor that the split reads.

    Attributes:
        old: the tensor, perhaps on ``meta``.
        names: its names in the graph that was split; a tied weight has several.
        saved: whether it is in the state dict.
        device: the device of the first part that reads it.
    """

    old: torch.Tensor
    names: Sequence[str]
    saved: bool
    device: torch.device


def _held(split: Split, places: Mapping[int, torch.device]) -> list[_Slot]:
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in _named(split):
        if id(tensor) in places:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    state = split.flow.root.state_dict()
    return [_Slot(t, names, any(n in state for n in names), places[i]) for i, (t, names) in found.items()]


def _named(split: Split) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a split with their names, and the graph's tensors for the caches of an encoder's output."""
    for module in _graphs(split):
        constants = {str(n.target): attribute(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
        for name, tensor in {**parameters_and_buffers(module), **constants}.items():
            if isinstance(tensor, torch.Tensor):
                yield name, tensor


def _graphs(split: Split) -> list[fx.GraphModule]:
    root = split.flow.root
    return [root, root.meta[ENCODER_CACHES]] if ENCODER_CACHES in root.meta else [root]


def _require_known(split: Split, weights: Weights, held: Sequence[_Slot]) -> None:
    """Refuse buffers that nothing has, and names that the model lacks.

    Raises:
        FileError: SK507.
    """
    root = split.flow.root
    for slot in held:
        if slot.old.is_meta and not slot.saved and known_value(root, slot.names, slot.old) is None:
            raise FileError(
                "SK507",
                f"{slot.names[0]} is on meta and in no state dict, so no checkpoint has its values",
                "Give the model its value as a buffer (register_buffer) that is not on meta when you capture it.",
                slot.names,
            )
    known = {*parameters_and_buffers(root), *root.state_dict()}
    groups = [slot.names for slot in held if slot.saved]
    remedy = "Capture the model of this checkpoint, or leave these tensors out of the files."
    weights.require_known(groups, known, remedy)


def empty_like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make an uninitialized tensor on a device with the shape, dtype and dense strides of another."""
    if fills_its_range(old.shape, old.stride()):
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
    else:
        new = torch.empty(old.shape, dtype=old.dtype, device=device)
    return (
        nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new.requires_grad_(old.requires_grad)
    )


def _on_devices(split: Split, devices: Devices, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> OnDevices:
    """Replace tensors of a split and put it on its devices; put the old ones back if that fails."""
    tables = [table for module in (*_graphs(split), split.module) for table in tables_of(module)]
    replace_tensors(tables, {id(old): new for old, new in pairs})
    try:
        return to_devices(split, devices)
    except BaseException:
        replace_tensors(tables, {id(new): old for old, new in pairs})
        raise


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes have been read on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
