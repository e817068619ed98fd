"""The 0/1 knapsack: items of the largest total value within a capacity, which the result never exceeds.

HiGHS (Huangfu and Hall 2018) solves it to a gap of 1e-4, through scipy. Its tolerance on the capacity is 1e-6, so the
choice is checked with the exact sum and mended, and the greedy choice by value per weight (Dantzig 1957) is taken if it
is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import fsum

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

_GAP = 1e-4
_NODES = 1000
"""The limit on the search tree of HiGHS; a count, so that every run ends at the same place."""


def fill_knapsack(values: Sequence[float], weights: Sequence[float], capacity: float) -> list[int]:
    """Return the indices of the chosen items, ascending.

    Args:
        values: value of each item, 0 or more.
        weights: weight of each item, 0 or more; an item without weight is always chosen.
        capacity: the most that the chosen items may weigh; nothing that weighs is chosen at 0 or less.
    """
    by_density = sorted(range(len(values)), key=lambda i: (-_density(values[i], weights[i]), weights[i], i))
    greedy = _fitting(by_density, weights, capacity)
    within = [i for i in by_density if 0 < weights[i] <= capacity]
    free = [i for i in by_density if weights[i] <= 0]
    if len(greedy) == len(free) + len(within):
        return sorted(greedy)
    exact = _fitting([*free, *_solved(values, weights, capacity, within), *by_density], weights, capacity)
    return sorted(max(greedy, exact, key=lambda chosen: fsum(values[i] for i in chosen)))


def _density(value: float, weight: float) -> float:
    return value / weight if weight > 0 else float("inf")


def _solved(values: Sequence[float], weights: Sequence[float], capacity: float, items: list[int]) -> list[int]:
    """Return the choice of HiGHS among the items, which may be over the capacity by its tolerance."""
    worth = np.array([values[i] for i in items])
    scale = worth.max()
    if scale <= 0:
        return []
    rows = LinearConstraint(np.array([[weights[i] / capacity for i in items]]), ub=1.0)
    found = milp(
        -worth / scale,
        integrality=np.ones(len(items)),
        bounds=Bounds(0, 1),
        constraints=rows,
        options={"mip_rel_gap": _GAP, "node_limit": _NODES, "presolve": False},
    )
    return [] if found.x is None else [i for i, x in zip(items, found.x, strict=True) if x > 0.5]


def _fitting(items: Iterable[int], weights: Sequence[float], capacity: float) -> list[int]:
    """Return the items, each taken once and in this order, that fit beside those before them."""
    chosen, room = list[int](), Fraction(capacity)  # fractions, so that no sum is rounded
    for i in dict.fromkeys(items):
        weight = Fraction(weights[i])
        if weight <= 0 or weight <= room:
            chosen.append(i)
            room -= max(weight, Fraction(0))
    return chosen
