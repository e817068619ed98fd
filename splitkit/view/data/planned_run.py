"""Simulates the step of the schedule that a plan in stages was made for."""

from __future__ import annotations

from collections.abc import Sequence

from splitkit.costs.links import links_of
from splitkit.errors import SplitError
from splitkit.pipeline.purpose import planned_order
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.plans.record import Plan


def planned_run(plan: Plan, stages: Sequence[StageCosts]) -> ScheduleRun | None:
    """Return the step of the schedule, microbatches and links that a plan was made for.

    It is ``None`` if the plan does not know a schedule, if the schedule does not go with the stages, or if values wait
    on the host and it is not known how long their copies take.
    """
    asked = plan.request
    if asked.schedule is None or (plan.offloaded and all(stage.copies is None for stage in stages)):
        return None
    try:
        order = planned_order(asked, asked.schedule, None, len(stages))
        return simulate_schedule(stages, order, links=links_of(asked.links))
    except SplitError:  # a plan file of another hand may name what does not go together
        return None
