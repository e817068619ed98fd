"""Plans again with one more device, one fewer, or more memory, and says what the new plan is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitkit.checks import nbytes
from splitkit.costs import roofline
from splitkit.errors import SplitError
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.defaults import ranks_of
from splitkit.plans.record import Plan
from splitkit.policies import Devices, MemoryBudget, Stages
from splitkit.prices import Costs
from splitkit.search.devices.device_request import DeviceRequest
from splitkit.search.plan_figures import StageFigures, StagePricing

MORE = 1.1
"""How many times the memory is asked about."""


@dataclass(frozen=True)
class PlanVariant:
    """The plan of a changed request.

    Attributes:
        change: ``"one more device"``, ``"one device fewer"`` or ``"10 % more memory"``.
        value: the objective of its plan; ``None`` if there is none.
        figures: what it costs; ``None`` likewise.
        refusal: why there is no plan.
        unit: the unit of its times; devices of one kind may have other prices than devices that differ.
    """

    change: str
    value: float | None
    figures: StageFigures | None
    refusal: str = ""
    unit: str = "s"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        figures = None if self.figures is None else self.figures.to_dict()
        known = {"change": self.change, "value": self.value, "figures": figures}
        return {**known, "refusal": self.refusal or None, "unit": self.unit}


def plan_variants(pricing: StagePricing, plan: Plan, policy: object, costs: Costs) -> tuple[PlanVariant, ...]:
    """Return the plans of the requests next to the one that a plan was made for, planned again."""
    return tuple(_planned(change, pricing, other, costs) for change, other in _others(pricing, policy, len(plan.parts)))


def _planned(change: str, pricing: StagePricing, policy: Any, costs: Costs) -> PlanVariant:
    flow = pricing.flow
    try:
        made = policy() if callable(policy) else policy
        asked = pricing.request
        if isinstance(made, Devices) and isinstance(asked, DeviceRequest) and len(set(asked.kinds)) > 1:
            costs = roofline(flow, find_device(next(iter(made.given.values()))))  # theirs, if they are alike now
        plan = made.assign(flow, costs)
        own = StagePricing.of(flow, plan, costs, made)
        figures = own.figures(plan)
    except SplitError as error:
        return PlanVariant(change, None, None, error.reason)
    return PlanVariant(change, figures.value if plan.claim is None else plan.claim.value, figures, unit=own.unit)


def _others(pricing: StagePricing, policy: object, parts: int) -> Iterator[tuple[str, Any]]:
    """Yield (change, function that makes the changed policy); making one may be refused."""
    if isinstance(policy, Stages):
        each = _stages_of_rank(policy)
        count = pricing.microbatches(parts)
        yield "one more device", lambda: _with_count(policy, policy.n + each, count)
        if policy.n > each:
            yield "one device fewer", lambda: _with_count(policy, policy.n - each, count)
    if isinstance(policy, Devices):
        given = dict(policy.given)
        last = list(given)[-1]
        more = f"{last}+1" if isinstance(policy.devices, Mapping) else len(given)
        if policy.links is None or isinstance(policy.links, str):
            yield "one more device", lambda: _with_devices(policy, {**given, more: given[last]})
        if len(given) > 1:
            fewer = {key: device for key, device in given.items() if key != last}
            yield "one device fewer", lambda: _with_devices(policy, fewer)
    if isinstance(policy, Stages | MemoryBudget) and policy.memory not in (None, "least"):
        yield "10 % more memory", lambda: replace(policy, memory=_scaled(policy.memory))
    if isinstance(policy, Devices):
        limits = pricing.limits(parts)
        if all(limit is not None for limit in limits):
            yield "10 % more memory", lambda: replace(policy, memory=[int(MORE * (limit or 0)) for limit in limits])


def _stages_of_rank(policy: Stages) -> int:
    """Return how many stages a device runs."""
    if policy.schedule is None or policy.replicas != (1,):
        return 1
    return policy.n // (max(ranks_of(policy.schedule, policy.microbatches, policy.n)) + 1)


def _with_count(policy: Stages, count: int, microbatches: int) -> Stages:
    """Return the policy for another number of stages, with the same number of microbatches."""
    memory: Any = policy.memory
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        memory = [*memory, *[memory[-1]] * (count - len(memory))][:count]
    degrees: Any = policy.replicas
    step = None if policy.schedule is None else microbatches
    return replace(
        policy, n=count, memory=memory, microbatches=step, replicas=[degree for degree in degrees if degree <= count]
    )


def _with_devices(policy: Devices, devices: Mapping[Any, Any]) -> Devices:
    memory: Any = policy.memory
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        memory = [*memory, memory[-1]][: len(devices)]
    only = {pattern: [key for key in keys if key in devices] for pattern, keys in policy.only.items()}
    given = devices if isinstance(policy.devices, Mapping) else list(devices.values())
    return replace(policy, devices=given, memory=memory, only=only)


def _scaled(memory: Any) -> Any:
    """Return the memory that is asked about."""
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        return [_scaled(one) for one in memory]
    return None if memory is None else int(MORE * nbytes("explain", "memory", memory))
