"""Cuts the blocks of a model into one run for each device, so that each run fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

Range = tuple[int, int]
"""The first block of a device and the one after its last, by their positions in the order in which blocks run."""

_STEPS = 40
"""Halvings in the search for the most even layout: enough for any two sizes to differ."""


@dataclass(frozen=True)
class HeldBytes:
    """What a device holds, in bytes.

    Attributes:
        weights: parameters and buffers; tied weights count on each device that needs them.
        gradients: their gradients, in training.
        optimizer: the state of the optimizer.
        cache: keys and values of all tokens, in inference.
        activations: what a step adds at its peak. In training also what is saved for backward, for all microbatches
            that are in flight.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.cache + self.activations


Holding = Callable[[int, int, int], HeldBytes]
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
    """Return a layout whose fullest device, relative to its limit, is the least full; it may exceed the limits.

    Among such layouts it is one whose other devices are about as full as each other.
    """

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
    return _evened(count, [high * limit * (1 + 1e-9) for limit in limits], holds, best)


def _evened(count: int, limits: Sequence[float], holds: Holding, greedy: Sequence[Range]) -> list[Range]:
    """Return a layout within limits that fills each device to the mean of ``greedy``, as far as the others allow."""
    held = [holds(device, i, j).total for device, (i, j) in enumerate(greedy)]
    share = sum(held) / sum(limits)
    least = _earliest_ends(count, limits, holds)
    found, start = [], 0
    for device, limit in enumerate(limits):
        end = _furthest(count, start, partial(_fits, holds, device, start, share * limit))
        further = min(end + 1, count)
        if abs(holds(device, start, further).total - share * limit) < abs(
            holds(device, start, end).total - share * limit
        ):
            end = further
        end = min(max(end, least[device]), _furthest(count, start, partial(_fits, holds, device, start, limit)))
        found.append((start, end))
        start = end
    return found


def _earliest_ends(count: int, limits: Sequence[float], holds: Holding) -> list[int]:
    """Return for each device the least end after which the devices behind it can hold the rest."""
    ends, end = [count] * len(limits), count
    for device in reversed(range(1, len(limits))):
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(device, middle, end).total <= limits[device] else (middle + 1, high)
        ends[device - 1] = end = low
    return ends
