"""V-cycles: stages of a large core are found on a coarse core and refined on the way back to the finest.

Acyclic multilevel partitioning (Herrmann et al., SIAM J. Sci. Comput. 2019, see `coarsen`), with the greatest load as
the objective in place of the edge cut, and with the dynamic program over places near the borders (`order_dp`) besides
moves of single units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.multilevel.coarsen import Coarse, coarsen
from splitkit.solvers.placement.multilevel.refine import refine_stages
from splitkit.solvers.placement.orders import order_within_stages
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.device_steps import DeviceSteps
from splitkit.solvers.placement.stages.order_dp import OrderDP
from splitkit.solvers.placement.stages.stage_loads import StageRanks

_COARSEST, _SHARE, _EACH = 1000, 4, 20  # the coarsest core has so many units or a fourth of all, at least 20 a device
_ROUNDS = 6  # rounds over all pairs of stages, for each core
_PLACES, _NEAREST = 1024, 4  # where an order can be cut: about so many places, so many on either side of each cut
_OF_AN_ORDER = 16  # ties drawn along one order


class VCycle:
    """The V-cycles of one core.

    Args:
        core: the finest core; edges go from later units to earlier ones, as in `StageSearch`.
        device_steps: the levels and steps of the devices.
    """

    def __init__(self, core: Core, device_steps: DeviceSteps) -> None:
        self._core = core
        self._device_steps = device_steps
        devices = sum(len(kind.devices) for kind in core.kinds)
        self._coarsest = max(min(_COARSEST, core.size // _SHARE), _EACH * devices)

    def fresh(self, place: Callable[[Core], StageRanks | None]) -> StageRanks | None:
        """Return stages found for the coarsest core and refined; None if none are found."""
        levels = coarsen(self._core, self._coarsest)
        found = place(levels[-1].core if levels else self._core)
        return self._refined(levels, found, np.random.default_rng(0)) if found else None

    def again(self, stages: StageRanks, seed: int) -> StageRanks:
        """Return stages with no greater load, refined through coarser cores in which each unit is in one stage."""
        levels = coarsen(self._core, self._coarsest, stages.rank, seed)
        rank = stages.rank
        for level in levels:
            rank = rank[np.unique(level.label, return_index=True)[1]]
        return self._refined(levels, replace(stages, rank=rank), np.random.default_rng(seed))

    def _refined(self, levels: list[Coarse], stages: StageRanks, random: np.random.Generator) -> StageRanks:
        """Return stages of the finest core from stages of the coarsest, improved at each level."""
        for level in reversed(levels):
            stages = self._better(level.core, stages, random)
            stages = replace(stages, rank=stages.rank[level.label])
        return self._better(self._core, stages, random)

    def _better(self, core: Core, stages: StageRanks, random: np.random.Generator) -> StageRanks:
        """Improve stages by moves, then by other borders along an order in which the stages follow each other."""
        stages = refine_stages(core, stages, self._flights(stages.kinds), _ROUNDS)
        found = _along(core, stages, random).best(self._device_steps, stages.value)
        return found[0] if found else stages

    def ties(self, stages: StageRanks, count: int) -> list[StageRanks]:
        """Return some other stages of equal value, along orders in which the stages follow each other."""
        random = np.random.default_rng(0)
        found: list[StageRanks] = []
        while len(found) < count:
            drawn = list(
                _along(self._core, stages, random).ties(self._device_steps, stages.value, _OF_AN_ORDER, random)
            )
            if not drawn:
                break
            found += drawn
        return found[:count]

    def _flights(self, kinds: tuple[int, ...]) -> Ints:
        """Return (stages,) the microbatches in flight in each stage."""
        after = list(range(len(kinds)))
        if self._device_steps.ordered:
            last = len(self._core.kinds) - 1
            after = [last - self._core.kinds[kind].devices[0] for kind in kinds]
        return np.array([self._device_steps.flight(count) for count in after], np.int64)


def _along(core: Core, stages: StageRanks, random: np.random.Generator) -> OrderDP:
    """Return a random order in which the stages follow each other, with the places near their borders."""
    cuts = np.cumsum(np.bincount(stages.rank))[:-1]
    reach = max(_NEAREST, _PLACES // (2 * max(1, len(cuts))))
    places = (cuts[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
    places = np.unique(np.concatenate([[0, core.size], np.clip(places, 0, core.size)]))
    return OrderDP(core, order_within_stages(core, stages.rank, random), places)
