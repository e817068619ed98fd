"""The search for the least makespan of one sample: pieces of the graph on accelerators, all other units on CPUs.

Each accelerator runs a few pieces one after another. A piece starts when all its inputs are there, takes the work of
its units and the cost of each net that enters or leaves it, and delivers everything at its end. A CPU runs each unit
separately as soon as its inputs are there, any number at a time. (Latency in Tarnawski et al., NeurIPS 2020.)

Measured on four published workloads, by switching off one at a time: without the dynamic program along orders, 3 of 4
plans are 47 to 743 % worse; without annealing, one is 1.5 % worse; without the bound by chains, 3 of 4 bounds are 2.4
to 84 % weaker. List scheduling wins on none of them; on 160 random graphs with little memory, 18 plans are worse
without it, by up to 101 %.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import CoolingSchedule
from splitkit.solvers.placement.bounds import check_placeable
from splitkit.solvers.placement.colocation import acyclic_groups, colour_groups
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.evaluate import cycles, faults
from splitkit.solvers.placement.latency.annealing import PieceAnnealing
from splitkit.solvers.placement.latency.branch_and_bound import BranchAndBound
from splitkit.solvers.placement.latency.chain_bound import chain_bound
from splitkit.solvers.placement.latency.chain_dp import chain_placements
from splitkit.solvers.placement.latency.list_scheduling import list_schedules
from splitkit.solvers.placement.latency.makespan import CPU, Timing, makespan, piece_times
from splitkit.solvers.placement.orders import order_by_key
from splitkit.solvers.placement.problem import GRACE, BadProblemError, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.solvers.placement.stages.contiguous import contiguous

SECONDS = 60.0
_MOVES = 0.4  # share of the time
_FEW = 20_000  # up to this many placements, all are tried
_CLOSE = 2e-6  # relative; what is this near its bound is the best


def latency(problem: Problem, *, seconds: float = SECONDS, pieces: int = 1, clock: Clock | None = None) -> Solution:
    """Return a placement with a small makespan, and a lower bound on the least makespan.

    The best chain of pieces along nine orders is annealed; small problems are searched completely. The bound comes from
    the longest path through the graph, or from some paths, each divided optimally into pieces (`chain_bound`).

    Args:
        problem: the problem. All of its ``edges`` count; ``in_flight``, ``ordered`` and ``fill`` do not matter. Its
            CPUs are of one kind, and together run any number of units at a time; units on a CPU are assigned to the
            first one.
        seconds: the time for the search.
        pieces: the most pieces that each accelerator may run.
        clock: the clock of the whole search that this is a part of; it ends this search too.

    Raises:
        InfeasibleError: no placement was found.
        BadProblemError: the graph has a cycle, there are CPUs of several kinds, or links that differ.
    """
    start, advise = time.monotonic(), clock is None
    problem = replace(problem, in_flight=(), ordered=False, fill=False, backward=np.zeros(problem.units, np.bool_))
    _refuse(problem)
    core = core_of(problem, colour_groups(problem))
    check_placeable(problem, core)
    timing, clock = Timing.of(problem, pieces), Clock(seconds + GRACE, clock)
    order = order_by_key(core_of(problem, np.arange(problem.units)), np.zeros(problem.units))
    place = _first(problem, timing, core.group, order, seconds, clock, advise)
    moves = PieceAnnealing(problem, timing, core.group, place)
    bound, proved_by = critical_path(problem, timing, order), "path"
    whole = (len(timing.work) + 1) ** problem.units <= _FEW and _searched(problem, timing, order, moves, core.group)
    if whole:
        bound, proved_by = moves.value, "all"
    elif not clock.is_over():
        bound, proved_by = max((bound, "path"), (chain_bound(problem, timing, core.group, order, moves.value), "chain"))
    if bound < moves.value:
        moves.run(CoolingSchedule(moves.rounds(seconds * _MOVES), clock), bound)
        if bound < moves.value * (1 - _CLOSE) and _searched(problem, timing, order, moves, core.group):
            bound, proved_by = moves.value, "all"
    found = _solution(problem, timing, moves, pieces, bound, proved_by, time.monotonic() - start)
    return replace(found, timed_out=clock.timed_out)


def critical_path(problem: Problem, timing: Timing, order: Ints) -> float:
    """Return the longest path through the graph when every unit is where it is quickest."""
    quickest = np.min(np.array([*timing.work, timing.cpu]), axis=0).tolist()
    end = [0.0] * problem.units
    for unit in order.tolist():
        end[unit] = quickest[unit] + max((end[u] for u in timing.before[unit]), default=0.0)
    return max(end, default=0.0)


def _searched(problem: Problem, timing: Timing, order: Ints, moves: PieceAnnealing, group: Ints) -> bool:
    """Search all placements if they are few enough; return whether none can be better than the annealed one."""
    tree = BranchAndBound(problem, timing, group, order, moves.value)
    tree.run()
    if tree.best is not None:
        moves.take(tree.best)
    return tree.closed


def _refuse(problem: Problem) -> None:
    if problem.links is not None and (problem.links[~np.eye(len(problem.links), dtype=np.bool_)] != 1).any():
        raise BadProblemError("links that differ are not known to the makespan", "links")
    if len({device.kind for device in problem.devices if device.cpu}) > 1:
        raise BadProblemError("CPUs are of several kinds", "devices")
    edges = problem.edges[problem.edges[:, 0] != problem.edges[:, 1]]
    if cycles(edges, problem.units):
        raise BadProblemError("units depend on each other in a cycle", "edges")


def _first(
    problem: Problem, timing: Timing, group: Ints, order: Ints, seconds: float, clock: Clock, advise: bool
) -> Ints:
    """Return first placements: the best chain, CPUs only, list schedules, or the best stages; if there are none, the
    first placement that branch and bound finds.
    """
    core = core_of(problem, acyclic_groups(problem))
    accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
    pieces = max(map(len, timing.turns), default=1)
    number = np.full(len(problem.devices) + 1, CPU, np.int64)  # of the first piece; the last entry is for `CPU`
    number[accelerators] = np.arange(len(accelerators)) * pieces
    found = (
        [number[device[core.group]] for device in chain_placements(core)] if not core.barred.all(axis=0).any() else []
    )
    if np.isfinite(timing.cpu).all():
        found.append(np.full(problem.units, CPU, np.int64))
    found += list_schedules(problem, timing, pieces, group)
    found = [place for place in found if np.isfinite(makespan(timing, place.tolist()))]
    if not found:
        try:
            stages = contiguous(problem, seconds=seconds / 4, advise=advise, clock=clock)
            clock.timed_out |= stages.timed_out
            found = [number[stages.device]]
        except InfeasibleError as error:
            if pieces == 1 and len(accelerators) == len(problem.devices):  # all that there is are stages
                raise
            found = [_any_place(BranchAndBound(problem, timing, group, order), error)]
    return min(found, key=lambda place: makespan(timing, place.tolist()))


def _any_place(tree: BranchAndBound, stages: InfeasibleError) -> Ints:
    """Return the place of each unit in any placement.

    Raises:
        InfeasibleError: no placement was found; says what is known of memory from looking for stages.
    """
    tree.run(any_will_do=True)
    if tree.best is not None:
        return np.array(tree.best, np.int64)
    capacity = stages.capacity
    words = f"; with {capacity} bytes each there is one" if capacity is not None else ""
    cause = "unknown" if not tree.closed else "memory" if capacity is not None else "devices"
    reason = "the devices have too little memory" if cause == "memory" else "no placement was found"
    raise InfeasibleError(reason + words, cause, units=stages.units, capacity=capacity, devices=stages.devices)


def _solution(
    problem: Problem, timing: Timing, moves: PieceAnnealing, pieces: int, bound: float, proved_by: str, seconds: float
) -> Solution:
    place = np.array(moves.best, np.int64)
    accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
    cpus = [d for d, device in enumerate(problem.devices) if device.cpu]
    of_place = np.array([*np.repeat(accelerators, pieces), *(cpus[:1] or [0])], np.int64)
    device = of_place[place]
    wrong = faults(problem, device)
    assert not wrong, wrong
    taken = np.zeros(len(problem.devices))
    np.add.at(taken, of_place[:-1], piece_times(timing, moves.best)[0])
    return Solution(
        device=device,
        order=(),
        value=moves.value,
        bound=min(moves.value, bound),
        solver=f"moves, {proved_by}" if proved_by != "all" else "all",
        seconds=seconds,
        loads=taken,
        tolerance=_CLOSE,
        turn=np.where(place == CPU, 0, place % pieces),
    )
