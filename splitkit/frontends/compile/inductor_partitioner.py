"""A policy in the place of Inductor's own partitioner, by its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._functorch import config  # donated_buffer: 2.11, 2.13, 2.15

from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.frontends.compile.budget_words import BudgetLike
from splitkit.frontends.compile.compile import backend
from splitkit.frontends.compile.inductor import Partitioner, saves_views
from splitkit.plans.policy import PolicyLike


def inductor_partitioner(
    policy: PolicyLike | BudgetLike, *, costs: Callable[[fx.GraphModule], Costs] | None = None
) -> Partitioner:
    """Return a partitioner for ``torch._inductor.config.custom_partitioner_fn``, which divides graphs by a policy.

    >>> torch._inductor.config.custom_partitioner_fn = splitkit.inductor_partitioner("least")
    >>> torch.compile(model)

    It is for code that calls ``torch.compile`` itself; `backend` with ``inner="inductor"`` does the same for one model.

    Args:
        policy: a policy or a budget, as in `backend`.
        costs: returns the costs of a joint graph. The default is the time of Inductor's kernels on the device of the
            graph.

    Raises:
        PolicyError: SK301 if ``policy`` is not a policy, SK302 for a bad budget; SK306 while a graph is compiled, if
            two of its saved values share memory and Inductor would write over one of them.
        CostError: SK323 if ``costs`` is not a function.
    """
    made = backend(policy, "inductor", costs=costs)

    def partition(joint: fx.GraphModule, inputs: Any, **others: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = made.partition(joint, inputs, **others)
        if config.donated_buffer and saves_views(forward, others["num_fwd_outputs"]):
            raise PolicyError(
                "SK306",
                "the plan saves two values that share memory, and Inductor's backward writes its results over saved "
                "values after their last use, without checking what shares their memory (donated buffers)",
                "Set torch._functorch.config.donated_buffer = False, or use splitkit.backend(policy, "
                "inner='inductor'), which does so where it is needed.",
            )
        return forward, backward

    return Partitioner(partition)
