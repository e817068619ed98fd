"""Finds the cuts of a model between devices with which the most tokens fit, and how many these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitkit.studies.fit.blocks import ModelBlock, Weight
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.inference_runs import StepBytes, inference_step
from splitkit.studies.fit.layout import BlockFit, HeldBytes, Holding


@dataclass(frozen=True, eq=False)
class InferenceFit(BlockFit):
    """Answers for one model and one number of requests; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        blocks: its blocks.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes.
        bits: bits a value of the weights; ``None``: as the model has them.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]
    requests: int = 1
    chunk: int = 512
    bits: int | None = None
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
        return HeldBytes(
            weights=weight_bytes([self.blocks[n] for n in numbers], self.bits),
            cache=sum(step.cache[n] for n in numbers),
            activations=max((step.work[n] for n in numbers), default=0),
        )

    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each request."""
        step = self.step(tokens)
        return lambda device, i, j: self.holds(step, i, j)


def weight_bytes(blocks: Sequence[ModelBlock], bits: int | None = None) -> int:
    """Return the bytes of the weights of some blocks, tied ones once; with so many bits a value where that is less."""
    found: Mapping[int, Weight] = {key: weight for block in blocks for key, weight in block.weights.items()}
    return sum(weight.nbytes if bits is None else weight.narrow.get(bits, weight.nbytes) for weight in found.values())
