"""What memory would do when a problem has none that does: the smallest capacity, the fewest devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import Places
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.groups import coloured, fused
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.sets.packing import packed, some_sets
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages.ladder import MOST_LEVELS, ladder, level_count
from splitkit.solvers.placement.stages.search import StageSearch

_EACH = 2.0  # seconds to find out whether one capacity or one number of devices would do
_ALL = 10.0  # seconds after which what is known is given


class Fit(Protocol):
    """Whether a problem has a placement; None if that is not known. A quick look may not know more often."""

    def __call__(self, problem: Problem, *, quick: bool = False) -> bool | None:
        """Ask."""


def stages_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Whether there are stages; None if none were found, and none excluded. A ``quick`` look is along orders alone."""
    core = core_of(problem, fused(problem))
    if core.barred.all(axis=0).any() or level_count(core, problem.ordered) > MOST_LEVELS:
        return False
    steps = ladder(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(core.reversed(), steps, _EACH, joinable=False)
    if quick:
        search.along_orders(any_will_do=True)
    else:
        search.run(any_will_do=True)
    return True if search.best else (False if search.closed else None)


def sets_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Whether there are sets of units for the devices, in any order; None if none were found, and none excluded. A
    ``quick`` look packs the largest first.
    """
    core = core_of(problem, coloured(problem))
    if core.barred.all(axis=0).any():
        return False
    if quick:
        return None if packed(core, Places.of_problem(problem, core)) is None else True
    return (
        None
        if (found := some_sets(core, Places.of_problem(problem, core), _EACH, Clock(_EACH))) is None
        else found[0] is not None
    )


def lacking(problem: Problem, fit: Fit, *, proven: bool, advise: bool = True) -> InfeasibleError:
    """Why a problem has no placement, and what memory would do.

    Args:
        problem: one for which none was found.
        fit: whether a problem has a placement of the kind that was looked for.
        proven: whether it is certain that there is none.
        advise: find out what memory would do.
    """
    clock, later = Clock(_ALL), Clock(2 * _ALL)
    bytes_only = _of_bytes(problem)
    limited = any(not device.host and np.isfinite(device.capacity) for device in problem.devices)
    if limited and not advise:
        return InfeasibleError("no placement was found within the memory", "memory" if proven else "unknown")
    if not limited or fit(_with(bytes_only, float("inf"))) is not True:
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
    """The same problem with bytes for seconds, and nothing to pay for nets."""
    held = (problem.nbytes + min(problem.in_flight, default=0) * problem.saved).astype(np.float64)
    rows = [
        np.where(np.isinf(problem.seconds[d.kind]), np.inf, 0.0 if d.host or np.isinf(d.capacity) else held)
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
    """The same problem where every device with a limit has this one."""
    devices = [d if np.isinf(d.capacity) else replace(d, capacity=capacity) for d in problem.devices]
    return replace(problem, devices=tuple(devices))


def least_capacity(problem: Problem, fit: Fit, clock: Clock | None = None) -> int:
    """The smallest capacity that would do for every device with a limit, as far as a quick look tells."""
    bytes_only, (low, high) = _of_bytes(problem), _range(problem)

    def enough(capacity: int) -> bool | None:
        return fit(_with(bytes_only, float(capacity)), quick=True)

    return _least(enough, low, high, Clock(_ALL, clock))[0]


def fewest_devices(problem: Problem, fit: Fit, clock: Clock | None = None) -> int | None:
    """How many devices of the greatest capacity would do, as far as a quick look tells; None if no number does."""
    return _fewest(_of_bytes(problem), partial(fit, quick=True), Clock(_ALL, clock))[0]


def _range(problem: Problem) -> tuple[int, int]:
    """A capacity that is not enough, and one that always is."""
    most = int(problem.nbytes.sum() + max(problem.in_flight, default=0) * problem.saved.sum())
    if any(device.host or np.isinf(device.capacity) for device in problem.devices):
        return -1, most
    held = problem.nbytes + min(problem.in_flight, default=0) * problem.saved
    return max(int(held.max(initial=0)), -(-int(held.sum()) // len(problem.devices))) - 1, most


def _down(enough: Callable[[int], bool | None], low: int, high: int, clock: Clock) -> tuple[int, bool]:
    """The least that is enough, below one that a quick look has found, and whether that is certain."""
    if clock.is_over():
        return high, False
    answer = enough(high - 1)
    if not answer:
        return high, answer is False
    return _least(enough, low, high - 1, clock)


def _least(enough: Callable[[int], bool | None], low: int, high: int, clock: Clock) -> tuple[int, bool]:
    """The least number that is enough, by bisection, and whether every smaller one was excluded for certain."""
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
    """The fewest devices of the greatest capacity, hosts and others beside them unchanged, that would do."""
    limited = [d for d in problem.devices if not d.host and np.isfinite(d.capacity)]
    others = [d for d in problem.devices if d.host or np.isinf(d.capacity)]
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
