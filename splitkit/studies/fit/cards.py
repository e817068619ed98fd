"""Reads the devices that a model should fit: ``2x24GiB``, ``rtx-3090,rtx-4090``, or those of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitkit.checks import shown
from splitkit.errors import PolicyError
from splitkit.hardware.device_specs import Device, find_device
from splitkit.units import read_size

MOST_CARDS = 1024
"""The most devices that a model is fitted to."""
_MOST_BYTES = 2**60
_KEPT_FREE = 20
"""One part in so many of a device stays free: for the context of the driver, workspaces and fragmentation."""
_ITEM = re.compile(r"(?:(\d{1,99})x)?(.+)", re.ASCII)

CardList = str | Sequence[str | int | Device] | None
"""Devices as a text (``"2x24GiB"``), as sizes, names and `splitkit.costs.Device`; ``None`` for those present."""


@dataclass(frozen=True)
class Card:
    """One device.

    Attributes:
        name: its name, or its size as it was written.
        memory: bytes of its memory.
    """

    name: str
    memory: int

    @property
    def limit(self) -> int:
        """The bytes that may be used: 95 % of the memory, rounded down to what ``--memory`` says."""
        return read_size(memory_word(self.memory - self.memory // _KEPT_FREE)) or 0


def memory_word(nbytes: int) -> str:
    """Return bytes, rounded down, as ``--memory`` takes them."""
    return f"{nbytes >> 20}MiB" if nbytes >= 2**30 else f"{nbytes >> 10}KiB" if nbytes >= 2**20 else f"{nbytes}B"


def cards_of(devices: CardList) -> tuple[Card, ...]:
    """Return the devices that a text or a sequence names.

    Raises:
        PolicyError: SK302 if it names none, too many, or something that is neither a size nor a count and a name.
        CostError: SK321 if no device has that name.
    """
    if devices is None:
        return present()
    items = devices.split(",") if isinstance(devices, str) else list(devices)
    found = tuple(card for item in items for card in _cards(item))
    _require_few(len(found))
    return found


def _require_few(number: int) -> None:
    if not 1 <= number <= MOST_CARDS:
        raise PolicyError("SK302", f"fit: these are {number} devices", f"Name 1 to {MOST_CARDS} devices.")


def present() -> tuple[Card, ...]:
    """Return the GPUs of this machine; without any, its main memory as one device."""
    if torch.cuda.is_available():
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return tuple(Card(each.name, each.total_memory) for each in every)
    return (Card("main memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),)


def _cards(item: str | int | Device) -> tuple[Card, ...]:
    if isinstance(item, Device):
        return (Card(item.name, item.memory),)
    match = _ITEM.fullmatch(str(item).strip())
    count = int(match[1] or 1) if match else 0
    if match is None or not count:
        raise PolicyError("SK302", f"fit: {shown(item)} names no device", "Write 2x24GiB, or rtx-3090,rtx-4090.")
    _require_few(count)
    nbytes = read_size(match[2])
    if nbytes is not None and not 0 < nbytes <= _MOST_BYTES:
        raise PolicyError("SK302", f"fit: {shown(match[2])} is not a memory size", "Write 2x24GiB.")
    if nbytes is None:
        known = find_device(match[2])
        return (Card(known.name, known.memory),) * count
    if match[2].isdigit() and nbytes < 2**20:
        raise PolicyError("SK302", f"fit: {match[2]} is {nbytes} bytes of memory", "Give the unit: 2x24GiB.")
    return (Card(match[2], nbytes),) * count
