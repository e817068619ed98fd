"""Pairs the parts of two plans so that as many nodes as possible are in paired parts, and names parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from splitkit.plans.parts import PARENT, PartKey
from splitkit.view.data.report import part_title

A = TypeVar("A", bound=Hashable)
B = TypeVar("B", bound=Hashable)


def paired(homes: Iterable[tuple[A, B]], ours: Sequence[A], theirs: Sequence[B]) -> dict[B, A]:
    """Return part of the second plan -> part of the first, one to one; parts without a common node have none.

    Args:
        homes: for each node, its part in the first plan and in the second.
        ours: the parts of the first plan that are paired.
        theirs: the parts of the second plan that are paired.
    """
    row, column = {key: i for i, key in enumerate(theirs)}, {key: i for i, key in enumerate(ours)}
    shared = np.zeros((len(theirs), len(ours)))
    for here, there in homes:
        if there in row and here in column:
            shared[row[there], column[here]] += 1
    pairs = zip(*linear_sum_assignment(-shared), strict=True)
    return {theirs[i]: ours[j] for i, j in pairs if shared[i, j]}


def name_of_part(key: PartKey) -> str:
    """Return the name of a part, or ``"parent"``."""
    return "parent" if key is PARENT else part_title(key)
