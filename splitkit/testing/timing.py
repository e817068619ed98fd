"""How long a model of parts takes, as a whole and part by part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitkit.frontends.trainstep import sum_of_outputs
from splitkit.losses import loss_of
from splitkit.testing.rehearsal import as_it_was, own_inputs

if TYPE_CHECKING:
    from splitkit.testing.models import Example


@dataclass(frozen=True)
class Timed:
    """One step, forward and backward.

    Attributes:
        forward: seconds.
        backward: seconds, ``None`` if nothing takes a gradient.
        parts: seconds of the forward of each part, in order.
        output: what the model returned.
        loss: its loss, else the sum of its outputs.
        loss_is_models: which of the two.
    """

    forward: float
    backward: float | None
    parts: tuple[float, ...]
    output: Any
    loss: float | None
    loss_is_models: bool


def best(module: nn.Module, parts: Collection[nn.Module], example: Example, seed: int, repeat: int) -> Timed:
    """The fastest of ``repeat`` steps of a module with these parts, all from one state, on copies of the inputs."""
    runs = [_step(module, parts, example, seed) for _ in range(repeat)]
    return min(runs, key=lambda run: run.forward + (run.backward or 0.0))


def _step(module: nn.Module, parts: Collection[nn.Module], example: Example, seed: int) -> Timed:
    args, kwargs = own_inputs(example)
    with as_it_was(module, seed):
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
    return Timed(forward, backward, tuple(took), output, value, is_models)


@contextmanager
def _stopwatch(parts: Collection[nn.Module]) -> Iterator[list[float]]:
    """Seconds of each part's forward, filled in while the block runs."""
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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()


def _loss(output: Any) -> tuple[Tensor | None, bool]:
    own = loss_of(output)
    return (sum_of_outputs(output), False) if own is None else (own, True)
