"""Finds a good order of actions and a lower bound: rules, windows that contradict each other, branching, then descent.

Values between the bound and the best order are tried by halving: if the windows of a value contradict each other, it is
a lower bound; if not, list scheduling within them may find a better order. All limits count work, not time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from splitkit.solvers.actions.critical_moves import improve_rows
from splitkit.solvers.actions.exact_order import branch
from splitkit.solvers.actions.list_scheduler import list_rules, schedule_by_rule
from splitkit.solvers.actions.order_bounds import work_or_path_bound
from splitkit.solvers.actions.order_problem import F, I, OrderProblem, Row, Rows, TimedRows, W, time_rows
from splitkit.solvers.actions.stage_windows import Windows, tighten, window_cells
from splitkit.solvers.actions.window_scheduler import DeadlineRule, schedule_in_windows

TOLERANCE = 1e-9
"""The relative difference up to which two values are equal."""
_CLOSE = 1e-5
"""The relative distance from the best order to which windows approach it, and the share with which they begin."""
_RULE_ACTIONS = 400_000
"""The actions that list scheduling may schedule in all."""
_CELLS = 15_000_000
"""The work of windows, in states of a stage."""
_HALVINGS = 12
"""How many values windows should be tried for; where stages are too many for that, they are tightened for a few."""
_NODES = 12_000
"""The states that branching may visit."""
_BRANCHED = 100
"""The most actions of a step for which branching is tried."""
_DESCENT = 150_000
"""The actions that descent may time in all."""


@dataclass(frozen=True)
class FoundOrder:
    """An order and what is known about better ones.

    Attributes:
        timed: the order.
        bound: no order has a smaller value.
        how: what proves the bound: ``"work"``, ``"windows"`` or ``"branching"``.
    """

    timed: TimedRows
    bound: float
    how: str

    @property
    def optimal(self) -> bool:
        """Whether no order is better."""
        return self.timed.value <= self.bound + TOLERANCE * abs(self.bound)


def search_order(problem: OrderProblem, known: Iterable[Rows] = (), effort: float = 1.0) -> FoundOrder | None:
    """Return the best order that was found; ``None`` if memory holds no order.

    Args:
        problem: the problem.
        known: orders to start from; those that deadlock or take too much memory are passed over.
        effort: multiplies the work limits.
    """
    start = [found for rows in (rows_one_by_one(problem), *known) if (found := time_rows(problem, rows)) is not None]
    if not start:
        return None
    return _OrderSearch(problem, min(start, key=_value), effort).run()


def rows_one_by_one(problem: OrderProblem) -> Rows:
    """Return an order that takes one microbatch after the other, so that ranks hold as little as they can."""
    return [_least(problem, stages) * problem.microbatches for stages in problem.of_rank]


def _least(problem: OrderProblem, stages: tuple[int, ...]) -> Row:
    """Return the actions of one microbatch on a rank: weight parts at once or at the end, whichever takes less."""
    back = stages[::-1]
    at_once = [(s, kind) for s in back for kind in (I, W)]
    later = [(s, I) for s in back]
    rows = [[(s, F) for s in stages] + rest for rest in (at_once, later + [(s, W) for s in back])]
    return min(rows, key=lambda row: row_peak(problem, row))


def row_peak(problem: OrderProblem, row: Row) -> int:
    """Return the most bytes that the actions of a rank hold in this order."""
    held = most = 0
    for stage, kind in row:
        use = problem.uses[stage][kind]
        most = max(most, held + use.peak)
        held += use.change
    return most


def _affordable(problem: OrderProblem, cells: float) -> set[int]:
    """Return the stages whose windows the work limit allows, three at least: evenly spaced, with the first and last.

    The first and the last stage alone gave the whole bound on the published problems with little memory.
    """
    last = problem.stages - 1
    for count in range(problem.stages, 3, -1):
        chosen = {round(number * last / (count - 1)) for number in range(count)}
        if sum(window_cells(problem, stage) for stage in chosen) <= cells:
            return chosen
    return {0, last // 2, last}


def _value(timed: TimedRows) -> float:
    return timed.value


class _OrderSearch:
    def __init__(self, problem: OrderProblem, start: TimedRows, effort: float) -> None:
        self.problem, self.best, self.effort = problem, start, effort
        self.bound, self.how = work_or_path_bound(problem), "work"
        self.actions = 3 * problem.stages * problem.microbatches
        self.limits: tuple[tuple[int, ...], ...] = ()

    def run(self) -> FoundOrder:
        """Run all methods in turn until the order is proven optimal."""
        for method in (self._by_rules, self._by_windows, self._by_branching, self._by_descent):
            if self._closed():
                break
            method()
        return FoundOrder(self.best, min(self.bound, self.best.value), self.how)

    def _closed(self) -> bool:
        return self.best.value <= self.bound + TOLERANCE * abs(self.bound)

    def _take(self, found: TimedRows | None) -> bool:
        if found is None or found.value >= self.best.value:
            return False
        self.best = found
        return True

    def _by_rules(self) -> None:
        values: dict[tuple[int, ...], float] = {}
        for rule, _ in zip(
            list_rules(self.problem), range(max(8, int(self.effort * _RULE_ACTIONS) // self.actions)), strict=False
        ):
            found = schedule_by_rule(self.problem, rule)
            if found is not None:
                values[rule.most] = min(values.get(rule.most, found.value), found.value)
                self._take(found)
            if self._closed():
                return
        self.limits = tuple(sorted(values, key=values.__getitem__)[:3])

    def _by_windows(self) -> None:
        """Approach the best order from the bound: first just below it, as windows are often that tight."""
        left, share = self.effort * _CELLS, 0.0
        chosen = _affordable(self.problem, left / _HALVINGS)
        cells = sum(window_cells(self.problem, stage) for stage in chosen)
        high = self.best.value * (1 - TOLERANCE)
        while left >= cells and high - self.bound > _CLOSE * abs(high):
            left -= cells
            value = high - share * (high - self.bound)
            windows = Windows.within(self.problem, value)
            if tighten(self.problem, windows, 1, chosen):
                for found in self._within(windows):
                    self._take(found)
                high, share = min(value, self.best.value * (1 - TOLERANCE)), min(0.5, 8 * share or _CLOSE)
            else:
                self.bound, self.how, share = value, "windows", 0.5
            if self._closed():
                return

    def _within(self, windows: Windows) -> Iterator[TimedRows]:
        for most, late, inputs_first in product(self.limits, (0.0, 0.25), (False, True)):
            found = schedule_in_windows(self.problem, windows, DeadlineRule(most, late, inputs_first))
            if found is not None:
                yield found

    def _by_branching(self) -> None:
        if self.actions > _BRANCHED:
            return
        value = self.best.value
        windows = Windows.within(self.problem, value)
        if not tighten(self.problem, windows):
            self.bound, self.how = value, "windows"
            return
        found = branch(self.problem, windows, value, int(self.effort * _NODES))
        self._take(found.best)
        if found.whole:
            self.bound, self.how = self.best.value, "branching"

    def _by_descent(self) -> None:
        count = int(self.effort * _DESCENT) // self.actions
        self.best, _ = improve_rows(self.problem, self.best, count, self.bound * (1 + TOLERANCE))
