"""What a plan is for, inference or training with an optimizer: one default for Python and the command line."""

from __future__ import annotations

from splitkit.prices import Costs, Optimizer, as_given, includes_backward


def counted_optimizer(optimizer: Optimizer, schedule: str | None, costs: Costs | None = None) -> Optimizer:
    """Return the optimizer whose state counts: the given one, else Adam where training is asked for, else none.

    A schedule of forward and backward asks for training, and so do prices that include backward
    (`splitkit.costs.training`, ``--training``).
    """
    if optimizer is None and (schedule is not None or includes_backward(as_given(costs))):
        return "adam"
    return optimizer


def purpose(optimizer: Optimizer) -> str:
    """Return what a plan is for, in words: ``inference``, ``training with adam``."""
    return f"training with {optimizer}" if optimizer else "inference"
