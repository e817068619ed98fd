"""Cuts the blocks of a model into one run for each device, so that each run fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from splitkit.solvers.most_fitting import most_fitting
from splitkit.studies.fit.blocks import ModelBlock
from splitkit.studies.fit.cards import Card
from splitkit.studies.fit.fit_model import FitModel

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

    def rows(self, cards: Sequence[Card], tokens: int) -> list[HeldBytes]:
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
