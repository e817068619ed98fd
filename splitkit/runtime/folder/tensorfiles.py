"""Reads and writes tensors in the safetensors format: a length, a JSON header, and bytes.

Tensors are read straight into their final memory. The safetensors package maps whole files instead, and the pages that
it has touched count as memory of the process: loading 128 MiB in 8 tensors peaks at 259 MiB with it and at 129 MiB here
(safetensors 0.8, Linux). If the file is reopened for each tensor, the package still holds one tensor more than needed,
and takes 9.5 s rather than 2.2 s for 1,000 tensors of 256 KiB::

    8 bytes: n | n bytes: {"h.0.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
        "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
        "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    }
)  # fmt: skip
"""The format's name of a dtype -> the dtype."""
_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_PIECE = 2**25  # bytes that are read at once for another device or dtype, not tuned
_MOST = 2**28  # bytes of a header; guards against reading a file that is not a safetensors file, not tuned


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the file.
        dtype: the dtype of its elements.
        shape: its shape.
        start: the position of its first byte in the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a tensor of the same shape, on any device; numbers are converted to its dtype.

        A contiguous tensor is filled in pieces of 32 MiB, unless its memory can be filled directly.

        Raises:
            FileError: SK504 if the file cannot be read.
        """
        target, whole = tensor.detach(), tensor.is_contiguous()
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start)
                if whole and target.device.type == "cpu" and target.dtype == self.dtype:
                    _fill(file, _bytes_of(target))
                    return
                pieces: Sequence[torch.Tensor] = (target,)
                if whole:
                    pieces = target.view(-1).split(max(_PIECE // self.dtype.itemsize, 1))  # type: ignore[no-untyped-call]
                for piece in pieces:
                    held = torch.empty(piece.shape, dtype=self.dtype)
                    _fill(file, _bytes_of(held))
                    piece.copy_(held)
        except OSError as error:
            raise FileError("SK504", f"cannot read {self.file}: {error.strerror}", "Name another file.") from error


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Only the header is read.

    Raises:
        FileError: SK504 if the file cannot be read, SK505 if it is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(_MOST, size) else b""
    except OSError as error:
        raise FileError("SK504", f"cannot read {path}: {error.strerror}", "Name another file.") from error
    try:
        data = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise JsonField(path.name, "", header[:40]).damaged("a header of safetensors") from error
    header_field = JsonField(path.name, "", data)
    first = 8 + length
    entries = ((name, entry) for name, entry in header_field.fields() if name != "__metadata__")
    return {name: _stored(path, entry, first, size) for name, entry in entries}


def write_tensors(
    path: Path, described: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor] | None = None
) -> None:
    """Write tensors to a file one at a time, so that the others need not exist yet.

    Args:
        path: the file.
        described: name -> the tensor, or one of the same shape and dtype, perhaps on ``meta``.
        tensors: the tensors, in the same order; by default the described ones.

    Raises:
        FileError: SK506 for a tensor that the format cannot hold.
        OSError: if the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in described.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in described.values() if tensors is None else tensors:
            file.write(_bytes_of(tensor.detach().cpu().contiguous()))


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the format's name of a tensor's dtype.

    Raises:
        FileError: SK506 if the format cannot hold the tensor.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise FileError(
            "SK506",
            f"{name} is {tensor.dtype} in the layout {tensor.layout}, which safetensors files cannot hold",
            f"They hold strided tensors of {', '.join(str(d).removeprefix('torch.') for d in DTYPES.values())}.",
            [name],
        )
    return _NAMES[tensor.dtype]


def _stored(path: Path, entry: JsonField, first: int, size: int) -> StoredTensor:
    dtype, shape = entry["dtype"], entry["shape"].sizes()
    if dtype.text() not in DTYPES:
        raise dtype.damaged(f"one of {', '.join(DTYPES)}")
    offsets = entry["data_offsets"]
    numel = prod(shape)
    match offsets.sizes():
        case [start, stop] if first + stop <= size and stop - start == numel * DTYPES[dtype.text()].itemsize:
            return StoredTensor(path, DTYPES[dtype.text()], tuple(shape), first + start)
        case _:
            raise offsets.damaged(f"the place of {numel} numbers of {dtype.text()} in a file of {size} bytes")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    held: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(held)


def _fill(file: FileIO, wanted: memoryview) -> None:
    while wanted:
        count = file.readinto(wanted)
        if not count:
            raise OSError(0, "it ends too early")
        wanted = wanted[count:]
