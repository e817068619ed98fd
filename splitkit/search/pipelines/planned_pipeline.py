"""Holds a plan of pipeline stages together with the simulated step that it was chosen for."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.record import Plan


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A plan with its simulated step.

    Attributes:
        plan: the plan.
        run: the step.
        limits: the bytes of each rank, ``None`` without limit.
        recompute: the seconds that each stage computes again.
    """

    plan: Plan
    run: ScheduleRun
    limits: tuple[int | None, ...]
    recompute: tuple[float, ...]
