"""Finds what each stage may save, from much to little: one exact frontier per class of isomorphic intervals.

Two intervals are isomorphic if the arrays of their problems and of their lifetimes are equal. Layers of a transformer
are, so a model of 32 layers has hardly more frontiers than one of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np

from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.stage_problems import StageProblem, StageProblems
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.solvers.recompute import Limit, Program, RecomputeProblem
from splitkit.training.choices import Bools, Choice, Ints, Savings

_EXACT = 1e-9  # the relative gap of integer programs
_SMALL = 8  # values of a stage of which all subsets are looked at


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """A way to run a stage.

    Attributes:
        runs: (n,) bool; the ops that backward computes again.
        saved: bytes that a microbatch holds, those that are held in any case included.
        seconds: the recompute time.
        early: seconds of ops that backward runs if nothing is saved, and forward here.
        simulate: a function that returns `temporary`.
    """

    runs: Bools
    saved: int
    seconds: float
    early: float
    simulate: Callable[[], int]

    @property
    def numbers(self) -> tuple[float, float, int, int]:
        """The times and bytes in which points differ."""
        return self.seconds - self.early, self.early, self.saved, self.temporary

    @cached_property
    def temporary(self) -> int:
        """The bytes that the stage takes while it computes, beyond what it saves."""
        return self.simulate()


class StageFrontier:
    """The frontier of a class of isomorphic stages, found where it is asked for.

    Attributes:
        problem: the problem of one of them.
    """

    def __init__(self, problems: StageProblems, problem: StageProblem) -> None:
        self.problem = problem
        self._problems = problems
        self._hull = Hull(problem.savings)
        self._choices: dict[int, Choice] = {}
        self._points: dict[int, FrontierPoint] = {}
        self._least: dict[int, float] = {}

    def bound(self, saved: float) -> float:
        """Return a lower bound on the recompute time if a microbatch holds at most ``saved`` bytes."""
        return self._hull.bound(saved - self.problem.held)

    def within(self, saved: float) -> FrontierPoint | None:
        """Return the point with the least recompute that holds at most ``saved`` bytes; ``None`` if there is none."""
        most = saved - self.problem.held
        self._add(self._hull.around(most))
        fits = [choice for nbytes, choice in self._choices.items() if nbytes <= most]
        return self._point(min(fits, key=lambda choice: (choice.seconds, choice.nbytes))) if fits else None

    def corners(self) -> list[FrontierPoint]:
        """Return the points at the corners of the hull, by rising recompute time."""
        found = sorted(self._hull.choices, key=lambda choice: (choice.seconds, choice.nbytes))
        self._add(found)
        return [self._point(choice) for choice in found]

    def least(self, saved: int) -> float:
        """Return the bound of `bound`, tightened by an integer program, whose choice is kept for `within`."""
        problem, most = self.problem.savings, saved - self.problem.held
        if most < 0:
            return float("inf")
        if not len(problem.ops):
            return 0.0
        if most not in self._least:
            given = (problem.price, problem.maker, problem.storage, problem.savable, problem.needed, problem.nbytes)
            limit = Limit(np.zeros(len(problem.ops), np.int64), problem.nbytes, most)
            found = Program(RecomputeProblem(*given, problem.reads)).search([limit], _EXACT)
            if found.runs is not None:
                self._add([problem.choose(found.runs)])
            self._least[most] = found.bound
        return max(self._least[most], self.bound(saved))

    def _add(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            known = self._choices.get(choice.nbytes)
            if known is None or choice.seconds < known.seconds:
                self._choices[choice.nbytes] = choice
                self._points.pop(choice.nbytes, None)

    def _point(self, choice: Choice) -> FrontierPoint:
        nbytes = choice.nbytes
        if nbytes not in self._points:
            self._points[nbytes] = self._new_point(choice)
        return self._points[nbytes]

    def _new_point(self, choice: Choice) -> FrontierPoint:
        savings = self.problem.savings
        early = float(savings.seconds[savings.late & choice.forward].sum())
        simulate = partial(self._problems.temporary, self.problem, choice)
        return FrontierPoint(choice.runs, self.problem.held + choice.nbytes, choice.seconds, early, simulate)

    @property
    def small(self) -> bool:
        """Whether `ladder` has all choices that no other one beats."""
        return self.values <= _SMALL

    @property
    def values(self) -> int:
        """The number of ops whose values may be saved or computed again."""
        return len(self._open)

    def near(self, point: FrontierPoint) -> Iterator[FrontierPoint]:
        """Yield the points that save the value of one op if this one computes it again, or the other way round."""
        for op in self._open.tolist():
            runs = point.runs.copy()
            runs[op] = not runs[op]
            yield self._new_point(self.problem.savings.choose(runs))

    @cached_property
    def _open(self) -> Ints:
        """The ops whose values may be saved or computed again."""
        savings = self.problem.savings
        saves = np.zeros(len(savings.ops), np.bool_)
        saves[savings.maker[savings.savable]] = True
        return np.flatnonzero(saves & ~savings.fixed)

    @cached_property
    def ladder(self) -> tuple[FrontierPoint, ...]:
        """Points that do not depend on any memory, by rising recompute time: all that matter, or the hull's."""
        return undominated(self.every) if self.small else self.every

    @cached_property
    def every(self) -> tuple[FrontierPoint, ...]:
        """As `ladder`, with points that others beat."""
        if not self.small:
            return tuple(self.corners())
        savings, found = self.problem.savings, dict[bytes, FrontierPoint]()
        for again in product((False, True), repeat=len(self._open)):
            runs = np.zeros(len(savings.ops), np.bool_)
            runs[self._open] = again
            choice = savings.choose(runs)
            key = choice.runs.tobytes() + choice.saved.tobytes()
            if key not in found:
                found[key] = self._new_point(choice)
        points = {p.numbers: p for p in found.values()}.values()
        return tuple(sorted(points, key=lambda p: (p.seconds, p.saved)))


class StageFrontiers:
    """The frontiers of all intervals of positions."""

    def __init__(self, problems: StageProblems) -> None:
        self.problems = problems
        self._classes: dict[Hashable, StageFrontier] = {}
        self._known: dict[tuple[int, int], tuple[StageProblem, StageFrontier]] = {}
        self._costs: dict[tuple[int, int, FrontierPoint], StageCosts] = {}

    def of(self, start: int, end: int) -> StageFrontier:
        """Return the frontier of a stage."""
        return self._at(start, end)[1]

    def problem(self, start: int, end: int) -> StageProblem:
        """Return the problem of a stage."""
        return self._at(start, end)[0]

    def _at(self, start: int, end: int) -> tuple[StageProblem, StageFrontier]:
        if (start, end) not in self._known:
            problem = self.problems.problem(start, end)
            key = self._key(problem)
            if key not in self._classes:
                self._classes[key] = StageFrontier(self.problems, problem)
            self._known[start, end] = problem, self._classes[key]
        return self._known[start, end]

    def _key(self, problem: StageProblem) -> Hashable:
        """Return a key that only isomorphic stages share."""
        return problem.held, problem_key(problem.savings), self.problems.peaks.key(problem)

    def choice(self, start: int, end: int, point: FrontierPoint) -> Choice:
        """Return the choice of a stage at a point of its frontier."""
        return self._at(start, end)[0].savings.choose(point.runs)

    def costs(self, start: int, end: int, point: FrontierPoint) -> StageCosts:
        """Return what a stage costs at a point of its frontier."""
        key = (start, end, point)
        if key not in self._costs:
            problem, _ = self._at(start, end)
            self._costs[key] = self.problems.costs_of(problem, self.choice(start, end, point), point.temporary)
        return self._costs[key]


def undominated(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points that no other one beats in times and bytes; no two may have the same."""
    rows = np.array([p.numbers for p in points], np.float64).reshape(-1, 4)
    return tuple(p for row, p in zip(rows, points, strict=True) if (rows <= row).all(axis=1).sum() == 1)


def problem_key(problem: Savings) -> Hashable:
    """Return a key that only problems with equal arrays share."""
    p = problem
    arrays = (p.seconds, p.fixed, p.forced, p.late, p.maker, p.storage, p.savable, p.needed, p.nbytes, p.reads)
    return tuple(array.tobytes() for array in arrays)
