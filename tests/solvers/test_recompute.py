"""The program of least recompute: against all choices, on small random problems."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from campaigns import these_first

from splitkit.solvers.recompute import Limit, Program, RecomputeProblem


def problem_of(seed):
    """Up to seven ops, some of two values, some that may not run again, some values of one storage."""
    random = np.random.default_rng(seed)
    n = int(random.integers(3, 8))
    maker = np.repeat(np.arange(n), random.integers(1, 3, n))
    m = len(maker)
    storage = np.unique(random.integers(0, m, m), return_inverse=True)[1]
    nbytes = random.integers(1, 9, storage.max() + 1)
    price = np.where(random.random(n) < 0.2, np.inf, random.integers(0, 6, n).astype(float))
    reads = [(o, v) for o in range(n) for v in range(m) if maker[v] < o and random.random() < 0.3]
    savable = (random.random(m) < 0.8) | np.isinf(price[maker])
    needed = random.random(m) < 0.5
    return RecomputeProblem(price, maker, storage, savable, needed, nbytes, np.array(reads, np.int64).reshape(-1, 2))


def is_sound(problem, runs, saved):
    has = runs[problem.maker] | (problem.savable & saved[problem.storage])
    return has[problem.needed].all() and all(has[v] for o, v in problem.reads.tolist() if runs[o])


def choices(problem):
    """(price, runs, saved) of each sound choice."""
    n, k = len(problem.price), len(problem.nbytes)
    for bits in product((False, True), repeat=n + k):
        runs, saved = np.array(bits[:n]), np.array(bits[n:])
        price = problem.price[runs].sum()
        if np.isfinite(price) and is_sound(problem, runs, saved):
            yield float(price), runs, saved


@pytest.mark.parametrize("seed", these_first(range(12), range(12, 40)))
def test_no_choice_within_the_limits_is_cheaper(seed):
    problem = problem_of(seed)
    random = np.random.default_rng(seed)
    sound = list(choices(problem))
    program = Program(problem)
    none = np.zeros(len(problem.price), np.int64)
    for most in range(0, int(problem.nbytes.sum()) + 1, 4):
        moment = random.integers(0, 9, len(problem.price)), random.integers(0, 9, len(problem.nbytes))
        limits = [Limit(none, problem.nbytes, most), Limit(*moment, most + 6)]
        best = min((p for p, *bits in sound if all(limit.holds(*bits) for limit in limits)), default=np.inf)
        found = program.search(limits)
        saved, bound = program.relaxed(limits)
        assert bound <= best and (saved <= 1).all()
        if np.isinf(best):
            assert found.runs is None and np.isinf(found.price)
            continue
        assert found.price == pytest.approx(best, rel=1e-4) and found.bound <= best + 1e-9
        assert is_sound(problem, found.runs, found.saved) and all(
            limit.holds(found.runs, found.saved) for limit in limits
        )
        assert 0 <= found.gap <= 1e-3


def test_of_equal_prices_little_is_saved():
    """Two values that nobody needs, and one that is: only that one is saved."""
    nothing = np.zeros((0, 2), np.int64)
    problem = RecomputeProblem(
        np.array([1.0, 0.0, 0.0]), np.arange(3), np.arange(3), np.ones(3, bool), np.array([True, False, False]),
        np.array([5, 1, 1]), nothing,
    )  # fmt: skip
    found = Program(problem).search([])
    assert found.price == 0 and found.saved.tolist() == [True, False, False] and not found.runs.any()


def test_a_limit_is_exact_in_the_last_byte():
    """A byte less than what must be saved: no choice, though HiGHS would forgive a millionth."""
    big = 10**10
    problem = RecomputeProblem(
        np.array([np.inf]), np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, bool), np.ones(1, bool),
        np.array([big]), np.zeros((0, 2), np.int64),
    )  # fmt: skip
    program = Program(problem)
    assert program.search([Limit(np.zeros(1, np.int64), problem.nbytes, big)]).saved.tolist() == [True]
    assert program.search([Limit(np.zeros(1, np.int64), problem.nbytes, big - 1)]).runs is None


@pytest.mark.parametrize("seed", these_first(range(12), range(12, 40)))
def test_near_the_best_fractions(seed):
    """What is found keeps to the limits; the bound holds for all choices; without limits both are exact."""
    problem = problem_of(seed)
    random = np.random.default_rng(seed)
    sound, program = list(choices(problem)), Program(problem)
    free = min((price for price, *_ in sound), default=np.inf)
    near = program.beside([], 0)
    assert near.price == pytest.approx(free) and near.bound <= free + 1e-9
    for most in range(0, int(problem.nbytes.sum()) + 1, 4):
        moment = random.integers(0, 9, len(problem.price)), random.integers(0, 9, len(problem.nbytes))
        limit = Limit(*moment, most + 6)
        best = min((p for p, *bits in sound if limit.holds(*bits)), default=np.inf)
        near = program.beside([limit], 0)
        assert near.bound <= best + 1e-9 and near.price >= best - 1e-9
        assert (near.runs is None) == np.isinf(best)
        if near.runs is not None:
            assert is_sound(problem, near.runs, near.saved) and limit.holds(near.runs, near.saved)


def test_nothing_to_choose():
    none, nothing = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    program = Program(RecomputeProblem(np.zeros(0), none, none, nothing, nothing, none, none.reshape(-1, 2)))
    for find in (program.search, lambda limits: program.beside(limits, 0)):
        found, over = find([Limit(none, none, 0)]), find([Limit(none, none, -1)])
        assert (found.runs is not None, found.price, found.bound) == (True, 0.0, 0.0)
        assert over.runs is None and over.bound == np.inf
