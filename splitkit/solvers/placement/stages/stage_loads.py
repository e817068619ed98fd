"""Stages of a core's units, with their loads and bytes in whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Ints


@dataclass(frozen=True, eq=False)
class StageRanks:
    """An assignment of units to stages, numbered from the last stage to the first.

    Attributes:
        value: the greatest load, as a whole number.
        rank: (n,) the stage of each unit; 0 is the last stage.
        kinds: the class of each stage's device.
    """

    value: int
    rank: Ints
    kinds: tuple[int, ...]


def stage_loads(core: Core, rank: Ints, kinds: tuple[int, ...]) -> Ints:
    """Return (stages,) the load of each stage, from the definition; each unit must be supported where it is."""
    total = np.zeros(len(kinds), np.int64)
    of_stage = np.array(kinds, np.int64)
    np.add.at(total, rank, core.work[of_stage[rank], np.arange(core.size)])
    pairs = np.unique(core.pin_nets * len(kinds) + rank[core.pins])
    net, stage = pairs // len(kinds), pairs % len(kinds)
    cut = (np.bincount(net, minlength=core.costs.shape[1]) > 1)[net]
    np.add.at(total, stage[cut], core.costs[of_stage[stage[cut]], net[cut]])
    return total


def fits(core: Core, rank: Ints, kinds: tuple[int, ...], flights: tuple[int, ...]) -> bool:
    """Return whether each stage's class supports its units and holds them with the microbatches in flight."""
    of_stage = np.array(kinds, np.int64)
    if core.barred[of_stage[rank], np.arange(core.size)].any():
        return False
    held = np.zeros(len(kinds), np.int64)
    np.add.at(held, rank, core.nbytes + np.array(flights, np.int64)[rank] * core.saved)
    return all(int(most) <= core.kinds[kind].capacity for most, kind in zip(held, kinds, strict=True))
