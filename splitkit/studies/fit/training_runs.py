"""Runs forward and backward of a model on ``meta``: what each block saves, and what it takes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkit._torch import pytree
from splitkit.errors import CaptureError
from splitkit.graph.losses import loss_of, no_loss
from splitkit.studies.fit.blocks import ModelBlock, memory_key
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.inference_runs import running_order
from splitkit.studies.fit.meta_watch import BlockWatch, on_meta
from splitkit.testing.config_models import loss_inputs


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
