"""Reads weights by name from safetensors files in Hugging Face's layout, or from torch's distributed checkpoints.

Only the tensors that are filled are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitkit.errors import FileError
from splitkit.json_fields import JsonField
from splitkit.plans.plan_file import read_json
from splitkit.runtime.folder.checkpoint_reader import METADATA, Look, look_text, read_stored, stored_looks
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
    saved: Mapping[str, Look]

    @classmethod
    def at(cls, place: str | os.PathLike[str]) -> Weights:
        """Open a ``.safetensors`` file, a folder with ``model.safetensors`` or its index, or a checkpoint's folder.

        No code is run from any of them.

        Raises:
            FileError: SK504 if there is none of these, SK505 if it is damaged.
        """
        path = Path(place)
        if (path / INDEX).is_file():
            return cls(path, _indexed(path), {})
        single = path if path.is_file() else path / SINGLE
        if single.is_file():
            return cls(path, dict.fromkeys(stored_tensors(single), single), {})
        if (path / METADATA).is_file():
            return cls(path, {}, stored_looks(path))
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
            read_stored(self.place, dict(found))

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
            theirs, own = look_text(shape, dtype), look_text(tensor.shape, tensor.dtype)
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
