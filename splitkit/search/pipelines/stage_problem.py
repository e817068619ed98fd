"""Holds the recompute problem of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.training.choices import Savings

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageProblem:
    """What one stage may save or compute again.

    Attributes:
        start: its first position.
        end: the position behind its last.
        savings: the problem; storages that are held in any case have 0 bytes.
        ops: (n,) the numbers of its ops in the problem of the whole graph.
        held: bytes that are held in any case: received and sent values.
        held_storages: the storages of sent values.
    """

    start: int
    end: int
    savings: Savings
    ops: Ints
    held: int
    held_storages: frozenset[int]
