"""Fields of several records of a plan file: keys of parts, devices, numbers, texts; checked when they are read."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from splitkit.errors import CostError, FileError, PlanError
from splitkit.hardware.device_specs import Device
from splitkit.plans.parts import PartKey
from splitkit.price_record import MOST_LETTERS
from splitkit.prices import MOST_SECONDS

_DEVICE_NUMBERS = ("bandwidth", "memory", "launch")


def check_short_text(field: str, data: object) -> None:
    """Refuse what is no short text for people."""
    if not isinstance(data, str) or not data.isprintable() or len(data) > MOST_LETTERS:
        raise damaged(field, data, "a short text")


def check_device(field: str, data: object) -> None:
    """Refuse data that does not describe a device; `splitkit.costs.Device` checks the figures."""
    known = {"name", "peak", "source", "kernels", *_DEVICE_NUMBERS}
    if not isinstance(data, Mapping) or data.keys() | {"kernels"} != known:  # older files name no kernels
        raise damaged(field, data, f"an object with {', '.join(sorted(known))}")
    for name in ("name", "source", "kernels"):
        if not isinstance(data.get(name, ""), str) or not data.get(name, "").isprintable():
            raise damaged(f"{field}.{name}", data[name], "a text")
    check_numbers(f"{field}.peak", data["peak"])
    check_numbers(field, {name: data[name] for name in _DEVICE_NUMBERS})


def check_numbers(field: str, data: object) -> None:
    """Refuse what is no object of numbers within the range of prices."""
    if not isinstance(data, Mapping):
        raise damaged(field, data, "an object of numbers")
    for name, value in data.items():
        if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
            raise damaged(f"{field}[{name!r:.100}]", value, f"a number from 0 to {MOST_SECONDS:.0e}")


def key_to_json(key: PartKey) -> Any:
    """Return the JSON form of the key of a part; raise SK206 for one that has none."""
    if isinstance(key, str):
        return str.__str__(key)  # a plain str, also for an instance of a subclass
    if isinstance(key, int | float | bool):
        return key
    if isinstance(key, torch.device):
        return {"device": str(key)}
    if isinstance(key, tuple):
        return [key_to_json(k) for k in key]
    raise PlanError(
        "SK206",
        f"a part called {key!r} ({type(key).__name__}) cannot be written to a file",
        "Name parts with ints, strings, devices or tuples of these.",
    )


def key_from_json(key: Any) -> PartKey:
    """Return what `key_to_json` wrote; raise TypeError, ValueError or RuntimeError for anything else."""
    if isinstance(key, list):
        return tuple(key_from_json(k) for k in key)
    if isinstance(key, Mapping) and key.keys() == {"device"}:
        return device_from_json(key["device"])
    if not isinstance(key, str | int | float | bool):
        raise TypeError(type(key).__name__)
    return key


def read_key(field: str, data: object, wanted: str = "an int, a string, a device or a list of these") -> PartKey:
    """Return the key of a part in a field of a plan file."""
    try:
        return key_from_json(data)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise damaged(field, data, wanted) from error


def read_device(field: str, data: Mapping[str, Any]) -> Device:
    """Return the `splitkit.costs.Device` in a field of a plan file."""
    check_device(field, data)
    try:
        return Device(**data)
    except CostError as error:
        raise FileError("SK501", f"the plan is damaged: {field}: {error.reason}", "Plan again.") from error


def device_from_json(name: object) -> torch.device:
    """Return the torch device of a name; raise TypeError or RuntimeError for anything else."""
    if not isinstance(name, str):  # torch.device(0) would be a GPU
        raise TypeError(type(name).__name__)
    return torch.device(name)


def damaged(field: str, value: object, wanted: str) -> FileError:
    """Return the SK501 of a field of a plan file."""
    return FileError("SK501", f"the plan is damaged: {field} is {reprlib.repr(value)}, not {wanted}", "Plan again.")
