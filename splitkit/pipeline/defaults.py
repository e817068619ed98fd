"""Checks schedules, microbatches and replicas of a policy, and fills in their defaults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitkit.errors import PolicyError
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import is_single, pipeline_order, schedule_named, words_of
from splitkit.plans.plan_request import PlanRequest
from splitkit.solvers.placement.problem import Floats

MOST_REPLICATED = 64
"""The most devices for which plans with replicas are searched."""


def require_schedule(policy: object, schedule: str | None, microbatches: int | None, stages: int) -> None:
    """Refuse a schedule that does not allow these numbers of stages and microbatches.

    Raises:
        ScheduleError: SK330; says which numbers it allows.
        PolicyError: SK302 for microbatches without a schedule.
    """
    if schedule is not None:
        pipeline_order(schedule, stages, microbatches_of(microbatches, stages))
    elif microbatches is not None:
        name = type(policy).__name__
        raise PolicyError("SK302", f"{name}: microbatches={microbatches!r} without a schedule", 'Add schedule="1f1b".')


def require_replicas(
    policy: object, degrees: Sequence[int], devices: int, schedule: str | None, microbatches: int | None, *, least: bool
) -> None:
    """Refuse options that do not work with replicated stages.

    Args:
        policy: the policy, which errors name.
        degrees: the numbers of replicas that a stage may have, increasing.
        devices: the number of devices.
        schedule: the schedule of the pipeline, if any.
        microbatches: per step; by default two per device.
        least: whether the user asks for the least memory.

    Raises:
        ScheduleError: SK330 for a schedule that does not allow the largest possible number of stages.
        PolicyError: SK302 for options that do not work with replicas; says which do.
    """
    name = f"{type(policy).__name__}(replicas={tuple(degrees)})"
    if devices > MOST_REPLICATED:
        remedy = f"Ask for {MOST_REPLICATED} devices at most, or leave replicas out."
        raise PolicyError("SK302", f"{name} for {devices} devices", remedy)
    if least:
        raise PolicyError("SK302", f"{name} with memory='least'", "Give the memory in bytes, or leave replicas out.")
    if schedule is None:
        require_schedule(policy, None, microbatches, devices)
        return
    if not schedule_named(schedule).is_single:
        reason = f"{name} with schedule={schedule!r}, which puts two stages on a rank"
        raise PolicyError("SK302", reason, f"Use {words_of(is_single)}, or leave replicas out.")
    require_schedule(policy, schedule, microbatches_of(microbatches, devices), devices // degrees[0])


def ranks_of(schedule: str | None, microbatches: int | None, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; without a schedule each stage has its own."""
    if schedule is None:
        return tuple(range(stages))
    return tuple(pipeline_order(schedule, stages, microbatches_of(microbatches, stages)).rank_of)


def microbatches_of(given: int | None, stages: int) -> int:
    """Return the microbatches of a step; by default two per stage."""
    return 2 * stages if given is None else given


def planned_order(request: PlanRequest, schedule: str, microbatches: int | None, stages: int) -> PipelineOrder:
    """Return the order of a schedule for the stages of a plan; what is not said is as the plan was made for.

    Raises:
        ScheduleError: SK330 for a schedule that is unknown or does not allow these numbers.
    """
    own = request.schedule is not None and schedule_named(schedule).name == schedule_named(request.schedule).name
    count = microbatches_of(request.microbatches if microbatches is None else microbatches, stages)
    return pipeline_order(schedule, stages, count, request.ranks if own else None)


def by_rank(loads: Floats, rank_of: Sequence[int]) -> tuple[Floats, int]:
    """Return the load of each rank, (ranks,) seconds, and the most loaded stage of the most loaded rank."""
    total: Floats = np.bincount(rank_of, loads).astype(np.float64)
    here = np.array(rank_of, np.int64) == total.argmax()
    return total, int(np.where(here, loads, -1.0).argmax())
