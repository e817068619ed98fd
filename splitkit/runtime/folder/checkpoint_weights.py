"""Reads weights by name from safetensors files in Hugging Face's layout, or from torch's distributed checkpoints.

Only the tensors that are filled are in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from splitkit.errors import FileError
from splitkit.json_fields import JsonField
from splitkit.plans.plan_file import read_json
from splitkit.runtime.folder.tensorfiles import stored_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PREFIXES = ("", "model.")
"""Prefixes of names in torch's checkpoints: none, or the prefix that ``splitkit train --checkpoint`` writes."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a file or folder.

    Attributes:
        place: the file or folder.
        files: name -> its safetensors file; empty for a checkpoint of torch.
        saved: name -> shape and dtype in a checkpoint of torch; empty for safetensors.
    """

    place: Path
    files: Mapping[str, Path]
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def at(cls, place: str | os.PathLike[str]) -> Weights:
        """Open a ``.safetensors`` file, a folder with ``model.safetensors`` or its index, or a checkpoint's folder.

        Torch unpickles the metadata of a ``torch.distributed.checkpoint``: read only checkpoints that you trust.

        Raises:
            FileError: SK504 if there is none of these, SK505 if it is damaged.
        """
        path = Path(place)
        if (path / INDEX).is_file():
            return cls(path, _indexed(path), {})
        single = path if path.is_file() else path / SINGLE
        if single.is_file():
            return cls(path, dict.fromkeys(stored_tensors(single), single), {})
        if (path / ".metadata").is_file():
            return cls(path, {}, _checkpointed(path))
        raise FileError(
            "SK504",
            f"{path} holds no weights",
            f"Name a folder with {SINGLE}, {INDEX} or a checkpoint of torch.distributed.checkpoint.",
        )

    def read(self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]]) -> None:
        """Fill tensors.

        Args:
            wanted: pairs of the names that a tensor may have, and the tensor.

        Raises:
            FileError: SK507 for a missing name, or a tensor of another shape or dtype.
        """
        found = [(self._name(names), tensor) for names, tensor in wanted]
        headers = {
            file: stored_tensors(file) for file in dict.fromkeys(self.files[n] for n, _ in found if n in self.files)
        }
        for name, tensor in found:
            if name in self.files:
                stored = headers[self.files[name]].get(name)
                if stored is None:
                    raise self._absent([name])
                self._require(name, tensor, stored.shape, stored.dtype)
                stored.read_into(tensor)
            else:
                self._require(name, tensor, *self.saved[name])
        if self.saved:
            _from_checkpoint(self.place, dict(found))

    def _name(self, names: Sequence[str]) -> str:
        for prefix in _PREFIXES if self.saved else _PREFIXES[:1]:
            for name in names:
                if prefix + name in self.files or prefix + name in self.saved:
                    return prefix + name
        raise self._absent(names)

    def _absent(self, names: Sequence[str]) -> FileError:
        shown = names[0] + (f" (or {', '.join(names[1:])})" if names[1:] else "")
        return FileError(
            "SK507", f"{self.place} has no {shown}", "Name the weights of the model that was split.", names
        )

    def _require(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if shape != tuple(tensor.shape) or dtype != tensor.dtype:
            theirs, own = (
                f"{d}{list(s)}".removeprefix("torch.") for d, s in ((dtype, shape), (tensor.dtype, tensor.shape))
            )
            raise FileError(
                "SK507",
                f"{name} in {self.place} is {theirs}, and the stage reads {own}",
                "Name the weights of the model that was split, or split it in their dtype.",
                [name],
            )


def _indexed(folder: Path) -> dict[str, Path]:
    index = JsonField(INDEX, "", read_json(folder / INDEX))
    found: dict[str, Path] = {}
    for name, file in index["weight_map"].fields():
        if Path(file.text()).name != file.text():
            raise file.damaged("a file of this folder")
        found[name] = folder / file.text()
    return found


def _checkpointed(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise FileError("SK504", f"cannot read {folder}: {error}"[:600], "Name another checkpoint.") from error
    tensors = {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in tensors.items()}


def _from_checkpoint(folder: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    try:
        with without_planner_log():
            load({name: tensor.detach() for name, tensor in wanted.items()}, checkpoint_id=folder, no_dist=True)
    except Exception as error:
        raise FileError("SK504", f"cannot read {folder}: {error}"[:600], "Name another checkpoint.") from error


def _look(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@contextmanager
def without_planner_log() -> Iterator[None]:
    """Silence torch's log messages about checkpoint planners."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
