"""What a plan is for, inference or training with an optimizer: one default for Python and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from splitkit.checks import memory_of
from splitkit.costs.links import HostLink, Links, links_data
from splitkit.errors import PolicyError
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import pipeline_order, schedule_named, words_of
from splitkit.plans.parts import PlanRequest
from splitkit.prices import Costs, Optimizer, as_given, includes_backward
from splitkit.solvers.placement.problem import Floats


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


def request_of(policy: object, costs: Costs, *, joint: bool = False) -> PlanRequest:
    """Return what a policy, or the one inside it, plans for, by the names of its attributes.

    A policy of devices, and one that counts memory or a cache, plans for inference unless it has an optimizer, a
    schedule or prices with backward. A plan that does not depend on its purpose does not name one.

    Args:
        policy: the policy.
        costs: the prices of the plan.
        joint: whether the graph has forward and backward, so that no plan of it is for inference.
    """
    while getattr(policy, "schedule", None) is None and getattr(policy, "policy", None) is not None:
        policy = policy.policy  # type: ignore[attr-defined]
    given: Any = policy
    schedule = given.schedule if isinstance(getattr(given, "schedule", None), str) else None
    optimizer = counted_optimizer(getattr(given, "optimizer", None), schedule, None if joint else costs)
    devices = getattr(given, "given", None)
    devices = {key: find_device(one) for key, one in devices.items()} if isinstance(devices, Mapping) else {}
    memory, tokens = _memory(given), getattr(given, "tokens", 0)
    objective, offload = getattr(given, "objective", None), getattr(given, "offload", None)
    matters = bool(devices or tokens or memory is not None or objective == "tokens")
    return PlanRequest(
        "training" if optimizer else "inference" if matters and not joint else "",
        optimizer,
        schedule,
        _microbatches(given) if schedule else None,
        getattr(given, "ranks", None) if schedule else None,
        links_data(links if isinstance(links := getattr(given, "links", None), str | Links) else None),
        memory,
        tokens,
        {str(node): nbytes for node, nbytes in (getattr(given, "cache", None) or {}).items()} or None,
        tuple(getattr(given, "together", ())),
        {pattern: tuple(keys) for pattern, keys in getattr(given, "only", {}).items()},
        devices,
        getattr(given, "chunk", None) if tokens or objective == "tokens" else None,
        None if offload is None else asdict(HostLink.of(offload)),
    )


def _microbatches(policy: Any) -> int | None:
    count, stages = getattr(policy, "microbatches", None), getattr(policy, "n", None)
    return count if stages is None else microbatches_of(count, stages)


def _memory(policy: Any) -> int | tuple[int | None, ...] | None:
    """Return the bytes of all ranks or devices, or of each."""
    given = getattr(policy, "memory", None)
    if given is None or given == "least":
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        return memory_of(policy, given, 1)[0]
    return memory_of(policy, given, len(given))


# Checks schedules, microbatches and replicas of a policy, and fills in their defaults.


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
    if least:
        raise PolicyError("SK302", f"{name} with memory='least'", "Give the memory in bytes, or leave replicas out.")
    if schedule is None:
        require_schedule(policy, None, microbatches, devices)
        return
    if not schedule_named(schedule).is_single:
        reason = f"{name} with schedule={schedule!r}, which puts two stages on a rank"
        raise PolicyError("SK302", reason, f"Use {words_of(lambda known: known.is_single)}, or leave replicas out.")
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
