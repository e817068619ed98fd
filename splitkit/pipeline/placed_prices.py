"""The prices that a plan was made with, each part on the device that it was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx import Node

from splitkit.costs import Costs, Device, roofline
from splitkit.costs.base import WrappedCosts
from splitkit.costs.recorded import costs_of
from splitkit.costs.roofline import mesh_of
from splitkit.costs.training import FromOps, with_backward
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.joint_marks import is_joint
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.prices import as_given, includes_backward, unit_of
from splitkit.short_repr import brief


def costs_of_plan(plan: Plan, graph: fx.GraphModule | Dataflow) -> Costs:
    """Return the prices that a plan was made with, and the default costs of a plan that does not know them.

    They include backward if the plan is for training. If its devices differ, a node costs what it takes on the device
    of its home, and `in_part` gives what a copy costs.

    Raises:
        FileError: SK501 if the plan's file describes no device.
    """
    base, trains = costs_of(plan.prices, graph), plan.request.purpose == "training" and not is_joint(graph.graph)
    if plan.request.kinds < 2 or not any(part.planned_on is not None for part in plan.parts.values()):
        return with_backward(base, facts_of(graph)) if trains else base
    flow, trains = facts_of(graph), trains or includes_backward(as_given(base))
    devices = plan.request.devices
    mesh = mesh_of(base)
    known: dict[Device, Costs] = {device: roofline(flow, device, mesh=mesh) for device in devices.values()}
    if trains:
        base, known = with_backward(base, flow), {device: with_backward(costs, flow) for device, costs in known.items()}
    of_part = {key: known[devices[part.planned_on]] for key, part in plan.parts.items() if part.planned_on is not None}
    return (PlacedStepCosts if trains else PlacedCosts)(base, plan, of_part)


def rerun_seconds(
    plan: Plan, forward: Mapping[PartKey, float], backward: Mapping[PartKey, float]
) -> dict[PartKey, float]:
    """Return part -> the seconds of forward that its backward runs again: of all of it, if the part is checkpointed.

    Args:
        plan: the plan.
        forward: part -> the seconds of its forward.
        backward: part -> the seconds of its backward without them; a part that has none runs nothing again.
    """
    again = {key for key, part in plan.parts.items() if part.call == "checkpoint"}
    return {key: seconds if key in again and backward[key] else 0.0 for key, seconds in forward.items()}


@dataclass(frozen=True)
class PlacedCosts(WrappedCosts):
    """Prices of a plan whose parts are on different devices.

    Attributes:
        costs: the prices of nodes of parts without a device.
        plan: the plan.
        of_part: the prices of the device of each part.
    """

    costs: Costs
    plan: Plan = field(repr=False)
    of_part: Mapping[PartKey, Costs] = field(repr=False)

    __repr__ = brief

    @property
    def note(self) -> str:
        """What the prices are, for reports."""
        names = dict.fromkeys(str(getattr(costs, "note", "")) for costs in self.of_part.values())
        return "; ".join(names)

    @property
    def unit(self) -> str:
        """The unit of the prices."""
        return unit_of(next(iter(self.of_part.values())))

    def at_home(self, node: Node) -> Costs:
        """Return the prices of the device of a node's home."""
        keys = self.plan.places.get(node) or (PARENT,)
        return self.of_part.get(keys[0], self.costs)

    def seconds(self, node: Node) -> float:
        """Return what a node costs on the device of its home."""
        return self.at_home(node).seconds(node)

    def flops(self, node: Node) -> float:
        """Return the FLOPs of a node, which are the same on all devices."""
        return self.costs.flops(node)


class PlacedStepCosts(PlacedCosts):
    """`PlacedCosts` that include backward."""

    def backward(self, node: Node) -> float:
        """Return the backward of a node as a multiple of its forward, on the device of its home."""
        given: Any = as_given(self.at_home(node))
        ratio: float = given.backward(node)
        return ratio


def in_part(costs: Costs, key: PartKey) -> Costs:
    """Return the prices of nodes in one part of the plan of `PlacedCosts`; other costs as they are."""
    given = as_given(costs)
    inner = as_given(given.costs) if isinstance(given, FromOps) else given
    if not isinstance(inner, PlacedCosts):
        return costs
    own = inner.of_part.get(key, inner.costs)
    return replace(given, costs=own) if isinstance(given, FromOps) else own
