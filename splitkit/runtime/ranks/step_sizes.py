"""Holds the sizes of the microbatches of a step, and decides in which shapes values cross the borders in it.

If all microbatches have the same sizes, each value is sent in its own shape. Torch's stages receive every microbatch
into tensors of one shape, so if sizes differ, each value is sent as a flat tensor as large as its largest::

    microbatch 0   [2, 5, 32]      320 elements, 320 sent
    microbatch 1   [2, 3, 32]      192 elements, 320 sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch.fx import Node

from splitkit.runtime.ranks.border_values import BorderValue
from splitkit.runtime.ranks.graph_sizes import Sizes
from splitkit.runtime.ranks.stage_chain import Chain


@dataclass(frozen=True)
class StepSizes:
    """The sizes of the microbatches of a step.

    Attributes:
        sizes: microbatch -> the sizes of its inputs.
        rows: microbatch -> the number of its rows.
        shares: microbatch -> the factor of its loss in the loss of the step; empty on ranks that compute no loss.
    """

    sizes: tuple[Sizes, ...]
    rows: tuple[int, ...]
    shares: tuple[Fraction | float, ...] = ()


@dataclass(frozen=True)
class MessageShapes:
    """The shapes in which values cross the borders in a step.

    Attributes:
        sizes: the sizes of every microbatch; empty if they differ.
        padded: value -> the number of elements that are sent; empty if all microbatches have the same sizes.
    """

    sizes: Sizes = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)

    def of(self, value: BorderValue) -> BorderValue:
        """Return how a value crosses a border."""
        count = self.padded.get(value.name)
        return value.at(self.sizes) if count is None else value.padded_to(count)


def message_shapes(chain: Chain, wanted: Sequence[Node], step: StepSizes) -> MessageShapes:
    """Return the shapes in which values cross the borders in a step; they are the same on all ranks.

    Args:
        chain: the stages.
        wanted: the values that the last stage needs.
        step: the sizes of all microbatches of the step.
    """
    different = list({tuple(each.items()): each for each in step.sizes}.values())
    if len(different) == 1:
        return MessageShapes(different[0])
    crossing = dict.fromkeys(n for stage in range(chain.stages - 1) for n in chain.border(stage, wanted))
    values = [chain.value(node) for node in crossing]
    largest = {v.name: max(v.at(sizes).like.numel() for sizes in different) for v in values if v.scalar is None}
    return MessageShapes(padded=largest)
