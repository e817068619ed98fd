"""Stages with a small greatest load for graphs that are too large for exact search."""

from __future__ import annotations

import time
from dataclasses import replace

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import bounds
from splitkit.solvers.placement.bounds import check_placeable
from splitkit.solvers.placement.colocation import acyclic_groups
from splitkit.solvers.placement.contract import contracted_core
from splitkit.solvers.placement.core import Core, core_of, exact_links
from splitkit.solvers.placement.multilevel.vcycle import VCycle
from splitkit.solvers.placement.problem import Problem
from splitkit.solvers.placement.solution import Key, Solution, best_plan
from splitkit.solvers.placement.stages.contiguous import SECONDS, contiguous
from splitkit.solvers.placement.stages.device_steps import MOST_LEVELS, DeviceSteps, device_steps, level_count
from splitkit.solvers.placement.stages.stage_loads import StageRanks
from splitkit.solvers.placement.stages.stage_solver import MOST_UNITS, StageSearch

MOST_EXACT = 2000
"""Units up to which `contiguous` is tried first."""
_MOST_CONTRACTED = 50_000  # units up to which idle ones are joined
_CYCLES, _CYCLED_UNITS = 6, 22_500  # more ways through coarser cores: at most, and all their units by default
_TIES, _TIED_UNITS = 64, 200_000  # plans of equal value that are drawn: at most, and all their units together
_FAR = 1e9  # seconds that are never over


def multilevel(
    problem: Problem,
    *,
    seconds: float = SECONDS,
    prefer: Key | None = None,
    advise: bool = True,
    clock: Clock | None = None,
) -> Solution:
    """Return stages with a small greatest load, for thousands to hundreds of thousands of units.

    The candidates are the best stages along nine orders (`order_dp`) and stages found through coarser and coarser
    graphs (`vcycle`); the better of the two goes through coarser graphs again, several times. A small problem is left
    to `contiguous` first, and its result is taken unless this one is better. The greatest load is never more than that
    of the best along the orders, and the bound holds for all stages.

    Args:
        problem: the problem.
        seconds: how much work to do, counted in steps, not by a clock; both candidates are always computed. The same
            problem gives the same placement, however busy the machine, as far as `contiguous` does.
        prefer: a key by which one of several placements of equal value is chosen, the least first. Only some of them
            are compared.
        clock: the clock for `contiguous`; nothing else here reads it.

    Raises:
        InfeasibleError: there is no placement, or none was found.
    """
    start = time.monotonic()
    core = core_of(problem, acyclic_groups(problem))
    check_placeable(problem, core)
    if level_count(core, problem.ordered) > MOST_LEVELS:  # too many classes: in the order in which they are given
        given = replace(problem, ordered=True)
        along = multilevel(given, seconds=seconds, prefer=prefer, advise=advise, clock=clock)
        return replace(along, bound=min(along.value, bounds.simple_bound_seconds(core)))
    joinable = exact_links(problem) and not problem.fill
    core = contracted_core(core) if joinable and core.size <= _MOST_CONTRACTED else core
    if core.size > MOST_EXACT:
        found = _found(problem, core, seconds, prefer, start)
        return found or contiguous(problem, seconds=seconds, prefer=prefer, advise=advise, clock=clock)
    known = contiguous(problem, seconds=seconds, prefer=prefer, advise=advise, clock=clock)
    if known.optimal:
        return known
    found = _found(problem, core, seconds, prefer, start)
    if found is None or found.value >= known.value:
        return known
    found = replace(found, timed_out=known.timed_out)
    if known.bound <= found.bound:
        return found
    proved_by = known.solver.rpartition(", ")[2]
    return replace(found, bound=min(found.value, known.bound), solver=f"{found.solver.partition(', ')[0]}, {proved_by}")


def _found(problem: Problem, core: Core, seconds: float, prefer: Key | None, start: float) -> Solution | None:
    """Return the best that orders and coarser cores find; None if they find nothing."""
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = _along_orders(core.reversed(), steps)
    cycles = VCycle(search.core, steps)
    plans = _plans(search, cycles, max(1, min(_CYCLES, int(seconds / SECONDS * _CYCLED_UNITS / core.size))))
    if not plans:
        return None
    best = plans[-1]
    if core.size <= MOST_UNITS:
        search.raise_bound(best.value)
    if exact_links(problem):
        plans = [best, *(cycles.ties(best, min(_TIES, _TIED_UNITS // core.size)) if prefer else ())]
    device, order, value = best_plan(problem, core, plans, prefer)
    return Solution(
        device=device,
        order=order,
        value=float(value.max()),
        bound=min(float(value.max()), min(search.bound, best.value) / core.scale),
        solver="orders, bound" if best in search.plans else "multilevel, bound",
        seconds=time.monotonic() - start,
        loads=value,
        tolerance=2 * core.slack / max(1, best.value) + 1e-12,
    )


def _plans(search: StageSearch, cycles: VCycle, most: int) -> list[StageRanks]:
    """Return the stages found, each better than the ones before."""
    found = list(search.plans)
    if search.closed:
        return found
    fresh = cycles.fresh(lambda core: _along_orders(core, search.device_steps).best)
    if fresh and (not found or fresh.value < found[-1].value):
        found.append(fresh)
    for seed in range(1, most + 1):
        if not found or found[-1].value <= search.bound:
            break
        better = cycles.again(found[-1], seed)
        if better.value < found[-1].value:
            found.append(better)
    return found


def _along_orders(core: Core, steps: DeviceSteps) -> StageSearch:
    """Return the search after nine orders and the bound that needs no search."""
    search = StageSearch(core, steps, _FAR, joinable=False)
    search.along_orders()
    return search
