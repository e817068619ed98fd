"""Finds the cuts of a model between devices for training as a pipeline, and the most tokens with which it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.studies.fit.blocks import ModelBlock, Weight
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.inference_fit import weight_bytes
from splitkit.studies.fit.layout import BlockFit, HeldBytes, Holding
from splitkit.studies.fit.training_runs import TrainingBytes, training_step


@dataclass(frozen=True, eq=False)
class TrainingFit(BlockFit):
    """Answers for one model, optimizer and schedule; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        blocks: its blocks.
        optimizer: the optimizer whose state counts.
        schedule: the schedule of the pipeline, with one stage on each device.
        microbatches: the microbatches in a step.
        sequences: the sequences of a microbatch.
        recompute: whether each stage saves only its inputs, and runs again before its backward.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]
    optimizer: str
    schedule: str
    microbatches: int
    sequences: int = 1
    recompute: bool = False
    _steps: dict[int, TrainingBytes] = field(default_factory=dict, repr=False)
    _in_flight: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def step(self, tokens: int) -> TrainingBytes:
        """Return what the blocks hold with so many tokens of each sequence."""
        if tokens not in self._steps:
            self._steps[tokens] = training_step(self.subject, self.blocks, tokens, self.sequences)
        return self._steps[tokens]

    @cached_property
    def line(self) -> list[ModelBlock]:
        """The blocks in the order in which they run; some step must have been run."""
        return [self.blocks[number] for number in next(iter(self._steps.values())).order]

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return the most microbatches that each of so many stages holds between forward and backward.

        A step has at least one microbatch for each stage.
        """
        if stages not in self._in_flight:
            number = max(self.microbatches, stages)
            run = simulate_schedule([StageCosts(1.0, 2.0)] * stages, self.schedule, number)
            self._in_flight[stages] = run.in_flight_of_stages
        return self._in_flight[stages]

    def holds(self, step: TrainingBytes, in_flight: int, start: int, end: int) -> HeldBytes:
        """Return what a device holds with a range of blocks."""
        numbers = step.order[start:end]
        blocks = [self.blocks[n] for n in numbers]
        trained = trained_bytes_of(blocks)
        return HeldBytes(
            weights=weight_bytes(blocks),
            gradients=trained,
            optimizer=trained * STATE_OF[self.optimizer],
            activations=self.saved(step, start, end) * (in_flight - 1) + _peak(step, numbers),
        )

    def saved(self, step: TrainingBytes, start: int, end: int) -> int:
        """Return the bytes that each microbatch in flight holds: what is saved, or for recompute the inputs."""
        numbers = step.order[start:end]
        if not self.recompute or not numbers:
            return sum(_union(step.saved[n] for n in numbers).values())
        first = step.inputs[numbers[0]]
        before = {key for n in step.order[:start] for key in (*step.saved[n], *step.inputs[n])}
        given = _union(step.inputs[n] for n in numbers)
        return sum(size for key, size in given.items() if key in before or key in first)

    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each sequence."""
        step, flying = self.step(tokens), self.in_flight(devices)
        return lambda device, i, j: self.holds(step, flying[device], i, j)

    def changed(self, *, keep: bool = True, **changes: object) -> TrainingFit:
        """Return it with other fields; ``keep``: with the runs that were made, which then still hold."""
        return replace(self, _steps=self._steps if keep else {}, _in_flight={}, **changes)  # type: ignore[arg-type]


def _peak(step: TrainingBytes, numbers: Sequence[int]) -> int:
    """Return the most bytes that one microbatch holds in some blocks: what is saved so far, and the work of one."""
    seen, most = dict[int, int](), 0
    for number in numbers:
        seen |= step.saved[number]
        most = max(most, sum(seen.values()) + step.work[number])
    return most


def trained_bytes_of(blocks: Sequence[ModelBlock]) -> int:
    """Return the bytes of the gradients of some blocks, tied weights once."""
    found: Mapping[int, Weight] = {key: weight for block in blocks for key, weight in block.weights.items()}
    return sum(weight.trained for weight in found.values())


def _union(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        found |= part
    return found
