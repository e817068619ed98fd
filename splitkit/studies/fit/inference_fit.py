"""Finds the cuts of a model between devices with which the most tokens fit, and how many these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from splitkit.solvers.most_fitting import most_fitting
from splitkit.studies.fit.blocks import ModelBlock, Weight
from splitkit.studies.fit.cards import Card
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.inference_runs import StepBytes, inference_step
from splitkit.studies.fit.layout import HeldBytes, Range, fitting_layout, most_even_layout


@dataclass(frozen=True, eq=False)
class InferenceFit:
    """Answers for one model and one number of requests; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        blocks: its blocks.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes.
        bits: bits a value of the weights; ``None``: as the model has them.
        resident: whether each block's weights stay on the device; a block that does not is copied there when it runs.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]
    requests: int = 1
    chunk: int = 512
    bits: int | None = None
    resident: Sequence[bool] | None = None
    _steps: dict[int, StepBytes] = field(default_factory=dict, repr=False)

    def step(self, tokens: int) -> StepBytes:
        """Return what the blocks hold with so many tokens of each request, in the order in which they run."""
        if tokens not in self._steps:
            self._steps[tokens] = inference_step(self.subject, self.blocks, tokens, self.requests, self.chunk)
        return self._steps[tokens]

    @property
    def line(self) -> list[ModelBlock]:
        """The blocks in the order in which they run; some step must have been run."""
        return [self.blocks[number] for number in next(iter(self._steps.values())).order]

    def holds(self, step: StepBytes, start: int, end: int) -> HeldBytes:
        """Return what a device holds with a range of blocks, in one step."""
        numbers = step.order[start:end]
        stays = self.resident or [True] * len(self.blocks)
        moved = max((weight_bytes([self.blocks[n]], self.bits) for n in numbers if not stays[n]), default=0)
        return HeldBytes(
            weights=weight_bytes([self.blocks[n] for n in numbers if stays[n]], self.bits) + moved,
            cache=sum(step.cache[n] for n in numbers),
            activations=max((step.work[n] for n in numbers), default=0),
        )

    def layout(self, cards: Sequence[Card], tokens: int) -> list[Range] | None:
        """Return cuts with which so many tokens of each request fit, ``None`` if there are none."""
        return self._layout_of(cards, self.step(tokens))

    def _layout_of(self, cards: Sequence[Card], step: StepBytes) -> list[Range] | None:
        limits = [card.limit for card in cards]
        return fitting_layout(len(self.blocks), limits, lambda device, i, j: self.holds(step, i, j))

    def even_layout(self, cards: Sequence[Card], tokens: int) -> list[Range]:
        """Return the cuts whose fullest device is the least full."""
        step, limits = self.step(tokens), [card.limit for card in cards]
        return most_even_layout(len(self.blocks), limits, lambda device, i, j: self.holds(step, i, j))

    def rows(self, cards: Sequence[Card], tokens: int) -> list[HeldBytes]:
        """Return what each device holds with the most even layout."""
        return [self.holds(self.step(tokens), i, j) for i, j in self.even_layout(cards, tokens)]

    def most_tokens(self, cards: Sequence[Card]) -> int:
        """Return the most tokens of each request that fit with any cuts between blocks, 0 if not even one does."""
        return most_fitting(
            lambda tokens: self.layout(cards, tokens) is not None,
            lambda low, high: self._between(cards, low, high),
            self.subject.longest,
        )

    def _between(self, cards: Sequence[Card], low: int, high: int) -> int:
        """Return the tokens between two that would be the most if bytes were linear between them."""
        first, last = self.step(low), self.step(high)
        best, above = low, high
        while above - best > 1:
            middle = (best + above) // 2
            share = (middle - low) / (high - low)
            between = replace(
                first, cache=_mixed(first.cache, last.cache, share), work=_mixed(first.work, last.work, share)
            )
            best, above = (middle, above) if self._layout_of(cards, between) else (best, middle)
        return best


def _mixed(first: Sequence[int], last: Sequence[int], share: float) -> tuple[int, ...]:
    return tuple(round(a + (b - a) * share) for a, b in zip(first, last, strict=True))


def weight_bytes(blocks: Sequence[ModelBlock], bits: int | None = None) -> int:
    """Return the bytes of the weights of some blocks, tied ones once; with so many bits a value where that is less."""
    found: Mapping[int, Weight] = {key: weight for block in blocks for key, weight in block.weights.items()}
    return sum(weight.nbytes if bits is None else weight.narrow.get(bits, weight.nbytes) for weight in found.values())
