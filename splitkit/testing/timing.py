"""Time a training step of a model of parts, as a whole and part by part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitkit.frontends.joint.train_step import sum_of_outputs
from splitkit.graph.losses import loss_of
from splitkit.testing.rehearsal import copied_inputs, state_restored

if TYPE_CHECKING:
    from splitkit.testing.models import Example


@dataclass(frozen=True)
class StepTime:
    """The time of one step, forward and backward.

    Attributes:
        forward: seconds of forward.
        backward: seconds of backward; ``None`` if nothing requires grad.
        parts: seconds of the forward of each part, in order.
        output: the output of the model.
        loss: the loss of the model, else the sum of its outputs.
        loss_is_models: whether the loss is the model's own.
    """

    forward: float
    backward: float | None
    parts: tuple[float, ...]
    output: Any
    loss: float | None
    loss_is_models: bool


def best_step(module: nn.Module, parts: Collection[nn.Module], example: Example, seed: int, repeat: int) -> StepTime:
    """Return the fastest of ``repeat`` steps of a module, each from the same state and on copies of the inputs."""
    runs = [_step(module, parts, example, seed) for _ in range(repeat)]
    return min(runs, key=lambda run: run.forward + (run.backward or 0.0))


def _step(module: nn.Module, parts: Collection[nn.Module], example: Example, seed: int) -> StepTime:
    args, kwargs = copied_inputs(example)
    with state_restored(module, seed):
        with _stopwatch(parts) as took:
            start = _now()
            output = module(*args, **kwargs)
            forward = _now() - start
        loss, is_models = _loss(output)
        backward = None
        if loss is not None and loss.requires_grad:
            start = _now()
            loss.backward()  # type: ignore[no-untyped-call]
            backward = _now() - start
        value = None if loss is None else float(loss.detach())
    return StepTime(forward, backward, tuple(took), output, value, is_models)


@contextmanager
def _stopwatch(parts: Collection[nn.Module]) -> Iterator[list[float]]:
    """Yield a list of the seconds of each part's forward, which is filled while the block runs."""
    took = [0.0] * len(parts)
    started = [0.0] * len(parts)

    def start(number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            started[number] = _now()

        return hook

    def stop(number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            took[number] += _now() - started[number]

        return hook

    handles = [part.register_forward_pre_hook(start(i)) for i, part in enumerate(parts)]
    handles += [part.register_forward_hook(stop(i)) for i, part in enumerate(parts)]
    try:
        yield took
    finally:
        for handle in handles:
            handle.remove()


def _now() -> float:
    # kernels run asynchronously: wait for them, unless no GPU was used in this process
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()


def _loss(output: Any) -> tuple[Tensor | None, bool]:
    own = loss_of(output)
    return (sum_of_outputs(output), False) if own is None else (own, True)
