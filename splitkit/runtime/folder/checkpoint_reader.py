"""Reads tensors from a checkpoint of ``torch.distributed.checkpoint`` without running code from it.

Such a folder describes its tensors in a pickle, ``.metadata``. Only the classes of that description are built from it;
any other class or function in the pickle is refused before it is called.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from splitkit.errors import FileError

METADATA = ".metadata"
Look = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a stored tensor."""

_OF_TORCH = "torch.distributed.checkpoint."
_DESCRIBING = {
    *(
        (f"{_OF_TORCH}metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_OF_TORCH}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows", "")),
}  # fmt: skip
"""The classes in a ``.metadata`` file, besides dtypes (2.11, 2.13, 2.15)."""


def stored_looks(folder: Path) -> dict[str, Look]:
    """Return name -> shape and dtype of the tensors in a checkpoint.

    Raises:
        FileError: SK504 if it cannot be read, or has more in it than a description of tensors.
    """
    with _refusing(folder):
        known = _Reader(folder).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in tensors.items()}


def files_of(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the files in which a checkpoint has tensors of these names.

    Raises:
        FileError: SK504 as `stored_looks`.
    """
    with _refusing(folder):
        places = _Reader(folder).read_metadata().storage_data or {}
    return sorted({info.relative_path for index, info in places.items() if index.fqn in names})


def read_stored(folder: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors from a checkpoint by name; sharded ones get their shard. No other rank takes part.

    Raises:
        FileError: SK507 if it lacks a tensor, or has one of another shape or dtype; SK504 if it cannot be read.
    """
    known = stored_looks(folder)
    for name, tensor in wanted.items():
        own, stored = (tuple(tensor.shape), tensor.dtype), known.get(name)
        if stored != own:
            what = "is not in it" if stored is None else f"is {look_text(*stored)} in it"
            raise FileError(
                "SK507",
                f"{folder} does not fit: {name}, {look_text(*own)}, {what}",
                "Name a checkpoint of the same model and optimizer.",
                [name],
            )
    with _refusing(folder), without_planner_log(), warnings.catch_warnings():
        # torch warns of a load on one rank, which is what this is
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load({name: tensor.detach() for name, tensor in wanted.items()}, storage_reader=_Reader(folder), no_dist=True)


def look_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return ``float32[2, 8]``."""
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


class _Reader(FileSystemReader):
    """Torch's reader, with a description that is read as data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            found = _Describing(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} is a {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"{METADATA} names the file {info.relative_path!r:.100}")
        return found


class _Describing(pickle.Unpickler):
    """Builds the description of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DESCRIBING:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{METADATA} holds {module}.{name}, which describes no tensor")


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Raise SK504 in place of the errors of pickle, of torch and of the file system."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise FileError("SK504", f"cannot read {folder}: {cause_of(error)}", "Name another checkpoint.") from error


def cause_of(error: BaseException) -> str:
    """Return one line that says why torch could not read or write a checkpoint, with the rank if torch names one."""
    where = ""
    if isinstance(error, CheckpointException):
        # torch wraps the errors of all ranks in one, with their tracebacks
        rank = min(error.failures)
        if len(error.failures) > 1 or rank:
            where = f" (rank {rank})"
        error = error.failures[rank][0]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
    return f"{(text or type(error).__name__).splitlines()[0][:300]}{where}"
