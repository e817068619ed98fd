"""Stages of a large core through coarser ones: placed where the core is coarse, refined on the way back to the finest.

Acyclic multilevel partitioning (Herrmann et al., SIAM J. Sci. Comput. 2019, see `coarsen`), with the greatest load in
the place of the cut, and with the dynamic program over places near the cuts (`linear`) beside moves of single units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.multilevel.coarsen import Coarse, coarsened
from splitkit.solvers.placement.multilevel.refine import refined
from splitkit.solvers.placement.orders import within
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.along import Along
from splitkit.solvers.placement.stages.ladder import Ladder
from splitkit.solvers.placement.stages.stages import StageRanks

_COARSEST, _SHARE, _EACH = 1000, 4, 20  # the coarsest core has so many units or a fourth of all, at least 20 a device
_ROUNDS = 6  # over all pairs of stages, for each core
_PLACES, _NEAREST = 1024, 4  # where an order can be cut: about so many places, so many on either side of each cut
_OF_AN_ORDER = 16  # ties that are drawn along one order


class VCycle:
    """Ways down to a coarse core and up again.

    Args:
        core: the finest; edges go from later units to those before them, as in `Search`.
        ladder: how its devices are taken, one after the other.
    """

    def __init__(self, core: Core, ladder: Ladder) -> None:
        self._core = core
        self._ladder = ladder
        devices = sum(len(kind.devices) for kind in core.kinds)
        self._coarsest = max(min(_COARSEST, core.size // _SHARE), _EACH * devices)

    def fresh(self, place: Callable[[Core], StageRanks | None]) -> StageRanks | None:
        """Stages that are found for the coarsest core, refined; None if none are found."""
        levels = coarsened(self._core, self._coarsest)
        found = place(levels[-1].core if levels else self._core)
        return self._refined(levels, found, np.random.default_rng(0)) if found else None

    def again(self, stages: StageRanks, seed: int) -> StageRanks:
        """Stages with no greater greatest load, through coarser cores in which every unit is of one stage."""
        levels = coarsened(self._core, self._coarsest, stages.rank, seed)
        rank = stages.rank
        for level in levels:
            rank = rank[np.unique(level.label, return_index=True)[1]]
        return self._refined(levels, replace(stages, rank=rank), np.random.default_rng(seed))

    def _refined(self, levels: list[Coarse], stages: StageRanks, random: np.random.Generator) -> StageRanks:
        """Stages of the finest core from those of the coarsest, better at each level."""
        for level in reversed(levels):
            stages = self._better(level.core, stages, random)
            stages = replace(stages, rank=stages.rank[level.label])
        return self._better(self._core, stages, random)

    def _better(self, core: Core, stages: StageRanks, random: np.random.Generator) -> StageRanks:
        """Better stages by moves, then by other cuts along an order in which the stages follow each other."""
        stages = refined(core, stages, self._flights(stages.kinds), _ROUNDS)
        found = _along(core, stages, random).best(self._ladder, stages.value)
        return found[0] if found else stages

    def ties(self, stages: StageRanks, count: int) -> list[StageRanks]:
        """Some other stages that are as good, along orders in which the stages follow each other."""
        random = np.random.default_rng(0)
        found: list[StageRanks] = []
        while len(found) < count:
            drawn = list(_along(self._core, stages, random).ties(self._ladder, stages.value, _OF_AN_ORDER, random))
            if not drawn:
                break
            found += drawn
        return found[:count]

    def _flights(self, kinds: tuple[int, ...]) -> Ints:
        """(stages,) microbatches in flight in each stage."""
        after = list(range(len(kinds)))
        if self._ladder.ordered:
            last = len(self._core.kinds) - 1
            after = [last - self._core.kinds[kind].devices[0] for kind in kinds]
        return np.array([self._ladder.flight(count) for count in after], np.int64)


def _along(core: Core, stages: StageRanks, random: np.random.Generator) -> Along:
    """A random order in which the stages follow each other, with the places near where they are cut."""
    cuts = np.cumsum(np.bincount(stages.rank))[:-1]
    reach = max(_NEAREST, _PLACES // (2 * max(1, len(cuts))))
    places = (cuts[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
    places = np.unique(np.concatenate([[0, core.size], np.clip(places, 0, core.size)]))
    return Along(core, within(core, stages.rank, random), places)
