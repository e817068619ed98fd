"""Checks the steps of a pipeline, simulated and measured, that somebody gives to a picture of a plan."""

from __future__ import annotations

from splitkit.errors import ViewError
from splitkit.pipeline.measured_step import MeasuredStep
from splitkit.pipeline.run import ScheduleRun


def checked_run(run: object, count: int, what: str) -> ScheduleRun | None:
    """Return a simulated step that has as many stages as the plan has stages or parts.

    Raises:
        ViewError: SK901 if it has not.
    """
    if run is None:
        return None
    if not isinstance(run, ScheduleRun):
        remedy = "Give what splitkit.simulate_schedule returns."
        raise ViewError("SK901", f"run is a {type(run).__name__}, not a simulated step", remedy)
    if len(run.stages) != count:
        reason = f"the run has {len(run.stages)} stages, but the plan has {count} {what}"
        of = "splitkit.stage_costs(flow, plan, costs)" if what == "parts" else "step.stage_costs(costs)"
        raise ViewError("SK901", reason, f"Simulate the stages of this plan: {of}.")
    return run


def checked_measurement(measured: object, run: ScheduleRun | None) -> MeasuredStep:
    """Return a measured step that has the actions of the simulated one.

    Raises:
        ViewError: SK901 if it has not.
    """
    if not isinstance(measured, MeasuredStep):
        remedy = "Give what StepRecorder.measured or splitkit.MeasuredStep.load returns."
        raise ViewError("SK901", f"measured is a {type(measured).__name__}, not a step that ran", remedy)
    remedy = "Simulate the actions that ran: run=splitkit.simulate_schedule(stages, measured.order)."
    if run is None:
        raise ViewError("SK901", "a measured step is drawn next to a simulated one, but run is missing", remedy)
    ran, planned = ({(e.rank, e.action) for e in step.timeline} for step in (measured, run))
    if other := min(ran ^ planned, default=None):
        where = "only measured" if other in ran else "only simulated"
        reason = f"the measured step is not the simulated one: {other[1]} on rank {other[0]} was {where}"
        raise ViewError("SK901", reason, remedy)
    return measured
