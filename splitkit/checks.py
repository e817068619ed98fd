"""Checks of the arguments that users pass: counts, seconds, bytes, fractions."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

from splitkit.errors import PolicyError
from splitkit.units import read_size

MOST = 1_000_000
"""The most stages, parts or microbatches that may be asked for."""
LONGEST = 366 * 86400.0
"""The longest search, in seconds."""


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least ``least``: an int, also numpy's, but not a bool."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of at least 0, perhaps infinite: an int or float, also numpy's.

    A bool, a nan, and an int that is too large for a float are not numbers.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return float(value) >= 0
    except OverflowError:
        return False


def is_word(value: object, *words: str) -> bool:
    """Return whether a value is one of these texts. An array is not, although ``==`` would compare its items."""
    return isinstance(value, str) and value in words


def are_texts(value: object) -> TypeGuard[Collection[str]]:
    """Return whether a value is a collection of texts, perhaps empty, rather than one text."""
    found = items_of(value)
    return found is not None and all(isinstance(item, str) for item in found)


def plain_name(name: str) -> str:
    """Return a name in lower case, without hyphens, underscores and spaces: ``"RTX 4090"`` -> ``"rtx4090"``."""
    return re.sub(r"[\s_-]", "", name).lower()


def items_of(value: object) -> list[Any] | None:
    """Return the items of a collection; ``None`` for a text, and for an object that is not a collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        return None
    try:
        return list(value)
    except TypeError:  # a tensor without dimensions
        return None


def count(owner: object, name: str, value: object) -> int:
    """Return a count, a whole number from 1 to a million.

    Args:
        owner: the policy, or the name of the function, whose parameter it is.
        name: the name of the parameter.
        value: the value as it was given.

    Raises:
        PolicyError: SK302 for anything else; this holds for all functions of this file that take an owner.
    """
    if not is_whole(value, 1):
        raise _wrong(owner, name, value, "a whole number >= 1")
    if value > MOST:  # more records than fit into memory
        raise _wrong(owner, name, value, f"a whole number >= 1, and at most {MOST}")
    return int(value)


def degrees(owner: object, name: str, value: object, most: int, what: str) -> tuple[int, ...]:
    """Return one or several whole numbers from 1 to ``most``, sorted, without repeats; ``what`` explains ``most``."""
    given = [value] if is_whole(value) else items_of(value)
    if not given or not all(is_whole(one, 1) and int(one) <= most for one in given):
        raise _wrong(owner, name, value, f"whole numbers from 1 to {most}, {what}, such as (1, 2, 4)")
    return tuple(sorted({int(one) for one in given}))


def whole(owner: object, name: str, value: object) -> int:
    """Return a whole number, which may be negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong(owner, name, value, "a whole number")
    return int(value)


def seconds(owner: object, name: str, value: object, zero: bool = False, endless: bool = True) -> float:
    """Return a time above 0; 0 is allowed if ``zero``, and infinity if ``endless``."""
    if (
        is_number(value) and float(value) > LONGEST and not endless
    ):  # the number of steps of a search is proportional to it
        raise _wrong(owner, name, value, "seconds, a number above 0 that is not infinite, at most a year")
    if not is_number(value) or not (value or zero):
        raise _wrong(owner, name, value, "seconds, 0 or more" if zero else "seconds, a number above 0")
    return float(value)


def fraction(owner: object, name: str, value: object) -> float:
    """Return a number from 0 to 1."""
    if not is_number(value) or value > 1:
        raise _wrong(owner, name, value, "a number from 0 to 1, such as 0.1 for 10 %")
    return float(value)


def nbytes(owner: object, name: str, value: object, least: int = 0, besides: str = "") -> int:
    """Return bytes from a whole number or a text (``"80GiB"``, ``"1.5 kB"``); ``besides`` is added to the error."""
    known = read_size(value) if isinstance(value, str) else value
    if not is_whole(known, least) or int(known).bit_length() > 1000:  # searches convert it to a float
        raise _wrong(owner, name, value, f'bytes, {least} or more: a whole number, or a text such as "80GiB"{besides}')
    return int(known)


def settle(owner: object, name: str, read: Callable[[object, str, object], object], optional: bool = False) -> None:
    """Check a field of a frozen dataclass and store it as plain Python (no numpy); None passes if ``optional``."""
    value = getattr(owner, name)
    if value is not None or not optional:
        object.__setattr__(owner, name, read(owner, name, value))


def _wrong(owner: object, name: str, value: object, what: str) -> PolicyError:
    return PolicyError("SK302", f"{_title(owner)}({name}={shown(value)})", f"{name} must be {what}.")


def shown(value: object) -> str:
    """Return the ``repr`` of any object on one line of bounded length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int with too many digits for Python to print, or a ``__repr__`` that fails
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _title(owner: object) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__


Memory = int | str | Sequence[int | str | None] | None
"""One size for all devices (``"80GiB"``), or one for each; None is no limit."""


def memory_of(policy: object, memory: Memory, devices: int) -> tuple[int | None, ...]:
    """Return the bytes of each device, ``None`` for a device without limit.

    Raises:
        PolicyError: SK302 if it is not a size, or the number of sizes differs from that of devices.
    """
    if isinstance(memory, str | bytes) or not isinstance(memory, Sequence):
        return (None if memory is None else nbytes(policy, "memory", memory),) * devices
    if len(memory) != devices:
        reason = f"{_title(policy)}: memory has {len(memory)} sizes for {devices} devices"
        raise PolicyError("SK302", reason, "Give one size for all devices, or one for each.")
    return tuple(None if one is None else nbytes(policy, "memory", one) for one in memory)
