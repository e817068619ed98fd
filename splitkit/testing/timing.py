"""Time a training step of a model of parts, as a whole and part by part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.costs import default
from splitkit.costs.run_inputs import copy_tensors
from splitkit.engine.pair import Pair, divide
from splitkit.frontends.joint_capture import Joint, capture_joint, sum_of_outputs
from splitkit.graph.losses import loss_of
from splitkit.memory.measurement import MeasuredMemory, measure_memory
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.policies import SaveAll
from splitkit.testing.differences import untouched

if TYPE_CHECKING:
    from splitkit.engine.split import Split
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

    def start(number: int, module: nn.Module, args: Any) -> None:
        started[number] = _now()

    def stop(number: int, module: nn.Module, args: Any, output: Any) -> None:
        took[number] += _now() - started[number]

    handles = [part.register_forward_pre_hook(partial(start, i)) for i, part in enumerate(parts)]
    handles += [part.register_forward_hook(partial(stop, i)) for i, part in enumerate(parts)]
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


# Measure the live bytes of real runs of a model, on copies of its inputs, and restore its state afterwards.


def measure_forward(module: nn.Module, example: Example, seed: int) -> MeasuredMemory:
    """Measure one forward without autograd."""
    args, kwargs = copied_inputs(example)
    with torch.no_grad(), state_restored(module, seed):
        # a partial, since an input of the model may be named `allocator`
        return measure_memory(partial(module, *args, **kwargs), allocator=True)


def measure_parts(split: Split, example: Example, seed: int) -> list[MeasuredMemory]:
    """Measure each part alone, on copies of its inputs in a run of the split, which share memory as those do."""
    measured: list[MeasuredMemory] = []

    def measure(part: nn.Module, args: tuple[Any, ...]) -> None:
        with state_restored(part, seed):
            measured.append(measure_memory(part.forward, *copy_tensors(args), allocator=True))

    args, kwargs = copied_inputs(example)
    hooks = [part.register_forward_pre_hook(measure) for part in split.parts.values()]
    try:
        with torch.no_grad(), state_restored(split.module, seed):
            split(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return measured


@dataclass(frozen=True)
class TrainingRun:
    """Forward and backward of a model, with everything saved that backward reads.

    Attributes:
        joint: forward and backward as one graph.
        pair: the two halves of that graph.
    """

    joint: Joint
    pair: Pair

    @classmethod
    def of(cls, example: Example) -> TrainingRun:
        """Capture forward and backward of an example."""
        joint = capture_joint(example.model, *example.args, **example.kwargs)
        return cls(joint, divide(joint.flow, SaveAll(), default(joint.graph_module)))

    @property
    def profile(self) -> MemoryProfile:
        """The simulated memory of forward and backward."""
        profile = simulate_memory(self.pair.forward, self.pair.backward, user_outputs=self.pair.outputs)
        known = {**self.joint.signature.parameters, **self.joint.signature.buffers}
        for buffer in profile.buffers:
            buffer.name = known.get(buffer.name, buffer.name)
        return profile


def measure_training(step: TrainingRun, example: Example, seed: int) -> MeasuredMemory:
    """Measure forward and backward."""
    joint, pair = step.joint, step.pair
    primals, tangents = joint.primals(*example.args, **example.kwargs), joint.tangents()
    held = list(primals)  # the caller of a training step holds the parameters and the inputs
    with state_restored(example.model, seed):
        measured = measure_memory(pair.run, primals, tangents, allocator=True)
    del held
    return measured


# Run a model without side effects: on copies of its inputs, with its state restored afterwards.


@contextmanager
def state_restored(module: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's RNG inside the block; restore the caller's RNG state and the module's state afterwards."""
    with untouched(module), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def copied_inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of an example's inputs, for a run that may write to them; they share memory as the originals do.

    Copies that require grad are leaves without a gradient.
    """
    given = (example.args, example.kwargs)
    args, kwargs = pytree.tree_map(_with_gradient, copy_tensors(given), given)
    return args, kwargs


def _with_gradient(copy: Any, given: Any) -> Any:
    return copy.requires_grad_(given.requires_grad) if isinstance(copy, Tensor) else copy
