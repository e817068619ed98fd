"""Finds what each stage may save, from much to little: one exact frontier per class of isomorphic intervals.

Two intervals are isomorphic if the arrays of their problems and of their lifetimes are equal. Layers of a transformer
are, so a model of 32 layers has hardly more frontiers than one of 8.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.stage_problems import StageProblem, StageProblems
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.solvers.recompute import Limit, Program, RecomputeProblem
from splitkit.training.choices import Choice

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """A way to run a stage.

    Attributes:
        runs: (n,) bool; the ops that backward computes again.
        saved: bytes that a microbatch holds, those that are held in any case included.
        seconds: the recompute time.
    """

    runs: Bools
    saved: int
    seconds: float


class StageFrontier:
    """The frontier of a class of isomorphic stages.

    Attributes:
        problem: the problem of one of them.
    """

    def __init__(self, problems: StageProblems, problem: StageProblem) -> None:
        self.problem = problem
        self._problems = problems
        self._hull = Hull.of(problem.savings)
        self._temporary: dict[int, int] = {}
        self._exact: dict[int, FrontierPoint | None] = {}

    @cached_property
    def points(self) -> list[FrontierPoint]:
        """The points on the hull, by rising recompute time."""
        corners = self._hull.corners
        choices = {choice.nbytes: choice for choice in self._hull.choices}
        for low, high in zip(corners, corners[1:], strict=False):
            rank = self._hull._rank
            chain = self._hull.network.between(low, high, rank)
            for step in range(1, len(chain) - 1):
                choice = self._hull.cutting.choice(chain.corner(step).side)
                choices.setdefault(choice.nbytes, choice)
        found: list[FrontierPoint] = []
        for nbytes in sorted(choices, reverse=True):
            choice = choices[nbytes]
            point = FrontierPoint(choice.runs, self.problem.held + choice.nbytes, choice.seconds)
            while found and found[-1].seconds >= point.seconds:
                found.pop()
            found.append(point)
        return found

    def bound(self, saved: float) -> float:
        """Return a lower bound on the recompute time if a microbatch may hold ``saved`` bytes; infinite if it cannot."""
        return self._hull.bound(saved - self.problem.held)

    def temporary(self, index: int) -> int:
        """Return the temporary bytes of a point."""
        if index not in self._temporary:
            choice = self.problem.savings.choose(self.points[index].runs)
            self._temporary[index] = self._problems.temporary(self.problem, choice)
        return self._temporary[index]

    def add_exact(self, saved: int) -> None:
        """Add the best choice that holds at most ``saved`` bytes, which may lie above the hull."""
        if saved in self._exact:
            return
        problem = self.problem.savings
        given = RecomputeProblem(
            problem.price, problem.maker, problem.storage, problem.savable, problem.needed, problem.nbytes, problem.reads
        )
        limit = Limit(np.zeros(len(problem.ops), np.int64), problem.nbytes, saved - self.problem.held)
        self._exact[saved] = None
        if limit.most < 0 or not len(problem.ops):
            return
        found = Program(given).search([limit], float("inf"))
        if found.runs is None:
            return
        choice = problem.choose(found.runs)
        point = FrontierPoint(choice.runs, self.problem.held + choice.nbytes, choice.seconds)
        known = self.points
        if not any(p.saved <= point.saved and p.seconds <= point.seconds for p in known):
            self._exact[saved] = point
            self.points = sorted([*known, point], key=lambda p: (p.seconds, -p.saved))
            self._temporary = {}


class StageFrontiers:
    """The frontiers of all intervals of positions."""

    def __init__(self, problems: StageProblems) -> None:
        self.problems = problems
        self._classes: dict[Hashable, StageFrontier] = {}
        self._known: dict[tuple[int, int], tuple[StageProblem, StageFrontier]] = {}

    @property
    def classes(self) -> int:
        """The number of classes so far."""
        return len(self._classes)

    def of(self, start: int, end: int) -> StageFrontier:
        """Return the frontier of a stage."""
        return self._at(start, end)[1]

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
        s = problem.savings
        arrays = (s.seconds, s.fixed, s.forced, s.late, s.maker, s.storage, s.savable, s.needed, s.nbytes, s.reads)
        return problem.held, *(array.tobytes() for array in arrays), self.problems.peaks.key(problem)

    def choice(self, start: int, end: int, index: int) -> Choice:
        """Return the choice of a stage at a point of its frontier."""
        problem, frontier = self._at(start, end)
        return problem.savings.choose(frontier.points[index].runs)

    def costs(self, start: int, end: int, index: int) -> StageCosts:
        """Return what a stage costs at a point of its frontier."""
        problem, frontier = self._at(start, end)
        return self.problems.costs_of(problem, self.choice(start, end, index), frontier.temporary(index))
