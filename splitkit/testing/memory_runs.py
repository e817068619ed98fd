"""Measure the live bytes of real runs of a model, on copies of its inputs, and restore its state afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from splitkit.costs import default
from splitkit.costs.timing.run_inputs import copy_tensors
from splitkit.engine.pair import Pair, divide
from splitkit.frontends.joint.joint_capture import Joint, capture_joint
from splitkit.memory.measurement import MeasuredMemory, measure_memory
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.policies import SaveAll
from splitkit.testing.rehearsal import copied_inputs, state_restored

if TYPE_CHECKING:
    from splitkit.engine.split import Split
    from splitkit.testing.models import Example


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
