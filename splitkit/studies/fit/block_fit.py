"""Cuts the blocks of a model into one run for each device, so that each run fits."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from splitkit.checks import shown
from splitkit.errors import PolicyError
from splitkit.hardware.device_specs import Device, find_device
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.solvers.most_fitting import most_fitting
from splitkit.studies.fit.fit_model import FitModel, ModelBlock
from splitkit.units import read_size

Range = tuple[int, int]
"""The first block of a device and the one after its last, by their positions in the order in which blocks run."""

_STEPS = 40
"""Halvings in the search for the most even layout: enough for any two sizes to differ."""


Holding = Callable[[int, int, int], ByteBreakdown]
"""(device, first block, block after the last) -> what the device holds; more blocks never hold less."""


def fitting_layout(count: int, limits: Sequence[float], holds: Holding) -> list[Range] | None:
    """Return consecutive runs of ``count`` blocks within the limits of the devices, ``None`` if there are none.

    Each device takes as many blocks as it can. As more blocks never hold less, no other layout gets further.
    """
    found, start = [], 0
    for device, limit in enumerate(limits):
        end = _furthest(count, start, partial(_fits, holds, device, start, limit))
        found.append((start, end))
        start = end
    return found if start == count else None


def _fits(holds: Holding, device: int, start: int, limit: float, end: int) -> bool:
    return holds(device, start, end).total <= limit


def _furthest(count: int, start: int, fits: Callable[[int], bool]) -> int:
    """Return the last end from ``start`` to ``count`` that fits; all before it fit."""
    low, high = start, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def most_even_layout(count: int, limits: Sequence[int], holds: Holding) -> list[Range]:
    """Return a layout whose fullest device, relative to its limit, is the least full; it may exceed the limits."""

    def within(share: float) -> list[Range] | None:
        return fitting_layout(count, [share * limit for limit in limits], holds)

    high = holds(0, 0, count).total / limits[0]
    best, low = [(0, count), *[(count, count)] * (len(limits) - 1)], 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if (found := within(middle)) is None:
            low = middle
        else:
            best, high = found, middle
    return best


class BlockFit(ABC):
    """Cuts a model between its blocks, one run of blocks for each device, and finds the most tokens that fit.

    Attributes:
        subject: the model.
        blocks: its blocks.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]

    @abstractmethod
    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each sequence."""

    def layout(self, cards: Sequence[Card], tokens: int) -> list[Range] | None:
        """Return cuts with which so many tokens of each sequence fit, ``None`` if there are none."""
        limits = [card.limit for card in cards]
        return fitting_layout(len(self.blocks), limits, self.holding(len(cards), tokens))

    def even_layout(self, cards: Sequence[Card], tokens: int) -> list[Range]:
        """Return the cuts whose fullest device is the least full."""
        limits = [card.limit for card in cards]
        return most_even_layout(len(self.blocks), limits, self.holding(len(cards), tokens))

    def rows(self, cards: Sequence[Card], tokens: int) -> list[ByteBreakdown]:
        """Return what each device holds with the most even layout."""
        holds = self.holding(len(cards), tokens)
        return [holds(device, i, j) for device, (i, j) in enumerate(self.even_layout(cards, tokens))]

    def most_tokens(self, cards: Sequence[Card]) -> int:
        """Return the most tokens of each sequence that fit with any cuts between blocks, 0 if not even one does."""

        def share(tokens: int) -> float:
            return max(held.total / card.limit for held, card in zip(self.rows(cards, tokens), cards, strict=True))

        def between(low: int, high: int) -> int:
            first, last = share(low), share(high)
            return low + int((high - low) * (1 - first) / (last - first))

        return most_fitting(lambda tokens: self.layout(cards, tokens) is not None, between, self.subject.longest)


# Reads the devices that a model should fit: ``2x24GiB``, ``rtx-3090,rtx-4090``, or those of this machine.


MOST_CARDS = 1024
"""The most devices that a model is fitted to."""
_MOST_BYTES = 2**60  # of a device; more is taken for a slip of the pen
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
