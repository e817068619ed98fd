"""The frontier of a divided backward: the bytes that wait for each choice of the seconds that are deferred."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from splitkit.checks import is_whole, nbytes, shown
from splitkit.costs import Costs, default
from splitkit.errors import PolicyError
from splitkit.frontends.joint.joint_capture import Joint
from splitkit.plans.policy import PolicyLike, as_plan, require_policy
from splitkit.plans.record import Plan
from splitkit.policies.save_all import SaveAll
from splitkit.prices import require_costs
from splitkit.search.deferral.deferral_cuts import DeferralNetwork
from splitkit.search.deferral.deferral_problem import Deferral, deferrals
from splitkit.search.deferral.divided_backward import backward_parts, divided, plan_in_stages
from splitkit.short_repr import brief
from splitkit.training.flow import JointFlow, as_joint
from splitkit.units import size


@dataclass(frozen=True, eq=False)
class DeferralPoint:
    """One point of a frontier: the best division of backward at some prices.

    Attributes:
        choice: what each part computes.
        price: the lowest price, in bytes per second, at which no other point is better; it is best up to the price of
            the next point.
    """

    choice: Deferral
    price: float
    _staged: Plan = field(repr=False)
    _stage: int = field(repr=False)

    __repr__ = brief

    @property
    def waiting(self) -> int:
        """The bytes that are held between the two parts."""
        return self.choice.nbytes

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the input part and of the weight part, in the unit of the costs."""
        return self.choice.seconds

    @property
    def moved(self) -> float:
        """Seconds of nodes in the input part that need not be there, and of nodes that run in both parts."""
        return self.choice.moved

    @cached_property
    def plan(self) -> Plan:
        """The plan in which the backward of this stage is divided like this."""
        return divided(self._staged, {self._stage: self.choice})

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        early, late = self.seconds
        return {"waiting": self.waiting, "input": early, "weight": late, "moved": self.moved, "price": self.price}


@dataclass(frozen=True, eq=False)
class DeferralFrontier:
    """All divisions of one backward that are best at some price (`splitkit.policies.SplitBackward`).

    ::

        frontier = DeferralFrontier(joint, splitkit.costs.roofline(joint.graph_module, "h100"))
        frontier.points[0]                     # nothing waits
        frontier.within("100MiB").seconds      # the most that is deferred while 100 MiB wait

    The points are the corners of the lower convex hull of (waiting bytes, seconds that are not deferred) over all legal
    divisions, by rising bytes: exact up to rounding of the seconds, by parametric minimum cuts.

    Attributes:
        joint: a joint graph, or the facts about one.
        costs: the prices of nodes; by default FLOPs.
        policy: what is saved, what is recomputed, and the stages.
        stage: the stage whose backward is divided.
    """

    joint: Joint | JointFlow
    costs: Costs | None = None
    policy: PolicyLike = field(default_factory=SaveAll)
    stage: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        require_policy(self.policy)
        if self.costs is not None:
            require_costs(self.costs)
        if not is_whole(self.stage):
            raise PolicyError("SK302", f"DeferralFrontier has stage={shown(self.stage)}", "Give a whole number: 0.")

    @cached_property
    def points(self) -> tuple[DeferralPoint, ...]:
        """The points by rising bytes: at the first nothing waits, at the last everything is deferred that can be."""
        flow = self.joint.flow if isinstance(self.joint, Joint) else as_joint(self, self.joint)
        costs = self.costs or default(flow)
        plan = plan_in_stages(flow, as_plan(self.policy, flow, costs))
        parts = backward_parts(plan)
        if self.stage not in parts:
            raise PolicyError(
                "SK302", f"DeferralFrontier has stage={self.stage}, and the plan has {len(parts)}", "Give one of them."
            )
        problem = deferrals(flow, plan, parts[self.stage], costs)
        corners = DeferralNetwork.of(problem, products=False).corners()
        return tuple(DeferralPoint(choice, price, plan, self.stage) for choice, price in corners)

    def at(self, price: float) -> DeferralPoint:
        """Return a point of least ``waiting bytes + price * seconds``, the first of equal ones."""
        return min(self.points, key=lambda point: point.waiting + price * point.moved)

    def within(self, limit: int | str) -> DeferralPoint:
        """Return the point with the most bytes up to a limit, an int or a text such as ``"1GiB"``.

        Raises:
            PolicyError: SK302 if the limit is not a number of bytes.
        """
        most = nbytes(self, "limit", limit)
        return [point for point in self.points if point.waiting <= most or point is self.points[0]][-1]

    def __str__(self) -> str:
        rows = (f"  {size(p.waiting)} wait, {p.seconds[1]:.3g} of {sum(p.seconds):.3g} deferred" for p in self.points)
        return "\n".join([f"DeferralFrontier: {len(self.points)} points", *rows])
