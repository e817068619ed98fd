"""Which schedules go with a policy: ranks, microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitkit.errors import PolicyError
from splitkit.solvers.placement.problem import Floats

MOST_REPLICATED = 64
"""The most devices over which stages with replicas are looked for."""


def require_schedule(policy: object, schedule: str | None, microbatches: int | None, stages: int) -> None:
    """Refuse a schedule that does not go with so many stages and microbatches.

    Raises:
        ScheduleError: SK330; says what does.
        PolicyError: SK302 for microbatches without a schedule.
    """
    if schedule is not None:
        from splitkit.pipeline.torch_orders import pipeline_order

        pipeline_order(schedule, stages, microbatches_of(microbatches, stages))
    elif microbatches is not None:
        name = type(policy).__name__
        raise PolicyError("SK302", f"{name}: microbatches={microbatches!r} without a schedule", 'Add schedule="1f1b".')


def require_replicas(
    policy: object, degrees: Sequence[int], devices: int, schedule: str | None, microbatches: int | None, *, least: bool
) -> None:
    """Refuse what does not go with stages on several devices.

    Args:
        policy: on whose behalf.
        degrees: on how many devices a stage may stand, increasing.
        devices: how many there are.
        schedule: of the pipeline.
        microbatches: of a step; two for each device, if not given.
        least: whether the least memory is asked for.

    Raises:
        ScheduleError: SK330 for a schedule that does not go with the most stages that there can be.
        PolicyError: SK302 for what is not known of replicas; says what is.
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
    from splitkit.pipeline.torch_orders import is_single

    if not is_single(schedule):
        reason = f"{name} with schedule={schedule!r}, which puts two stages on a rank"
        raise PolicyError("SK302", reason, "Use '1f1b' or 'gpipe', or leave replicas out.")
    require_schedule(policy, schedule, microbatches_of(microbatches, devices), devices // degrees[0])


def ranks_of(schedule: str | None, microbatches: int | None, stages: int) -> tuple[int, ...]:
    """The rank of each stage; each has its own without a schedule."""
    if schedule is None:
        return tuple(range(stages))
    from splitkit.pipeline.torch_orders import pipeline_order

    return tuple(pipeline_order(schedule, stages, microbatches_of(microbatches, stages)).rank_of)


def microbatches_of(given: int | None, stages: int) -> int:
    """Of a step: two for each stage, if not given."""
    return 2 * stages if given is None else given


def by_rank(loads: Floats, rank_of: Sequence[int]) -> tuple[Floats, int]:
    """(ranks,) seconds of the stages of each rank together, and the most loaded stage of the most loaded rank."""
    total: Floats = np.bincount(rank_of, loads).astype(np.float64)
    here = np.array(rank_of, np.int64) == total.argmax()
    return total, int(np.where(here, loads, -1.0).argmax())
