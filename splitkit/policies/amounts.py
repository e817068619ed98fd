"""Amounts that users write: memory of devices, links, optimizers."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from splitkit.costs import Links
from splitkit.errors import PolicyError
from splitkit.units import read_size

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


def links_of(links: str | Links | None) -> Links | None:
    """Links, or the preset of that name (SK322 if there is none)."""
    return Links.preset(links) if isinstance(links, str) else links
