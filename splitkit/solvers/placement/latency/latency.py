"""The least makespan of one sample: pieces of the graph on accelerators, everything else on hosts.

Each accelerator runs a few pieces one after another. A piece starts when all its inputs are there, takes the work of
its units and the cost of each net that comes in or goes out, and hands out everything at its end. A host runs each
unit by itself as soon as its inputs are there, as many at a time as there are. (Latency of Tarnawski et al., NeurIPS
2020.)
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import Schedule
from splitkit.solvers.placement.bounds import check
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.evaluate import cycles, faults
from splitkit.solvers.placement.groups import coloured, fused
from splitkit.solvers.placement.latency.bound import critical_path, path_bound
from splitkit.solvers.placement.latency.chain import chain_bound
from splitkit.solvers.placement.latency.chained import chained
from splitkit.solvers.placement.latency.listed import listed
from splitkit.solvers.placement.latency.makespan import HOST, Timing, busy, makespan
from splitkit.solvers.placement.latency.moves import Moves
from splitkit.solvers.placement.latency.tree import Tree
from splitkit.solvers.placement.orders import by_key
from splitkit.solvers.placement.problem import GRACE, BadProblemError, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.solvers.placement.stages.contiguous import contiguous

SECONDS = 60.0
_MOVES, _BOUND = 0.4, 0.5  # of the time
_FEW = 20_000  # placements that are all tried
_CLOSE = 2e-6  # relative: what the integer program may be off


def latency(problem: Problem, *, seconds: float = SECONDS, pieces: int = 1, clock: Clock | None = None) -> Solution:
    """A placement with a small makespan, and a bound on the least.

    The best chain of pieces along nine orders is annealed; small problems are searched whole. The bound is that of
    some ways through the graph, cut into pieces as well as can be (`chain`), or else that of a program over all ways
    (`bound`).

    Args:
        problem: what is placed. All of its ``edges`` count; ``in_flight``, ``ordered`` and ``fill`` do not matter.
            Its hosts are of one kind, and together run any number of units at a time: those that are theirs are
            given to the first one.
        seconds: for the search.
        pieces: that each accelerator may run, at most.
        clock: of the search that this is a part of, which ends this one too.

    Raises:
        InfeasibleError: no placement was found.
        BadProblemError: the graph has a cycle, there are hosts of several kinds, or links that differ.
    """
    start, advise = time.monotonic(), clock is None
    problem = replace(problem, in_flight=(), ordered=False, fill=False, backward=np.zeros(problem.units, np.bool_))
    _refuse(problem)
    core = core_of(problem, coloured(problem))
    check(problem, core)
    timing, clock = Timing.of(problem, pieces), Clock(seconds + GRACE, clock)
    order = by_key(core_of(problem, np.arange(problem.units)), np.zeros(problem.units))
    place = _first(problem, timing, core.group, order, seconds, clock, advise)
    moves = Moves(problem, timing, core.group, place)
    bound, proved_by = critical_path(problem, timing, order), "path"
    whole = (len(timing.work) + 1) ** problem.units <= _FEW and _searched(problem, timing, order, moves, core.group)
    if whole:
        bound, proved_by = moves.value, "all"
    elif not clock.is_over():
        bound, proved_by = max((bound, "path"), (chain_bound(problem, timing, core.group, order, moves.value), "chain"))
    if bound < moves.value:
        moves.run(Schedule(moves.rounds(seconds * _MOVES), clock), bound)
        if bound < moves.value * (1 - _CLOSE):
            proven = path_bound(problem, timing, core.group, moves.value, seconds * _BOUND, clock)
            bound, proved_by = max((bound, proved_by), (min(proven, moves.value), "highs"))
        if bound < moves.value * (1 - _CLOSE) and _searched(problem, timing, order, moves, core.group):
            bound, proved_by = moves.value, "all"
    found = _solution(problem, timing, moves, pieces, bound, proved_by, time.monotonic() - start)
    return replace(found, cut=clock.cut)


def _searched(problem: Problem, timing: Timing, order: Ints, moves: Moves, group: Ints) -> bool:
    """Search everything, if that is not too much; whether no better placement than the moves' can be."""
    tree = Tree(problem, timing, group, order, moves.value)
    tree.run()
    if tree.best is not None:
        moves.take(tree.best)
    return tree.closed


def _refuse(problem: Problem) -> None:
    if problem.links is not None and (problem.links[~np.eye(len(problem.links), dtype=np.bool_)] != 1).any():
        raise BadProblemError("links that differ are not known to the makespan", "links")
    if len({device.kind for device in problem.devices if device.host}) > 1:
        raise BadProblemError("hosts are of several kinds", "devices")
    edges = problem.edges[problem.edges[:, 0] != problem.edges[:, 1]]
    if cycles(edges, problem.units):
        raise BadProblemError("units depend on each other in a cycle", "edges")


def _first(
    problem: Problem, timing: Timing, group: Ints, order: Ints, seconds: float, clock: Clock, advise: bool
) -> Ints:
    """The place of each unit in the best chain, on hosts only, by list scheduling, or in the best stages; in the first
    placement that branch and bound finds, if there is none of these.
    """
    core = core_of(problem, fused(problem))
    accelerators = [d for d, device in enumerate(problem.devices) if not device.host]
    pieces = max(map(len, timing.turns), default=1)
    number = np.full(len(problem.devices) + 1, HOST, np.int64)  # of the first piece; the last entry is for `HOST`
    number[accelerators] = np.arange(len(accelerators)) * pieces
    found = [number[device[core.group]] for device in chained(core)] if not core.barred.all(axis=0).any() else []
    if np.isfinite(timing.host).all():
        found.append(np.full(problem.units, HOST, np.int64))
    found += listed(problem, timing, pieces, group)
    found = [place for place in found if np.isfinite(makespan(timing, place.tolist()))]
    if not found:
        try:
            stages = contiguous(problem, seconds=seconds / 4, advise=advise, clock=clock)
            clock.cut |= stages.cut
            found = [number[stages.device]]
        except InfeasibleError as error:
            if pieces == 1 and len(accelerators) == len(problem.devices):  # all that there is are stages
                raise
            found = [_any_place(Tree(problem, timing, group, order), error)]
    return min(found, key=lambda place: makespan(timing, place.tolist()))


def _any_place(tree: Tree, stages: InfeasibleError) -> Ints:
    """The place of each unit in any placement.

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
    problem: Problem, timing: Timing, moves: Moves, pieces: int, bound: float, proved_by: str, seconds: float
) -> Solution:
    place = np.array(moves.best, np.int64)
    accelerators = [d for d, device in enumerate(problem.devices) if not device.host]
    hosts = [d for d, device in enumerate(problem.devices) if device.host]
    of_place = np.array([*np.repeat(accelerators, pieces), *(hosts[:1] or [0])], np.int64)
    device = of_place[place]
    wrong = faults(problem, device)
    assert not wrong, wrong
    taken = np.zeros(len(problem.devices))
    np.add.at(taken, of_place[:-1], busy(timing, moves.best)[0])
    return Solution(
        device=device,
        order=(),
        value=moves.value,
        bound=min(moves.value, bound),
        solver=f"moves, {proved_by}" if proved_by != "all" else "all",
        seconds=seconds,
        loads=taken,
        tolerance=_CLOSE,
        turn=np.where(place == HOST, 0, place % pieces),
    )
