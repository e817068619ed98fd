"""Finds the cuts of a model between devices for training as a pipeline, and the most tokens with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from splitkit._torch import pytree
from splitkit.errors import CaptureError
from splitkit.graph.losses import loss_of, no_loss
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.studies.fit.fit_model import FitModel, ModelBlock, Weight, memory_key
from splitkit.studies.fit.inference_fit import BlockWatch, on_meta, running_order, weight_bytes
from splitkit.studies.fit.layout import BlockFit, Holding
from splitkit.testing.config_models import loss_inputs


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

    def holds(self, step: TrainingBytes, in_flight: int, start: int, end: int) -> ByteBreakdown:
        """Return what a device holds with a range of blocks."""
        numbers = step.order[start:end]
        blocks = [self.blocks[n] for n in numbers]
        trained = trained_bytes_of(blocks)
        return ByteBreakdown(
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


# Runs forward and backward of a model on ``meta``: what each block saves, and what it takes while it runs.


@dataclass(frozen=True)
class TrainingBytes:
    """What the blocks hold in forward and backward of one microbatch, in the order of the blocks.

    Attributes:
        saved: for each block, identity of memory -> bytes that it saves for backward, with its inputs.
        inputs: for each block, the same of its inputs alone.
        work: the most bytes alive while each block runs in forward or backward, beside weights, gradients, and what
            it and the blocks before it have saved.
        order: the numbers of the blocks in the order in which they run.
    """

    saved: tuple[Mapping[int, int], ...]
    inputs: tuple[Mapping[int, int], ...]
    work: tuple[int, ...]
    order: tuple[int, ...]


def training_step(subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, sequences: int) -> TrainingBytes:
    """Run forward and backward of a microbatch.

    Args:
        subject: the model.
        blocks: its blocks.
        tokens: tokens of each sequence.
        sequences: the number of sequences.

    Raises:
        CaptureError: SK401 if the model does not run on ``meta``, or has no loss.
    """
    try:
        with on_meta():
            return _step(subject, blocks, tokens, sequences)
    except CaptureError:
        raise
    except Exception as error:
        needs = "Give a factory that returns the model and inputs with which it returns a loss."
        raise subject.failed("train", f"{sequences} x {tokens} tokens", error, needs) from error


def _step(subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, sequences: int) -> TrainingBytes:
    model = subject.in_mode(training=True)
    args, kwargs = subject.example or ((), loss_inputs(model, subject.config, sequences, tokens))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    run = _TrainingRun(blocks)
    try:
        run.watch.hold("weights", [*model.parameters(), *model.buffers()])
        run.watch.hold("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        run.watch.hold("inputs", [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        run.weights = {memory_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        run.watch.run(lambda: run.forward_and_backward(lambda: model(*args, **kwargs), subject.name))
    finally:
        model.zero_grad(set_to_none=True)
    return run.result()


class _TrainingRun:
    """Forward and backward under a watch.

    Attributes:
        watch: records ops and lifetimes.
        weights: the identities of memory that is not an activation.
    """

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        self.blocks = blocks
        self.watch = BlockWatch(blocks)
        self.weights: set[int] = set()
        self._saved: list[dict[int, int]] = [{} for _ in blocks]
        self._inputs: list[dict[int, int]] = [{} for _ in blocks]
        self._order: list[int] = []

    def forward_and_backward(self, forward: Callable[[], Any], name: str) -> None:
        """Run both; the ops after the last block belong to it."""
        hooks = [hook for number, block in enumerate(self.blocks) for hook in self._hooks(number, block)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                output = forward()
        finally:
            for hook in hooks:
                hook.remove()
        loss = loss_of(output)
        if loss is None:
            raise CaptureError("SK401", f"{name}: {no_loss(output)}", "Return the loss.")
        del output
        self._order = [*self.watch.order]
        self.watch.enter(self.watch.current)
        loss.backward()  # type: ignore[no-untyped-call]

    def _hooks(self, number: int, block: ModelBlock) -> list[Any]:
        module = block.module
        return [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._entered(number, (args, kwargs)), with_kwargs=True
            ),
            module.register_forward_hook(lambda *given: self._left(number, given[-1])),
        ]

    def _entered(self, number: int, given: Any) -> None:
        for tensor in _graded(given):
            self._note(self._inputs[number], tensor)
            self._note(self._saved[number], tensor)

    def _left(self, number: int, output: Any) -> None:
        """Let the block run from when the gradient of its output arrives."""
        for tensor in _graded(output):
            tensor.register_hook(lambda _: self.watch.enter(number))  # type: ignore[no-untyped-call]

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(self._saved[self.watch.current], tensor)
        return tensor.detach()

    def _note(self, held: dict[int, int], tensor: Tensor) -> None:
        if (key := memory_key(tensor)) not in self.weights:
            held[key] = tensor.untyped_storage().nbytes()

    def result(self) -> TrainingBytes:
        """Return what the run has shown."""
        alive, work = self.watch.alive("weights", "gradients"), [0] * len(self.blocks)
        order = running_order(self._order, len(self.blocks))
        until, seen = dict[int, int](), dict[int, int]()
        for number in order:
            seen |= self._saved[number]
            until[number] = sum(seen.values())
        for number, start, end in self.watch.spans():
            work[number] = max(work[number], max(alive[start:end], default=0) - until[number])
        return TrainingBytes(tuple(self._saved), tuple(self._inputs), tuple(work), order)


def _graded(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
