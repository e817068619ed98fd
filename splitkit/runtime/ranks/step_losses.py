"""Makes the loss of a step of the losses of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any, Literal, TypeAlias

import torch

from splitkit.checks import shown
from splitkit.errors import PipelineError
from splitkit.short_repr import brief

NUMBER = "num_items_in_batch"
"""The input by which models of transformers divide the sum of their losses."""

Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Mapping[str, Any]], Any]
"""How the losses of the microbatches make the loss of a step: see `splitkit.runtime.pipeline`."""


@dataclass(frozen=True)
class PipelineStep:
    """The result of a training step.

    Attributes:
        loss: the loss of the step, as its reduction says, on the rank of the last stage, or with ``loss_everywhere`` on
            every rank; otherwise ``None``.
        losses: the loss of each microbatch, ``[microbatches]``, on the same ranks.
        outputs: the model's output for each microbatch of this replica, if asked for, on the rank of the last stage.
    """

    loss: torch.Tensor | None
    losses: torch.Tensor | None
    outputs: tuple[Any, ...] | None = None

    __repr__ = brief


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


def checked_reduction(reduction: object, inputs: Mapping[str, Any]) -> Reduction:
    """Return a reduction.

    Args:
        reduction: what the caller gave.
        inputs: input of the graph -> a tensor like it, or ``None``.

    Raises:
        PipelineError: SK802 for anything else, and for a mean of losses that `NUMBER` divides: they are sums.
    """
    if reduction == "mean" and inputs.get(NUMBER) is not None:
        reason = f"the graph divides its loss by {NUMBER}, so the losses of the microbatches are terms of a sum"
        raise PipelineError("SK802", reason, 'Give reduction="sum", or weights of your own.', [NUMBER])
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
