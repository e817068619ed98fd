"""The search for sets of units with the least greatest load, regardless of the order between them.

Measured on nine published workloads, by switching off one at a time: without annealing, 7 plans are worse, by up to
1.8 %; without the cover, 3 bounds are 3.4 to 42 % weaker; without the integer program, one plan is 12.8 % worse.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import bounds
from splitkit.solvers.placement.anneal import CoolingSchedule, DeviceTable, Population, population_size
from splitkit.solvers.placement.bounds import check_placeable
from splitkit.solvers.placement.colocation import colour_groups
from splitkit.solvers.placement.contract import contracted_core, tightened_core
from splitkit.solvers.placement.core import Core, core_of, exact_links
from splitkit.solvers.placement.evaluate import faults, loads
from splitkit.solvers.placement.memory_remedies import infeasible, sets_fit
from splitkit.solvers.placement.problem import GRACE, Ints, Problem
from splitkit.solvers.placement.sets.cover_bound import CoverBound
from splitkit.solvers.placement.sets.packing import find_sets, is_placeable
from splitkit.solvers.placement.sets.set_program import SetProgram
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.solvers.placement.stages.contiguous import contiguous

SECONDS = 50.0
_SMALL = 1_200  # columns of an integer program that comes before annealing
_LARGE = 1_700  # columns of one that still comes after it: larger ones find and prove less than what comes before
_STAGES, _ANNEALED, _MOST_ANNEALED, _COVERED, _PROGRAM = 0.15, 0.25, 0.5, 0.5, 0.2  # of the time
_FAR = 2.0  # the clock ends the search after this many times the seconds that its steps count for
_CLOSE = 2e-6  # relative; the tolerance of the integer program


def noncontiguous(
    problem: Problem, *, seconds: float = SECONDS, advise: bool = True, clock: Clock | None = None
) -> Solution:
    """Return one set of units for each device with a small greatest load, in any order, so nothing is in flight.

    The best stages are annealed (`anneal`). A decomposition into sets bounds how much the devices can cover
    (`cover_bound`), and a mixed-integer program finds and proves the optimum of small problems. The same problem gives
    the same placement also on a machine half as fast.

    Args:
        problem: the problem; its ``edges``, ``in_flight`` and ``ordered`` do not matter.
        seconds: the time for the search; its steps are counted, and the clock ends it only after twice as long.
        advise: whether, if the memory is too small, the error should say how much would do.
        clock: the clock of the whole search that this is a part of; it ends this search too.

    Raises:
        InfeasibleError: there is no placement, or none was found.
    """
    start = time.monotonic()
    problem = replace(problem, in_flight=(), ordered=False)
    core = core_of(problem, colour_groups(problem))
    check_placeable(problem, core)
    joinable = exact_links(problem) and not problem.fill
    small = contracted_core(core, acyclic=False) if joinable else core
    search = _SetSearch(problem, small, seconds, joinable, clock)
    search.run()
    if search.best is None:
        raise infeasible(problem, sets_fit, proven=search.excluded, advise=advise)
    device = search.best[small.group]
    value = loads(problem, device)
    wrong = faults(problem, device)
    assert not wrong, wrong
    return Solution(
        device=device,
        order=(),
        value=float(value.max()),
        bound=min(float(value.max()), search.bound),
        solver=search.found_by if search.found_by == search.proved_by else f"{search.found_by}, {search.proved_by}",
        seconds=time.monotonic() - start,
        loads=value,
        tolerance=_CLOSE,
        timed_out=search.clock.timed_out,
    )


class _SetSearch:
    """The best sets so far, and what is proven, in seconds of the problem."""

    def __init__(
        self, problem: Problem, core: Core, seconds: float, joinable: bool, clock: Clock | None = None
    ) -> None:
        self._problem = problem
        self._core = core
        self._seconds = seconds
        self.clock = Clock(_FAR * seconds + GRACE, clock)
        self._joinable = joinable
        self._places = DeviceTable.of_problem(problem, core)
        self.best: Ints | None = None
        self.value = np.inf
        self.bound = bounds.simple_bound_seconds(core)
        self.excluded = False
        self.found_by = self.proved_by = "bound"

    def run(self) -> None:
        self._start()
        if self.excluded or self.best is None or self._closed or self.clock.is_over():
            return
        self._join()
        if self._columns(self._core) <= _SMALL:
            self._program(self._seconds * _STAGES)
        if not self._closed:
            most = self._columns(self._core) > _LARGE  # no program comes after it
            self._anneal(self._seconds * (_MOST_ANNEALED if most else _ANNEALED))
        if not self._closed:
            self._join()
            self._cover(self._seconds * _COVERED)
        if not self._closed:
            self._program(self._seconds * _PROGRAM)

    @property
    def _closed(self) -> bool:
        return self.bound >= self.value * (1 - _CLOSE)

    def _columns(self, core: Core) -> int:
        return SetProgram.columns(
            core, self._places if core is self._core else DeviceTable.of_problem(self._problem, core)
        )

    def _start(self) -> None:
        """Start from the best stages, or from any sets that fit."""
        try:
            stages = contiguous(self._problem, seconds=self._seconds * _STAGES, advise=False, clock=self.clock)
        except InfeasibleError:
            some = find_sets(self._core, self._places, self._seconds * _STAGES, self.clock)
            if some is not None and some[0] is not None:
                self._take(some[0], "packing")
            self.excluded = some is not None and some[0] is None
            return
        self.clock.timed_out |= stages.timed_out
        _, first = np.unique(self._core.group, return_index=True)
        self._take(stages.device[first], "stages")

    def _join(self) -> None:
        """Raise the bound by what must be joined."""
        low, high = int(self.bound * self._core.scale), int(self.value * self._core.scale)
        filled = len(self._problem.devices) if self._problem.fill else 0
        joined = bounds.joining_bound(self._core, low, high, acyclic=False, filled=filled)
        self._prove((joined - self._core.slack) / self._core.scale, "joining")

    def _anneal(self, seconds: float) -> None:
        assert self.best is not None
        core = self._core
        size = population_size(core, len(self._places.work))
        population = Population(core, self._places, self.best, size)
        population.run(CoolingSchedule(population.rounds(seconds), self.clock), self.bound)
        self._take(population.best, "annealing")

    def _program(self, seconds: float) -> None:
        """Solve the integer program over the core with units joined that must be together."""
        own = self._tightened()
        if self._columns(own) > _LARGE or self.clock.is_over():
            return
        places = DeviceTable.of_problem(self._problem, own)
        found, bound = SetProgram(own, places, self.value * (1 + _CLOSE)).solve(seconds, self.clock, known=self.bound)
        if found is not None and is_placeable(own, places, found):
            self._take(found[own.group], "highs")
        self._prove(min(bound, self.value), "highs")

    def _cover(self, seconds: float) -> None:
        """Raise the bound by what all devices can cover, over the core with units joined that must be together."""
        cover = CoverBound(self._tightened(), self.value)
        self._prove(cover.run(self.bound, seconds, self.clock), "cover")

    def _tightened(self) -> Core:
        """Return the core with units joined that every placement no worse than the best keeps together."""
        own = replace(self._core, group=np.arange(self._core.size))
        if not self._joinable:
            return own
        return tightened_core(own, int(self.value * own.scale * (1 + _CLOSE)) + 1, acyclic=False)

    def _take(self, device: Ints, solver: str) -> None:
        value = float(loads(self._problem, device[self._core.group]).max())
        if value < self.value:
            self.best, self.value, self.found_by = device.copy(), value, solver

    def _prove(self, bound: float, solver: str) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, solver
