"""The search for stages with the least greatest load, each a convex set of units, in an order without cycles."""

from __future__ import annotations

from dataclasses import replace

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import contract
from splitkit.solvers.placement.contract import check_placeable, contracted_core
from splitkit.solvers.placement.core import acyclic_groups, core_of, exact_links
from splitkit.solvers.placement.packing import infeasible
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import InfeasibleError, Key, Solution, best_plan
from splitkit.solvers.placement.stages.order_dp import MOST_LEVELS, device_steps, level_count
from splitkit.solvers.placement.stages.stage_solver import StageSearch

SECONDS = 9.0  # of callers that name none; policies have their own
_CLOSE = 2e-6  # relative; the tolerance of the integer program
_MOST_CONTRACTED = 50_000  # units; in larger cores, light units are not joined to neighbours


def contiguous(
    problem: Problem,
    *,
    seconds: float = SECONDS,
    prefer: Key | None = None,
    near: float = 0.0,
    clock: Clock | None = None,
) -> Solution:
    """Return the stages with the least greatest load that the search finds.

    The search first finds the best stages along nine orders of the units (`order_dp`), then the best over all orders
    (`ideals`), which is a proof. Where there are too many ideals, it improves the stages by annealing, bounds them, and
    solves a mixed-integer program. The same problem gives the same placement also on a machine a third as fast.

    Args:
        problem: the problem to solve.
        seconds: the time for the search. Its steps are counted; the clock ends it only after five times as long. The
            orders are always tried, so a huge graph can take longer.
        prefer: a key by which one of several placements of equal value is chosen, the least first. Only some of them
            are compared.
        near: relative; the search ends at a value this close to its bound.
        clock: the clock of the whole search that this is a part of; it ends this search too.

    Raises:
        InfeasibleError: there is no placement, or none was found.
    """
    core = core_of(problem, acyclic_groups(problem))
    check_placeable(problem, core)
    if level_count(core, problem.ordered) > MOST_LEVELS:  # too many classes: in the order in which they are given
        given = replace(problem, ordered=True)
        try:
            found = contiguous(given, seconds=seconds, prefer=prefer, near=near, clock=clock)
        except InfeasibleError:
            raise infeasible(problem, proven=False) from None  # other orders of the devices may do
        return replace(found, bound=min(found.value, contract.simple_bound_seconds(core)))
    exact = exact_links(problem)
    joinable = exact and not problem.fill
    small = contracted_core(core) if joinable and core.size <= _MOST_CONTRACTED else core
    steps = device_steps(small, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(small.reversed(), steps, seconds, joinable=joinable, near=near, clock=clock)
    search.run()
    if search.best is None:
        raise infeasible(problem, proven=search.closed)
    plans = search.plans if not exact else [search.best, *(search.ties() if prefer else ())]
    device, order, value = best_plan(problem, small, plans, prefer, search.clock)
    bound = search.bound if search.bound < search.limit else search.limit
    return Solution(
        device=device,
        order=order,
        value=float(value.max()),
        bound=min(float(value.max()), bound / small.scale),
        solver=search.found_by if search.found_by == search.proved_by else f"{search.found_by}, {search.proved_by}",
        loads=value,
        tolerance=2 * small.slack / max(1, search.limit) + (_CLOSE if search.proved_by == "highs" else 1e-12),
        timed_out=search.clock.timed_out,
    )
