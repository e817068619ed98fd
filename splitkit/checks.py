"""What users write: counts, seconds, bytes, fractions; read once, refused with one text."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

from splitkit.errors import PolicyError
from splitkit.units import read_size

MOST = 1_000_000
"""The most stages, parts or microbatches of anything."""
LONGEST = 366 * 86400.0
"""The longest search, in seconds."""


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is a whole number, ``least`` or more: an int, numpy's too, and no bool."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, 0 or more, perhaps infinite: an int or float, numpy's too, no bool and not nan, and not
    beyond what a float holds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return float(value) >= 0
    except OverflowError:
        return False


def is_word(value: object, *words: str) -> bool:
    """Whether it is one of these texts; arrays, which answer ``==`` for each of their items, are none."""
    return isinstance(value, str) and value in words


def are_texts(value: object) -> TypeGuard[Collection[str]]:
    """Whether it is a collection of texts, perhaps empty, and not one text."""
    found = items_of(value)
    return found is not None and all(isinstance(item, str) for item in found)


def plain_name(name: str) -> str:
    """A name as people may write it, without case, hyphens, underscores and spaces: ``"RTX 4090"`` -> ``"rtx4090"``."""
    return re.sub(r"[\s_-]", "", name).lower()


def items_of(value: object) -> list[Any] | None:
    """The items of a collection; ``None`` for a text, and for what is no collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        return None
    try:
        return list(value)
    except TypeError:  # a tensor without dimensions
        return None


def count(owner: object, name: str, value: object) -> int:
    """A whole number, 1 or more, and no more than a million.

    Args:
        owner: whose parameter it is: the policy, or the name of a function.
        name: of the parameter.
        value: as it was given.

    Raises:
        PolicyError: SK302 for anything else, as all functions here.
    """
    if not is_whole(value, 1):
        raise _wrong(owner, name, value, "a whole number >= 1")
    if value > MOST:  # a record is made for each
        raise _wrong(owner, name, value, f"a whole number >= 1, and {MOST} at most")
    return int(value)


def degrees(owner: object, name: str, value: object, most: int, what: str) -> tuple[int, ...]:
    """A number, or some: whole, from 1 to ``most``, which is ``what``; increasing, each once."""
    given = [value] if is_whole(value) else items_of(value)
    if not given or not all(is_whole(one, 1) and int(one) <= most for one in given):
        raise _wrong(owner, name, value, f"whole numbers from 1 to {most}, {what}, such as (1, 2, 4)")
    return tuple(sorted({int(one) for one in given}))


def whole(owner: object, name: str, value: object) -> int:
    """A whole number, negative ones too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong(owner, name, value, "a whole number")
    return int(value)


def seconds(owner: object, name: str, value: object, zero: bool = False, endless: bool = True) -> float:
    """A time above zero, perhaps infinite unless ``endless`` denies it; or also none, where ``zero`` is told."""
    if is_number(value) and float(value) > LONGEST and not endless:  # steps of a search are counted by it
        raise _wrong(owner, name, value, "seconds, a number above 0 that is not infinite, a year at most")
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
    return PolicyError("SK302", f"{_title(owner)}({name}={shown(value)})", f"{name} must be {what}.")


def shown(value: object) -> str:
    """Anything that was given, on one line of bounded length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more digits than Python writes, or what cannot show itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


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
