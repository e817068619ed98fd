"""A solver for torch's own memory budget that never exceeds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import estimate_runtime  # 2.11, 2.13
from torch._inductor.custom_graph_pass import CustomKnapsackSolver  # 2.13

from splitkit.solvers.knapsack import fill_knapsack


class MemoryBudgetSolver(CustomKnapsackSolver):
    """The knapsack of torch's partitioner, within its budget; make one with `memory_budget_solver`."""

    def __call__(
        self,
        memory: Sequence[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: Sequence[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Return the positions of the nodes to save and of those to recompute, as torch's partitioner asks.

        Args:
            memory: bytes of each node, relative to what the budget 1.0 saves beyond the inputs.
            joint_graph: the joint graph.
            max_memory: the budget.
            node_info: torch's classes of nodes.
            all_recomputable_banned_nodes: the nodes, which torch prices by ``activation_memory_budget_runtime_
                estimator``.
        """
        with _dispatching():
            prices = [float(estimate_runtime(node)) for node in all_recomputable_banned_nodes]
        saved = fill_knapsack(prices, memory, max_memory)
        return saved, sorted(set(range(len(memory))) - set(saved))

    def uuid(self) -> str:
        """Return the id by which torch's caches know the solver."""
        return "splitkit.memory_budget_solver 1"


@contextmanager
def _dispatching() -> Iterator[None]:
    """Let fake tensors and modes work inside ``no_dispatch()``, under which torch calls solvers.

    Without them, estimates run each node for real, on uninitialised memory, and count no FLOPs.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()  # 2.13, as the names below
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def memory_budget_solver() -> MemoryBudgetSolver:
    """Return a solver for ``torch._functorch.config.activation_memory_budget_solver`` that keeps the budget.

    >>> torch._functorch.config.activation_memory_budget = 0.5
    >>> torch._functorch.config.activation_memory_budget_solver = splitkit.memory_budget_solver()

    It saves the values with the largest total runtime within the budget (a 0/1 knapsack, to 1e-4). torch's own solvers
    round sizes to 1e-4 of what can be saved, and may save several times the budget; its
    ``dp_knapsack_sliding_hirschberg`` gives each half of its recursion one unit too much.

    The budget limits the saved bytes of torch's partitioner; the peak may rise while they fall. `inductor_partitioner`
    limits the peak.
    """
    return MemoryBudgetSolver()
