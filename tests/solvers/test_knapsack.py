"""The knapsack against enumeration, and the instances on which torch's solvers exceed their budget."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations

from splitkit.solvers.knapsack import fill_knapsack


def test_against_all_subsets():
    draw = random.Random(0)
    for _ in range(150):
        count = draw.randint(0, 8)
        weights = [draw.choice([0, 1, 2, 5, 7, 26]) for _ in range(count)]
        values = [draw.randint(0, 50) for _ in range(count)]
        capacity = draw.choice([0, 3, 10, 25, 40])
        chosen = fill_knapsack(values, weights, capacity)
        assert chosen == sorted(set(chosen)) and sum(weights[i] for i in chosen) <= capacity
        subsets = (c for k in range(count + 1) for c in combinations(range(count), k))
        best = max(sum(values[i] for i in c) for c in subsets if sum(weights[i] for i in c) <= capacity)
        assert sum(values[i] for i in chosen) >= best * (1 - 1e-4)


def test_rounding_never_exceeds_the_capacity():
    draw = random.Random(1)
    for _ in range(20):
        weights = [draw.random() * 1e-4 for _ in range(60)]
        capacity = draw.random() * sum(weights)
        chosen = fill_knapsack([1.0] * 60, weights, capacity)
        assert sum(Fraction(weights[i]) for i in chosen) <= Fraction(capacity)


def test_the_greedy_choice_is_mended():
    assert fill_knapsack([60, 100, 120], [10, 20, 30], 50) == [1, 2]
    assert fill_knapsack([5, 1], [0, 9], 0) == [0]
    assert fill_knapsack([0, 0], [1, 1], 1) in ([0], [1], [])
    assert fill_knapsack([], [], 1) == []
