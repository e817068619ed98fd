"""The steps in which stages are assigned to devices, from the last stage to the first.

A level says which devices are used up. Equal devices are counted, so k equal accelerators and one CPU make (k + 1) x 2
levels. The last stage comes first because the microbatches that a stage has in flight depend on the stages after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from splitkit.solvers.placement.core import BIG, Core

MOST_LEVELS = 4096
"""A dynamic program visits every level, so problems with more levels are refused to it."""


@dataclass(frozen=True)
class DeviceStep:
    """The assignment of one more stage to a device.

    Attributes:
        low: the level before the step.
        high: the level after the step; levels are numbered so that each comes after the levels that lead to it.
        kind: the class of the device, an index of `Core.kinds`; -1 for a device that stays empty.
        flight: the number of microbatches in flight in this stage.
    """

    low: int
    high: int
    kind: int
    flight: int


@dataclass(frozen=True)
class DeviceSteps:
    """All levels, and the steps between them.

    Attributes:
        used: how many devices of each class are used up, for each level.
        steps: the steps, sorted by the level that they lead to.
        ends: the levels at which every unit may be placed.
        reach: for each level, how much least work its devices can do per unit of the greatest load.
        left: for each level, how much least work the remaining devices can do per unit of the greatest load.
        cpus: for each level, whether its devices may include a CPU, and whether the remaining ones may.
        in_flight: see `Problem`.
        ordered: whether stages take the devices in their given order.
        fill: whether every device must get a unit.
    """

    used: tuple[tuple[int, ...], ...]
    steps: tuple[DeviceStep, ...]
    ends: tuple[int, ...]
    reach: tuple[float, ...]
    left: tuple[float, ...]
    cpus: tuple[tuple[bool, bool], ...]
    in_flight: tuple[int, ...]
    ordered: bool
    fill: bool

    @property
    def least_flight(self) -> int:
        """The fewest microbatches that a stage can have in flight."""
        return min(self.in_flight, default=0)

    @property
    def levels(self) -> int:
        """The number of levels; at level 0 nothing is placed."""
        return len(self.reach)

    def flight(self, after: int) -> int:
        """Return the number of microbatches in flight in a stage with ``after`` stages after it."""
        return in_flight_of_stage(self.in_flight, after)

    def most(self, level: int, limit: int) -> int:
        """Return an upper bound on what a level's devices do within ``limit``, in work at each unit's fastest class."""
        return int(min(self.reach[level] * limit * (1 + 1e-12) + 1, BIG))

    def rest(self, level: int, limit: int) -> int:
        """Return the upper bound of `most` for the remaining devices."""
        return int(min(self.left[level] * limit * (1 + 1e-12) + 1, BIG))


def in_flight_of_stage(in_flight: tuple[int, ...], after: int) -> int:
    """Return the number of microbatches in flight in a stage with ``after`` stages after it; see `Problem`."""
    return in_flight[min(after, len(in_flight) - 1)] if in_flight else 0


def level_count(core: Core, ordered: bool) -> int:
    """Return the number of levels without making them."""
    counts = [len(kind.devices) for kind in core.kinds]
    return sum(counts) + 1 if ordered else prod(count + 1 for count in counts)


def device_steps(core: Core, in_flight: tuple[int, ...], *, ordered: bool, fill: bool) -> DeviceSteps:
    """Return the levels and steps for a core's devices.

    Args:
        core: the core, with its classes of devices; each class is one device if they are ``ordered``.
        in_flight: see `Problem`.
        ordered: whether stages take the devices in their given order.
        fill: whether every device must get a unit.
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
                steps.append(DeviceStep(number[level], number[above], kind, in_flight_of_stage(in_flight, sum(level))))
                if ordered and not fill:
                    steps.append(DeviceStep(number[level], number[above], -1, 0))
    steps.sort(key=lambda step: (step.high, step.low, step.kind))
    speeds = class_speeds(core)
    reach = [sum(n * ratio for n, ratio in zip(level, speeds, strict=True)) for level in levels]
    full = tuple(counts)
    cpus = [kind for kind, spec in enumerate(core.kinds) if spec.cpu]
    return DeviceSteps(
        used=tuple(levels),
        steps=tuple(steps),
        ends=(number[full],) if fill or ordered else tuple(range(len(levels))),
        reach=tuple(reach),
        left=tuple(sum((c - n) * r for c, n, r in zip(full, level, speeds, strict=True)) for level in levels),
        cpus=tuple(
            (any(level[kind] for kind in cpus), any(level[kind] < full[kind] for kind in cpus)) for level in levels
        ),
        in_flight=in_flight,
        ordered=ordered,
        fill=fill,
    )


def class_speeds(core: Core) -> list[float]:
    """Return the most work, counted at each unit's fastest class, that each class of devices does in a unit of time."""
    found = []
    for work, barred in zip(core.work, core.barred, strict=True):
        counted = ~barred & (core.least_work > 0)
        found.append(float((core.least_work[counted] / np.maximum(work[counted], 1)).max(initial=0.0)))
    return found
