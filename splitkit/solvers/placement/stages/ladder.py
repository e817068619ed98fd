"""The steps in which stages are put on devices, from the last stage to the first.

A level says which devices are used up. Devices that are alike are counted, so k equal accelerators and one host make
(k + 1) x 2 levels. The last stage comes first because what a stage holds in flight depends on the stages after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from splitkit.solvers.placement.core import BIG, Core

MOST_LEVELS = 4096
"""More than these are too many to go through."""


@dataclass(frozen=True)
class Step:
    """One stage more.

    Attributes:
        low: the level before.
        high: the level after; each comes after all levels from which it is reached.
        kind: the class of the device, an index of `Core.kinds`; -1 for a device that stays empty.
        flight: microbatches in flight in this stage.
    """

    low: int
    high: int
    kind: int
    flight: int


@dataclass(frozen=True)
class Ladder:
    """All levels and steps.

    Attributes:
        used: for each level how many devices of each class are used up.
        steps: sorted by where they lead.
        ends: levels at which every unit may be placed.
        reach: for each level how much least work its devices take for each unit of the greatest load.
        left: the same of the devices that are still there.
        hosts: for each level whether a host may be among its devices, and among those still there.
        in_flight: see `Problem`.
        ordered: stages take the devices in their order.
        fill: no device stays empty.
    """

    used: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    reach: tuple[float, ...]
    left: tuple[float, ...]
    hosts: tuple[tuple[bool, bool], ...]
    in_flight: tuple[int, ...]
    ordered: bool
    fill: bool

    @property
    def least_flight(self) -> int:
        """The fewest microbatches that a stage can have in flight."""
        return min(self.in_flight, default=0)

    @property
    def levels(self) -> int:
        """How many levels; 0 is the one where nothing is placed."""
        return len(self.reach)

    def flight(self, after: int) -> int:
        """Microbatches in flight in a stage with so many stages after it."""
        return flight_of(self.in_flight, after)

    def most(self, level: int, limit: int) -> int:
        """The most least work that the devices of a level take when each load is at most ``limit``."""
        return int(min(self.reach[level] * limit * (1 + 1e-12) + 1, BIG))

    def rest(self, level: int, limit: int) -> int:
        """The same of the devices that are still there."""
        return int(min(self.left[level] * limit * (1 + 1e-12) + 1, BIG))


def flight_of(in_flight: tuple[int, ...], after: int) -> int:
    """Microbatches in flight in a stage with so many stages after it; see `Problem`."""
    return in_flight[min(after, len(in_flight) - 1)] if in_flight else 0


def level_count(core: Core, ordered: bool) -> int:
    """How many levels there are."""
    counts = [len(kind.devices) for kind in core.kinds]
    return sum(counts) + 1 if ordered else prod(count + 1 for count in counts)


def ladder(core: Core, in_flight: tuple[int, ...], *, ordered: bool, fill: bool) -> Ladder:
    """The levels of a core's devices.

    Args:
        core: whose classes of devices; each is one device where they are ``ordered``.
        in_flight: see `Problem`.
        ordered: stages take the devices in their order.
        fill: no device stays empty.
    """
    counts = [len(kind.devices) for kind in core.kinds]
    if ordered:
        order = sorted(range(len(counts)), key=lambda kind: -core.kinds[kind].devices[0])
        levels = [tuple(int(kind in order[:used]) for kind in range(len(counts))) for used in range(len(counts) + 1)]
    else:
        levels = sorted(product(*(range(count + 1) for count in counts)), key=lambda level: (sum(level), level))
    number = {level: index for index, level in enumerate(levels)}
    steps = []
    for level in levels:
        for kind in range(len(counts)):
            above = (*level[:kind], level[kind] + 1, *level[kind + 1 :])
            if above in number:
                steps.append(Step(number[level], number[above], kind, flight_of(in_flight, sum(level))))
                if ordered and not fill:
                    steps.append(Step(number[level], number[above], -1, 0))
    steps.sort(key=lambda step: (step.high, step.low, step.kind))
    speeds = ratios(core)
    reach = [sum(n * ratio for n, ratio in zip(level, speeds, strict=True)) for level in levels]
    full = tuple(counts)
    hosts = [kind for kind, spec in enumerate(core.kinds) if spec.host]
    return Ladder(
        used=tuple(levels),
        steps=tuple(steps),
        ends=(number[full],) if fill or ordered else tuple(range(len(levels))),
        reach=tuple(reach),
        left=tuple(sum((c - n) * r for c, n, r in zip(full, level, speeds, strict=True)) for level in levels),
        hosts=tuple(
            (any(level[kind] for kind in hosts), any(level[kind] < full[kind] for kind in hosts)) for level in levels
        ),
        in_flight=in_flight,
        ordered=ordered,
        fill=fill,
    )


def ratios(core: Core) -> list[float]:
    """How much least work, at most, each class does in one unit of its own time."""
    found = []
    for work, barred in zip(core.work, core.barred, strict=True):
        counted = ~barred & (core.least_work > 0)
        found.append(float((core.least_work[counted] / np.maximum(work[counted], 1)).max(initial=0.0)))
    return found
