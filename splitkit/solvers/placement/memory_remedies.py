"""How much memory would make an infeasible problem feasible: the smallest capacity, the fewest devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.colocation import acyclic_groups, colour_groups
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.sets.packing import find_sets, pack_sets
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages.device_steps import MOST_LEVELS, device_steps, level_count
from splitkit.solvers.placement.stages.stage_solver import StageSearch

_EACH = 2.0  # seconds to test one capacity or one number of devices
_ALL = 10.0  # seconds after which the best known answer is returned


class FitCheck(Protocol):
    """A test whether a problem has a placement; None if unknown. A quick test answers None more often."""

    def __call__(self, problem: Problem, *, quick: bool = False) -> bool | None:
        """Run the test."""


def stages_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Return whether stages exist; None if none were found or excluded. A ``quick`` test searches along orders only."""
    core = core_of(problem, acyclic_groups(problem))
    if core.barred.all(axis=0).any() or level_count(core, problem.ordered) > MOST_LEVELS:
        return False
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(core.reversed(), steps, _EACH, joinable=False)
    if quick:
        search.along_orders(any_will_do=True)
    else:
        search.run(any_will_do=True)
    return True if search.best else (False if search.closed else None)


def sets_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Return whether sets of units exist for the devices, in any order; None if none were found or excluded. A
    ``quick`` test only packs the largest units first.
    """
    core = core_of(problem, colour_groups(problem))
    if core.barred.all(axis=0).any():
        return False
    if quick:
        return None if pack_sets(core, DeviceTable.of_problem(problem, core)) is None else True
    return (
        None
        if (found := find_sets(core, DeviceTable.of_problem(problem, core), _EACH, Clock(_EACH))) is None
        else found[0] is not None
    )


def infeasible(problem: Problem, fit: FitCheck, *, proven: bool, advise: bool = True) -> InfeasibleError:
    """Return the error that says why a problem has no placement, and how much memory would do.

    Args:
        problem: a problem for which no placement was found.
        fit: the test for the kind of placement that was searched.
        proven: whether it is proven that there is none.
        advise: whether to find out how much memory would do.
    """
    clock, later = Clock(_ALL), Clock(2 * _ALL)
    bytes_only = _of_bytes(problem)
    limited = any(not device.cpu and np.isfinite(device.capacity) for device in problem.devices)
    if limited and not advise:
        return InfeasibleError("no placement was found within the memory", "memory" if proven else "unknown")
    enough_room = fit(_with(bytes_only, float("inf"))) if limited else False
    if enough_room is not True:
        # If the test does not know whether room would do, it may still be the memory that is short.
        proven = proven and enough_room is False
        reason = "no placement suits the devices that support the units"
        return InfeasibleError(reason if proven else "no placement was found", "devices" if proven else "unknown")
    low, high = _range(problem)

    def enough(capacity: int, *, quick: bool = False) -> bool | None:
        return fit(_with(bytes_only, float(capacity)), quick=quick)

    high, _ = _least(partial(enough, quick=True), low, high, clock)
    capacity, exact = (high, True) if high == low + 1 else _down(enough, low, high, clock)
    count, counted = _fewest(bytes_only, fit, later)
    reason = f"the devices have too little memory: {capacity} bytes each would do"
    return InfeasibleError(
        reason if proven else f"no placement was found within the memory; with {capacity} bytes each there is one",
        "memory" if proven else "unknown",
        capacity=capacity,
        devices=count,
        exact=exact and counted,
    )


def _of_bytes(problem: Problem) -> Problem:
    """Return the same problem with bytes in place of seconds, and free nets."""
    held = (problem.nbytes + min(problem.in_flight, default=0) * problem.saved).astype(np.float64)
    rows = [
        np.where(np.isinf(problem.seconds[d.kind]), np.inf, 0.0 if d.cpu or np.isinf(d.capacity) else held)
        for d in problem.devices
    ]
    return replace(
        problem,
        seconds=np.stack(rows),
        devices=tuple(replace(device, kind=d) for d, device in enumerate(problem.devices)),
        net_costs=np.zeros(0),
        net_starts=np.zeros(1, np.int64),
        pins=np.zeros(0, np.int64),
        links=None,
    )


def _with(problem: Problem, capacity: float) -> Problem:
    """Return the same problem with the capacity of every limited device replaced."""
    devices = [d if np.isinf(d.capacity) else replace(d, capacity=capacity) for d in problem.devices]
    return replace(problem, devices=tuple(devices))


def least_capacity(problem: Problem, fit: FitCheck, clock: Clock | None = None) -> int:
    """Return the smallest capacity that would do for every limited device, as far as quick tests tell."""
    bytes_only, (low, high) = _of_bytes(problem), _range(problem)

    def enough(capacity: int) -> bool | None:
        return fit(_with(bytes_only, float(capacity)), quick=True)

    return _least(enough, low, high, Clock(_ALL, clock))[0]


def _range(problem: Problem) -> tuple[int, int]:
    """Return a capacity that is too small, and one that is always enough."""
    most = int(problem.nbytes.sum() + max(problem.in_flight, default=0) * problem.saved.sum())
    if any(device.cpu or np.isinf(device.capacity) for device in problem.devices):
        return -1, most
    held = problem.nbytes + min(problem.in_flight, default=0) * problem.saved
    return max(int(held.max(initial=0)), -(-int(held.sum()) // len(problem.devices))) - 1, most


def _down(enough: Callable[[int], bool | None], low: int, high: int, clock: Clock) -> tuple[int, bool]:
    """Search for a smaller sufficient number than a quick test found; also return whether the result is proven."""
    if clock.is_over():
        return high, False
    answer = enough(high - 1)
    if not answer:
        return high, answer is False
    return _least(enough, low, high - 1, clock)


def _least(enough: Callable[[int], bool | None], low: int, high: int, clock: Clock) -> tuple[int, bool]:
    """Bisect for the least sufficient number; also return whether every smaller one was proven insufficient."""
    exact = True
    while high - low > 1:
        if clock.is_over():
            return high, False
        middle = (low + high) // 2
        answer = enough(middle)
        if answer:
            high = middle
        else:
            low = middle
            exact = answer is False
    return high, exact


def _fewest(problem: Problem, fit: Callable[[Problem], bool | None], clock: Clock) -> tuple[int | None, bool]:
    """Return the fewest devices of the greatest capacity that would do, with CPUs and unlimited devices unchanged."""
    limited = [d for d in problem.devices if not d.cpu and np.isfinite(d.capacity)]
    others = [d for d in problem.devices if d.cpu or np.isinf(d.capacity)]
    largest = max(limited, key=lambda d: d.capacity)
    held = problem.nbytes + min(problem.in_flight, default=0) * problem.saved
    if not others and held.max(initial=0) > largest.capacity:
        return None, True  # one unit alone is too much for each of them

    def enough(count: int) -> bool | None:
        devices: list[Slot] = [*others, *[largest] * count]
        return fit(replace(problem, devices=tuple(devices), fill=False))

    most = len(limited)
    while (answer := enough(most)) is not True:
        if most >= problem.units or clock.is_over():
            return None, answer is False and most >= problem.units
        most = min(2 * most, problem.units)
    count, exact = _least(enough, 0, most, clock)
    return count, exact
