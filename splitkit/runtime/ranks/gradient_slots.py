"""Choose the buffers in which gradients of a staged training step are sent upstream over a border.

Torch's pipelining sends one gradient back for each activation that requires one, and takes its shape from it. The
graphs of a staged step may send back any values, so each of them travels in the slot of an activation of its size and
dtype. Between layers these are the activation's own gradients; inside a layer, the slot may be another activation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from splitkit.engine.joint_stages.staged_step import StageGraphs
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.border_values import BorderValue, border_value


@dataclass(frozen=True)
class BorderSlots:
    """How values cross the border between a stage and the next one.

    Attributes:
        activations: the values that go to the next stage, in order.
        gradients: the values that come back, in order.
        slot_of: for each gradient, the position of the activation in whose place it comes back.
    """

    activations: tuple[BorderValue, ...]
    gradients: tuple[BorderValue, ...]
    slot_of: tuple[int, ...]

    @property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to expect; those with a slot require a gradient."""
        return tuple(
            value.meta_tensor.detach().clone().requires_grad_(i in self.slot_of)
            for i, value in enumerate(self.activations)
        )

    def packed(self, gradients: Sequence[torch.Tensor], device: torch.device, where: str) -> list[torch.Tensor | None]:
        """Return what goes back for each activation: its slot's gradient in the activation's shape, or ``None``."""
        found: list[torch.Tensor | None] = [None] * len(self.activations)
        for value, gradient, slot in zip(self.gradients, gradients, self.slot_of, strict=True):
            found[slot] = value.packed(gradient, device, where).view(self.activations[slot].meta_tensor.shape)
        return found

    def unpacked(self, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients from what came back for each activation."""
        return [
            value.unpacked(slots[slot].view(value.meta_tensor.shape))
            for value, slot in zip(self.gradients, self.slot_of, strict=True)
        ]


def border_slots(before: StageGraphs, after: StageGraphs, number: int) -> BorderSlots:
    """Return how values cross the border between two stages.

    Args:
        before: the graphs of the stage before the border.
        after: those of the stage after it.
        number: the number of the stage before.

    Raises:
        PipelineError: SK801 for a value that cannot be sent, or a gradient for which no activation has a slot.
    """
    activations = _values(before.sent, _nodes(before.forward))
    gradients = _values(after.gradients_sent, _nodes(after.backward))
    free = [i for i, value in enumerate(activations) if value.scalar is None and value.like.is_floating_point()]
    slots: list[int] = []
    for gradient in gradients:
        fitting = (i for i in free if _size(activations[i]) == _size(gradient) and i not in slots)
        slot = next(fitting, None)
        if slot is None:
            raise PipelineError(
                "SK801",
                f"stage {number + 1} sends {gradient.name} back to stage {number}, but of the activations that it "
                f"received ({', '.join(before.sent) or 'none'}) none is left of that size and dtype",
                "Cut a few nodes earlier or later, between two layers: torch sends one gradient back per activation.",
                [gradient.name],
            )
        slots.append(slot)
    return BorderSlots(activations, gradients, tuple(slots))


def _size(value: BorderValue) -> tuple[int, torch.dtype]:
    return prod(value.like.shape), value.like.dtype


def _nodes(graph: torch.fx.GraphModule) -> Mapping[str, Node]:
    return {node.name: node for node in graph.graph.nodes}


def _values(names: Sequence[str], nodes: Mapping[str, Node]) -> tuple[BorderValue, ...]:
    return tuple(border_value(nodes[name], frozenset(), frozenset()).sent(False) for name in names)
