"""What users write: counts, seconds, bytes, fractions; read once, refused with one text."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from splitkit.errors import PolicyError
from splitkit.units import read_size


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is a whole number, ``least`` or more: an int, numpy's too, and no bool."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, 0 or more, perhaps infinite: an int or float, numpy's too, no bool and not nan."""
    known: Any = value  # types have no >= for numbers.Real
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and bool(known >= 0)


def count(owner: object, name: str, value: object) -> int:
    """A whole number, 1 or more.

    Args:
        owner: whose parameter it is: the policy, or the name of a function.
        name: of the parameter.
        value: as it was given.

    Raises:
        PolicyError: SK302 for anything else, as all functions here.
    """
    if not is_whole(value, 1):
        raise _wrong(owner, name, value, "a whole number >= 1")
    return int(value)


def seconds(owner: object, name: str, value: object, zero: bool = False, endless: bool = True) -> float:
    """A time above zero, perhaps infinite unless ``endless`` denies it; or also none, where ``zero`` is told."""
    if is_number(value) and value == math.inf and not endless:  # steps of a search are counted by it
        raise _wrong(owner, name, value, "seconds, a number above 0 that is not infinite")
    if not is_number(value) or not (value or zero):
        raise _wrong(owner, name, value, "seconds, 0 or more" if zero else "seconds, a number above 0")
    return float(value)


def fraction(owner: object, name: str, value: object) -> float:
    """A number from 0 to 1."""
    if not is_number(value) or value > 1:
        raise _wrong(owner, name, value, "a number from 0 to 1, such as 0.1 for 10 %")
    return float(value)


def nbytes(owner: object, name: str, value: object, least: int = 0, besides: str = "") -> int:
    """Bytes, a whole number or a text with a unit (``"80GiB"``, ``"1.5 kB"``); errors also tell ``besides``."""
    known = read_size(value) if isinstance(value, str) else value
    if not is_whole(known, least) or int(known).bit_length() > 1000:  # searches compare it with floats
        raise _wrong(owner, name, value, f'bytes, {least} or more: a whole number, or a text such as "80GiB"{besides}')
    return int(known)


def settle(owner: object, name: str, read: Callable[[object, str, object], object], optional: bool = False) -> None:
    """Check a field of a frozen dataclass and hold it as plain Python: numpy's ints as ints; None if ``optional``."""
    value = getattr(owner, name)
    if value is not None or not optional:
        object.__setattr__(owner, name, read(owner, name, value))


def _wrong(owner: object, name: str, value: object, what: str) -> PolicyError:
    return PolicyError("SK302", f"{_title(owner)}({name}={value!r:.200})", f"{name} must be {what}.")


def _title(owner: object) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__


Memory = int | str | Sequence[int | str] | None
"""Bytes of every device (``"80GiB"``), or of each; None for no limit."""


def memory_of(policy: object, memory: Memory, devices: int) -> tuple[int | None, ...]:
    """Bytes of each device.

    Raises:
        PolicyError: SK302 for what is no size, or another number of sizes than devices.
    """
    if isinstance(memory, str | bytes) or not isinstance(memory, Sequence):
        return (None if memory is None else nbytes(policy, "memory", memory),) * devices
    if len(memory) != devices:
        reason = f"{_title(policy)}: memory is {len(memory)} sizes for {devices} devices"
        raise PolicyError("SK302", reason, "Give one size, or one each.")
    return tuple(None if one is None else nbytes(policy, "memory", one) for one in memory)
