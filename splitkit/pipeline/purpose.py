"""What a plan is for, inference or training with an optimizer: one default for Python and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitkit.checks import memory_of
from splitkit.costs.links import Links, links_data
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.defaults import microbatches_of
from splitkit.plans.plan_request import PlanRequest
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
    matters = bool(devices or tokens or memory is not None or getattr(given, "objective", None) == "tokens")
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
