"""Real runs of a model whose live bytes are measured; its state is put back afterwards, and its inputs are copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from splitkit.costs.copies import copied
from splitkit.engine.pair import Pair
from splitkit.frontends.joint import Joint, capture_joint
from splitkit.memory.measure import MeasuredMemory, measure_memory
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.policies import SaveAll
from splitkit.testing.rehearsal import as_it_was, own_inputs

if TYPE_CHECKING:
    from splitkit.engine.split import Split
    from splitkit.testing.models import Example


def forward(module: nn.Module, example: Example, seed: int) -> MeasuredMemory:
    """One forward without autograd."""
    args, kwargs = own_inputs(example)
    with torch.no_grad(), as_it_was(module, seed):
        # a partial: an input of the model may be called `allocator`
        return measure_memory(partial(module, *args, **kwargs), allocator=True)


def parts(split: Split, example: Example, seed: int) -> list[MeasuredMemory]:
    """Each part alone, on copies of what it is given in a run of the whole, which share memory as that does."""
    measured: list[MeasuredMemory] = []

    def measure(part: nn.Module, args: tuple[Any, ...]) -> None:
        with as_it_was(part, seed):
            measured.append(measure_memory(part.forward, *copied(args), allocator=True))

    args, kwargs = own_inputs(example)
    hooks = [part.register_forward_pre_hook(measure) for part in split.parts.values()]
    try:
        with torch.no_grad(), as_it_was(split.module, seed):
            split(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return measured


@dataclass(frozen=True)
class Training:
    """Forward and backward, with everything saved that backward reads.

    Attributes:
        joint: both as one graph.
        pair: both apart.
    """

    joint: Joint
    pair: Pair

    @classmethod
    def of(cls, example: Example) -> Training:
        """Capture both."""
        joint = capture_joint(example.model, *example.args, **example.kwargs)
        return cls(joint, joint.split(SaveAll()))

    @property
    def profile(self) -> MemoryProfile:
        """Their memory, simulated."""
        profile = simulate_memory(self.pair.forward, self.pair.backward, user_outputs=self.pair.outputs)
        known = {**self.joint.signature.parameters, **self.joint.signature.buffers}
        for buffer in profile.buffers:
            buffer.name = known.get(buffer.name, buffer.name)
        return profile


def training(step: Training, example: Example, seed: int) -> MeasuredMemory:
    """Forward and backward, run."""
    joint, pair = step.joint, step.pair
    primals, tangents = joint.primals(*example.args, **example.kwargs), joint.tangents()
    held = list(primals)  # the caller of a training step holds the parameters and the inputs
    with as_it_was(example.model, seed):
        measured = measure_memory(pair.run, primals, tangents, allocator=True)
    del held
    return measured
