"""Assert that a split computes what the whole computes, and that a plan can be carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from splitkit.engine.complete import check_plan, complete_plan
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.part_order import part_order
from splitkit.plans.record import Plan
from splitkit.testing.compare import compare
from splitkit.testing.differences import GRADIENT_TOLERANCE


def assert_same(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *inputs: Any,
    seed: int = 0,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> None:
    """Assert law 1: outputs, buffers and inputs are bitwise equal, gradients up to rounding. See `splitkit.compare`.

    Raises:
        CheckError: SK701, naming the tensors that differ.
    """
    compare(reference, candidate, *inputs, seed=seed, tolerance=tolerance, **kwargs).raise_if_different()


def assert_legal(flow: Dataflow, plan: Plan) -> None:
    """Assert law 4: raise a PlanError if the plan cannot be carried out correctly."""
    whole = complete_plan(flow, plan)
    check_plan(flow, whole)
    part_order(flow, whole)
