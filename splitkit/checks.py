"""Checks of the parameters that policies share."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from splitkit.errors import PolicyError
from splitkit.units import read_size


def positive(policy: object, name: str, value: object) -> None:
    """Raise SK302 unless ``value`` is an int above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PolicyError("SK302", f"{type(policy).__name__}({name}={value!r})", f"{name} must be a whole number >= 1.")


def seconds_above_zero(policy: object, seconds: object) -> None:
    """Raise SK302 unless ``seconds`` is a number above zero."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:  # type: ignore[operator]
        raise PolicyError("SK302", f"{type(policy).__name__}(seconds={seconds!r})", "seconds must be a number above 0.")


Memory = int | str | Sequence[int | str] | None
"""Bytes of every device (``"80GiB"``), or of each; None for no limit."""


def memory_of(policy: object, memory: Memory, devices: int) -> tuple[int | None, ...]:
    """Bytes of each device.

    Raises:
        PolicyError: SK302 for what is no size, or another number of sizes than devices.
    """
    if memory is None or isinstance(memory, numbers.Number | str) or not isinstance(memory, Sequence):
        return (_bytes(policy, memory),) * devices
    if len(memory) != devices:
        reason = f"{type(policy).__name__}: memory is {len(memory)} sizes for {devices} devices"
        raise PolicyError("SK302", reason, "Give one size, or one each.")
    return tuple(_bytes(policy, one) for one in memory)


def _bytes(policy: object, memory: object) -> int | None:
    if memory is None:
        return None
    known = read_size(memory) if isinstance(memory, str) else memory
    if isinstance(known, bool) or not isinstance(known, numbers.Integral) or known < 0:
        raise PolicyError(
            "SK302", f"{type(policy).__name__}: memory is {memory!r}", 'Give bytes as a whole number, or "80GiB".'
        )
    return int(known)
