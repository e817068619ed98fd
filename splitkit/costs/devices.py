"""Devices as a roofline sees them: peak FLOP/s by dtype, memory bandwidth, memory, and the time to start a kernel."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from splitkit.checks import is_number, is_whole, plain_name, shown
from splitkit.errors import CostError, FileError, nearest
from splitkit.units import read_size

# Where a device has no peak of its own for a dtype: the dtype that does its work, and how many operations of that one
# make one. A product of complex numbers is four real ones with as many sums.
_INSTEAD: Mapping[str, tuple[str, float]] = {
    "tf32": ("float32", 1),
    "bfloat16": ("float16", 1),
    "float16": ("float32", 1),
    "float8": ("bfloat16", 1),
    "int8": ("float32", 1),
    "float64": ("float32", 2),
    "complex32": ("float16", 4),
    "complex64": ("float32", 4),
    "complex128": ("float64", 4),
}
_LEAST, _MOST, _MOST_LAUNCH = 1e-6, 1e30, 1e12
"""Figures beyond these are slips, and give prices that no longer add up."""
_PEAKS = frozenset(_INSTEAD) | {"float32"}


@dataclass(frozen=True)
class Device:
    """What a data sheet says.

    Attributes:
        name: what it is called.
        peak: FLOP/s of dense products, by name of dtype: ``"float32"`` (needed), ``"tf32"``, ``"bfloat16"``,
            ``"float16"``, ``"float8"``, ``"int8"``, ``"float64"``, or a complex one. For one that is not there, that of
            the dtype in which the device would do it.
        bandwidth: how fast its memory is, in bytes a second.
        memory: bytes; a text (``"80GiB"``) becomes the number.
        launch: seconds to start a kernel.
        source: where the figures come from.

    Raises:
        CostError: SK320 for a field of another type, a figure that is not positive, or a dtype that has no peak.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int
    launch: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        memory: object = self.memory
        if isinstance(memory, str) and (known := read_size(memory)) is not None:
            object.__setattr__(self, "memory", known)
        _check(self)
        object.__setattr__(self, "peak", dict(self.peak))

    def rate(self, dtype: torch.dtype | str) -> float:
        """FLOP/s of products of this dtype; ``"tf32"`` is float32 that torch may round."""
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else "int8" if name in ("uint8", "qint8", "quint8") else name
        cost = 1.0
        while name not in self.peak:
            name, more = _INSTEAD.get(name, ("float32", 1))  # other integers and bool: as many as in float32
            cost *= more
        return self.peak[name] / cost


def _check(device: Device) -> None:
    where = f"device {device.name!r}"
    if not isinstance(device.name, str) or not device.name:
        raise CostError("SK320", f"{where}: name is no text", "Give it a name.")
    if not isinstance(device.source, str):
        raise CostError("SK320", f"{where}: source is no text", "Say where the figures come from.")
    if not isinstance(device.peak, Mapping) or "float32" not in device.peak:
        raise CostError("SK320", f"{where}: peak has no float32", 'Give FLOP/s by dtype: {"float32": 19.5e12}.')
    for dtype, peak in device.peak.items():
        if dtype not in _PEAKS:
            raise CostError("SK320", f"{where}: peak has an unknown dtype {dtype!r}", _nearest(str(dtype), _PEAKS))
        _positive(f"{where}: peak of {dtype}", peak, "FLOP/s")
    _positive(f"{where}: bandwidth", device.bandwidth, "bytes a second")
    _positive(f"{where}: memory", device.memory, "bytes, a whole number", is_whole)
    if not is_number(device.launch) or float(device.launch) > _MOST_LAUNCH:
        text = f"{where}: launch is {shown(device.launch)}"
        raise CostError("SK320", text, f"Give seconds, 0 or more, {_MOST_LAUNCH:.0e} at most.")


def _positive(what: str, value: object, unit: str, fits: Callable[[object], bool] = is_number) -> None:
    if not fits(value) or not _LEAST <= float(value) <= _MOST:  # type: ignore[arg-type]
        within = f"{_LEAST:.0e} to {_MOST:.0e}"
        raise CostError("SK320", f"{what} is {shown(value)}", f"Give a positive number of {unit}, {within}.")


def devices() -> dict[str, Device]:
    """The devices that splitkit knows, by name, such as ``"a100"``; the command `splitkit devices` lists them."""
    return {name: replace(device) for name, device in _known().items()}  # copies: a peak can be changed


@cache
def _known() -> Mapping[str, Device]:
    text = resources.files("splitkit.costs").joinpath("devices.toml").read_text(encoding="utf-8")
    return _parsed("devices.toml", text)


def load_devices(path: str | Path) -> dict[str, Device]:
    """The devices that a TOML file describes, by name, one table a device::

        [mine]
        peak = { float32 = 40e12, bfloat16 = 160e12 }    # FLOP/s
        bandwidth = 900e9                                # bytes a second
        memory = 48_000_000_000                          # bytes
        launch = 4e-6                                    # seconds, 0 if left out
        source = "its data sheet"

    ``roofline(gm, load_devices("mine.toml")["mine"])`` then uses it.

    Raises:
        FileError: SK504 if the file cannot be read.
        CostError: SK320 if it is no TOML, a field is missing, unknown or of another type; names the device.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("SK504", f"{path} cannot be read: {error}", "Give the path of a TOML file.") from error
    return _parsed(str(path), text)


def _parsed(where: str, text: str) -> dict[str, Device]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError("SK320", f"{where} is no TOML: {error}", "One table a device; see load_devices.") from error
    return {name: device_of(where, name, table) for name, table in tables.items()}


def device_of(where: str, name: str, table: object) -> Device:
    """The device that a table of a file describes.

    Args:
        where: the file, for errors.
        name: the key of the device's table in the file.
        table: its fields.

    Raises:
        CostError: SK320 if a field is missing, unknown or of another type.
    """
    if not isinstance(table, dict):
        raise CostError("SK320", f"{where}: {name} is no table", f"Write [{name}] above the fields of a device.")
    known = [f.name for f in fields(Device) if f.name != "name"]
    if unknown := [key for key in table if key not in known]:
        raise CostError("SK320", f"{where}: {name} has an unknown field {unknown[0]!r}", _nearest(unknown[0], known))
    needed = ("peak", "bandwidth", "memory")
    if absent := [key for key in needed if key not in table]:
        raise CostError("SK320", f"{where}: {name} has no {absent[0]}", f"A device needs {', '.join(needed)}.")
    try:
        return Device(name, **table)
    except CostError as error:
        raise CostError(error.code, f"{where}: {error.reason}", error.remedy) from error


def find_device(device: str | Device) -> Device:
    """A device itself, or the known one of that name, whatever its case, hyphens and spaces.

    Raises:
        CostError: SK321 if there is none.
    """
    if isinstance(device, Device):
        return device
    by_name = {plain_name(name): known for name, known in _known().items()}
    if not isinstance(device, str) or plain_name(device) not in by_name:
        raise CostError(
            "SK321",
            f"no device is called {device!r}",
            nearest(
                str(device),
                _known(),
                f"Known are {', '.join(_known())}; describe yours with Device(...) or in a file for load_devices.",
            ),
        )
    return replace(by_name[plain_name(device)])


def _nearest(name: str, known: Any) -> str:
    return nearest(name, sorted(known)) or f"Known are {', '.join(sorted(known))}."
