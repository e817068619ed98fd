"""Stages with the least greatest load, each a convex set of units, in an order without cycles."""

from __future__ import annotations

import time
from dataclasses import replace

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import bounds
from splitkit.solvers.placement.bounds import check
from splitkit.solvers.placement.contract import contracted
from splitkit.solvers.placement.core import core_of, exact_links
from splitkit.solvers.placement.groups import fused
from splitkit.solvers.placement.memory import lacking, stages_fit
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import Key, Solution, preferred
from splitkit.solvers.placement.stages.ladder import MOST_LEVELS, ladder, level_count
from splitkit.solvers.placement.stages.search import StageSearch

SECONDS = 9.0
_CLOSE = 2e-6  # relative: what the integer program may be off
_MOST_CONTRACTED = 50_000  # units up to which idle ones are joined


def contiguous(
    problem: Problem,
    *,
    seconds: float = SECONDS,
    prefer: Key | None = None,
    advise: bool = True,
    near: float = 0.0,
    clock: Clock | None = None,
) -> Solution:
    """Stages with the least greatest load.

    First the best along nine orders of the units (`linear`), then the best over all orders (`ideals`), which is
    proven; where that is too much, moves of units, bounds, and a mixed-integer program. The same problem gives the
    same placement on a machine a third as fast.

    Args:
        problem: what is placed.
        seconds: for the search; its steps are counted, and the clock ends it only at five times that. The orders
            are always tried, so this can be exceeded on huge graphs.
        prefer: which of several placements of equal value is taken: the one of the least key. Some are weighed, not
            all that there are.
        near: relative; the search ends at a value so near its bound.
        clock: of the search that this is a part of, which ends this one too.

    Raises:
        InfeasibleError: there is no placement, or none was found.
    """
    start = time.monotonic()
    core = core_of(problem, fused(problem))
    check(problem, core)
    if level_count(core, problem.ordered) > MOST_LEVELS:  # too many classes: in the order in which they are given
        given = replace(problem, ordered=True)
        found = contiguous(given, seconds=seconds, prefer=prefer, advise=advise, near=near, clock=clock)
        return replace(found, bound=min(found.value, bounds.in_seconds(core)))
    exact = exact_links(problem)
    joinable = exact and not problem.fill
    small = contracted(core) if joinable and core.size <= _MOST_CONTRACTED else core
    steps = ladder(small, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(small.reversed(), steps, seconds, joinable=joinable, near=near, clock=clock)
    search.run()
    if search.best is None:
        raise lacking(problem, stages_fit, proven=search.closed, advise=advise)
    plans = search.plans if not exact else [search.best, *(search.ties() if prefer else ())]
    device, order, value = preferred(problem, small, plans, prefer, search.clock)
    bound = search.bound if search.bound < search.limit else search.limit
    return Solution(
        device=device,
        order=order,
        value=float(value.max()),
        bound=min(float(value.max()), bound / small.scale),
        solver=search.found_by if search.found_by == search.proved_by else f"{search.found_by}, {search.proved_by}",
        seconds=time.monotonic() - start,
        loads=value,
        tolerance=2 * small.slack / max(1, search.limit) + (_CLOSE if search.proved_by == "highs" else 1e-12),
        cut=search.clock.cut,
    )
