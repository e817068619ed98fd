"""A placement that was found with what is proven about it, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from splitkit.solvers.placement.problem import Floats, Ints

Key = Callable[[Ints, tuple[int, ...]], tuple[float, ...]]
"""What ties are broken by, the least first: (device of each unit, used devices from first stage to last) -> key."""


def stages_of(device: Ints, order: tuple[int, ...]) -> Ints:
    """(n,) the stage of each unit, from its device and the devices from first stage to last."""
    stage = np.zeros(max(order) + 1, np.int64)
    stage[list(order)] = np.arange(len(order))
    return stage[device]


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement.

    Attributes:
        device: (n,) the device of each unit.
        order: the used devices from the first stage to the last; empty where there are no stages.
        value: seconds of the most loaded device, or of the makespan.
        bound: no placement is better than this.
        solver: what found it, and what proved the bound if that was another.
        seconds: that the search took.
        loads: (d,) seconds of each device.
        tolerance: relative; what rounding may have cost a proof.
        turn: (n,) for a makespan: in which piece of its device a unit is, from 0.
    """

    device: Ints
    order: tuple[int, ...]
    value: float
    bound: float
    solver: str
    seconds: float
    loads: Floats
    tolerance: float
    turn: Ints | None = None

    @property
    def gap(self) -> float:
        """How much greater the value is than the bound, as a fraction of the value."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the value is the bound, within the tolerance."""
        return self.gap <= self.tolerance

    @property
    def limiting(self) -> int:
        """The most loaded device."""
        return int(np.argmax(self.loads))


class InfeasibleError(ValueError):
    """No placement keeps to the constraints, or none was found.

    Attributes:
        cause: ``"support"`` (no device supports all of ``units``, which share one), ``"devices"`` (fewer groups of
            units than devices to fill), ``"memory"`` or ``"unknown"`` (none was found, and none excluded).
        units: those concerned.
        capacity: the smallest number of bytes that would do if every device with a limit had it; None if unknown.
        devices: the fewest devices of the given (greatest) capacity that would do; None if no number does.
        exact: whether the two numbers are proven least.
    """

    def __init__(
        self,
        reason: str,
        cause: str,
        *,
        units: tuple[int, ...] = (),
        capacity: int | None = None,
        devices: int | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        self.units = units
        self.capacity = capacity
        self.devices = devices
        self.exact = exact
