"""Describe devices for a roofline: peak FLOP/s by dtype, memory bandwidth, memory size and kernel launch time."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitkit.checks import is_number, is_whole, plain_name, shown
from splitkit.errors import CostError, FileError, nearest
from splitkit.units import read_size

if TYPE_CHECKING:
    import torch

# For a dtype without a peak of its own: the dtype that does its work, and how many operations of that dtype make one.
# A complex multiplication with an addition is four real ones.
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
"""Limits of plausible figures: beyond them, sums of prices lose their precision."""
_PEAKS = frozenset(_INSTEAD) | {"float32"}


@dataclass(frozen=True)
class Device:
    """The figures of a device's data sheet.

    Attributes:
        name: name of the device.
        peak: name of dtype -> FLOP/s of dense products: ``"float32"`` (required), ``"tf32"``, ``"bfloat16"``,
            ``"float16"``, ``"float8"``, ``"int8"``, ``"float64"``, or a complex dtype. A missing dtype has the peak of
            the dtype that the device would compute it in.
        bandwidth: bytes per second of its memory.
        memory: bytes of its memory; a text such as ``"80GiB"`` is converted.
        launch: seconds to launch a kernel.
        source: where the figures come from.
        kernels: the kernels that torch runs on it, on which it depends what attention and recurrent layers keep for
            backward: ``"cpu"``, or ``"sm"`` and the compute capability of a CUDA device, as in ``"sm90"``.

    Raises:
        CostError: SK320 for a field of a wrong type, a figure that is not positive, or an unknown dtype.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int
    launch: float = 0.0
    source: str = ""
    kernels: str = "sm80"

    def __post_init__(self) -> None:
        memory: object = self.memory
        if isinstance(memory, str) and (known := read_size(memory)) is not None:
            object.__setattr__(self, "memory", known)
        _check(self)
        object.__setattr__(self, "peak", dict(self.peak))

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, which its kernels say."""
        return self.kernels == "cpu"

    @property
    def expression(self) -> str:
        """The text that stands for this device in the expression of a policy: its name if that is known, or a call."""
        if _known().get(self.name) == self:
            return repr(self.name)
        given = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))
        return f"Device({given})"

    def rate(self, dtype: torch.dtype | str) -> float:
        """Return the FLOP/s of products of this dtype; ``"tf32"`` is float32 that torch may round."""
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else "int8" if name in ("uint8", "qint8", "quint8") else name
        cost = 1.0
        while name not in self.peak:
            name, more = _INSTEAD.get(name, ("float32", 1))  # other integers and bool count as float32
            cost *= more
        return self.peak[name] / cost


def _check(device: Device) -> None:
    where = f"device {device.name!r}"
    if not isinstance(device.name, str) or not device.name:
        raise CostError("SK320", f"{where}: name is not a string", "Give it a name.")
    if not isinstance(device.source, str):
        raise CostError("SK320", f"{where}: source is not a string", "Say where the figures come from.")
    if not isinstance(device.kernels, str) or not re.fullmatch(r"cpu|sm\d{2,3}", device.kernels):
        what = f"{where}: kernels is {shown(device.kernels)}"
        raise CostError("SK320", what, 'Give "cpu", or "sm" and the compute capability of a CUDA device: "sm90".')
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
    """Return name -> device for the devices that splitkit knows, such as ``"a100"``; `splitkit devices` lists them."""
    return {name: replace(device) for name, device in _known().items()}  # copies, as the dict of peaks is mutable


@cache
def _known() -> Mapping[str, Device]:
    return load_devices(Path(__file__).with_name("device_specs.toml"))


def load_devices(path: str | Path) -> dict[str, Device]:
    """Return name -> device for the devices in a TOML file, which has one table for each::

        [mine]
        peak = { float32 = 40e12, bfloat16 = 160e12 }    # FLOP/s
        bandwidth = 900e9                                # bytes per second
        memory = 48_000_000_000                          # bytes
        launch = 4e-6                                    # seconds, default 0
        source = "its data sheet"
        kernels = "sm89"                                 # its compute capability, default "sm80"

    Use it as ``roofline(gm, load_devices("mine.toml")["mine"])``.

    Raises:
        FileError: SK504 if the file cannot be read.
        CostError: SK320 if the file is not TOML, or a device has a missing, unknown or wrong field.
    """
    return {name: device_from_table(str(path), name, table) for name, table in device_tables(path).items()}


def device_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file of devices; raise the errors of `load_devices` if it is none."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("SK504", f"{path} cannot be read: {error}", "Give the path of a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise CostError(
            "SK320", f"{path} is not TOML: {error}", "Write one table per device; see load_devices."
        ) from error


def device_from_table(where: str, name: str, table: object) -> Device:
    """Return the device that a table of a file describes.

    Args:
        where: the file, for errors.
        name: the key of the device's table in the file.
        table: the fields of the device.

    Raises:
        CostError: SK320 if a field is missing, unknown or of a wrong type.
    """
    if not isinstance(table, dict):
        raise CostError("SK320", f"{where}: {name} is not a table", f"Write [{name}] above the fields of a device.")
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
    """Return the given device, or the known device of a name; case, hyphens and spaces do not matter.

    Raises:
        CostError: SK321 if no device has that name.
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
