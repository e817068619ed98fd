"""Holds the sizes of the microbatches of a step, and decides in which shapes values cross the borders in it.

If all microbatches have the same sizes, each value is sent in its own shape. Torch's stages receive every microbatch
into tensors of one shape, so if sizes differ, each value is sent as a flat tensor as large as its largest::

    microbatch 0   [2, 5, 32]      320 elements, 320 sent
    microbatch 1   [2, 3, 32]      192 elements, 320 sent
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

from splitkit.checks import shown
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.border_values import BorderValue
from splitkit.runtime.ranks.graph_sizes import Sizes
from splitkit.runtime.ranks.stage_chain import Chain

Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Mapping[str, Any]], Any]
"""How the losses of the microbatches make the loss of a step: see `splitkit.runtime.pipeline`."""


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


def shares_of(reduction: Reduction, rows: Sequence[int], batch: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return microbatch -> the factor of its loss in the loss of the step.

    Args:
        reduction: ``"sum"`` for 1; ``"mean"`` for its share of the rows; or a function that returns its weight.
        rows: microbatch -> the number of its rows.
        batch: microbatch -> its inputs and target, for the function.

    Raises:
        PipelineError: SK802 for a weight that is not a number of at least 0.
    """
    if reduction == "sum":
        return (Fraction(1),) * len(rows)
    if not callable(reduction):
        return tuple(Fraction(own, sum(rows)) for own in rows)
    weights = [float(reduction(inputs)) for inputs in batch]
    for number, weight in enumerate(weights):
        if not 0 <= weight < inf:
            raise PipelineError(
                "SK802",
                f"the weight of microbatch {number} is {shown(weight)}",
                "Let the reduction return how many terms the mean of a microbatch has, such as its kept labels.",
            )
    return tuple(weight / sum(weights) if weight else 0.0 for weight in weights)


def checked_reduction(reduction: object) -> Reduction:
    """Return a reduction.

    Raises:
        PipelineError: SK802 for anything else.
    """
    if reduction not in ("mean", "sum") and not callable(reduction):
        remedy = 'Give "mean", "sum", or a function of the inputs of a microbatch that returns its weight.'
        raise PipelineError("SK802", f"the reduction is {shown(reduction)}", remedy)
    return reduction


def scaled(loss: torch.Tensor, share: Fraction | float) -> torch.Tensor:
    """Return the term of a microbatch's loss in the loss of the step."""
    return loss * share if isinstance(share, float) else loss * share.numerator / share.denominator


def reduced(losses: torch.Tensor, shares: Sequence[Fraction | float]) -> torch.Tensor:
    """Return the loss of a step. A microbatch of weight 0, whose mean is of nothing, does not count.

    Args:
        losses: shape (microbatches,).
        shares: microbatch -> its factor.
    """
    if not any(shares):
        return losses.sum() * float("nan")  # the mean of nothing, as in eager mode
    if all(share == Fraction(1, len(shares)) for share in shares):
        return losses.mean()
    factors = losses.new_tensor([float(share) for share in shares])
    return torch.where(factors == 0, 0, losses) @ factors


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
