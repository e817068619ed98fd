"""A budget such as ``"least"``, ``"2GiB"`` or 0.5 in the place of a policy."""

from __future__ import annotations

from typing import Literal, cast

from splitkit.late_policies import LatePolicies
from splitkit.plans.policy import PolicyLike, require_policy

BudgetLike = str | int | float
"""What `splitkit.policies.Budget` takes as its budget."""


def as_policy(policy: PolicyLike | BudgetLike, of: Literal["peak", "saved"] = "peak") -> PolicyLike:
    """Return the policy; for a budget, a policy that limits the peak, or the saved bytes, to it.

    Raises:
        PolicyError: SK301 if it is neither, SK302 for a bad budget.
    """
    if isinstance(policy, str | int | float) and not isinstance(policy, bool):
        made: PolicyLike = LatePolicies.budget()(policy, of=of)
        return made
    require_policy(policy)
    return cast(PolicyLike, policy)
