"""A placement problem as arrays: units with prices, nets between them, devices, and constraints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

GRACE = 2.0
"""Seconds that a search may take besides those that its steps are counted for, so that busy machines end it alike."""

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class BadProblemError(ValueError):
    """A problem with prices or links that make no sense; arrays that do not fit each other are not looked for.

    Attributes:
        field: the field of `Problem` or `Slot` that is wrong.
        units: the units concerned.
        devices: the devices concerned.
    """

    def __init__(self, reason: str, field: str, units: tuple[int, ...] = (), devices: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.field = field
        self.units = units
        self.devices = devices


@dataclass(frozen=True)
class Slot:
    """A device on which units can be placed.

    Attributes:
        kind: the row of `Problem.seconds` that prices the units on this device.
        capacity: bytes; infinite by default.
        cpu: whether it is a CPU, which pays for no communication and has no limit on memory.
    """

    kind: int = 0
    capacity: float = float("inf")
    cpu: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """Units (n), kinds of devices, nets (m) with their pins (q), order edges (e), devices (d).

    A net is a value and all units that touch it: its first pin makes the value, the others read it. Each device that
    holds some of its pins, but not all, pays its cost once (a CPU pays nothing).

    Attributes:
        seconds: (kinds, n) of work, not negative; infinite where a kind does not support a unit.
        nbytes: (n,) int; the bytes that a unit always needs on its device.
        net_costs: (m,) seconds to move the value of a net, not negative.
        net_starts: (m + 1,) int; the pins of net i are ``pins[net_starts[i]:net_starts[i + 1]]``.
        pins: (q,) int; units.
        edges: (e, 2) int; pairs of units (first, then).
        devices: the devices on which units can be placed.
        colours: (n,) int; units of the same colour share a device. A negative number means no colour.
        saved: (n,) int; bytes that a unit keeps for every microbatch in flight.
        in_flight: the microbatches in flight in a stage, by the number of stages after it; the last entry holds for all
            further ones. (1, 2, 3, 4) is 1F1B with 4 or more microbatches over 4 stages; empty means none.
        links: (d, d) factors on the cost of a transfer from one device to another; ``None`` for 1 everywhere. A device
            that sends one value to several others pays for the slowest of these links.
        ordered: whether stages take the devices in their given order, the first stage the first device.
        fill: whether every device must get a unit.
    """

    seconds: Floats
    nbytes: Ints
    net_costs: Floats
    net_starts: Ints
    pins: Ints
    edges: Ints
    devices: tuple[Slot, ...]
    colours: Ints
    saved: Ints
    in_flight: tuple[int, ...] = ()
    links: Floats | None = None
    ordered: bool = False
    fill: bool = False

    @classmethod
    def of(
        cls,
        seconds: Floats,
        nets: list[tuple[float, tuple[int, ...]]],
        edges: list[tuple[int, int]],
        devices: list[Slot],
        *,
        nbytes: Ints | None = None,
        colours: Ints | None = None,
        saved: Ints | None = None,
        in_flight: tuple[int, ...] = (),
        links: Floats | None = None,
        ordered: bool = False,
        fill: bool = False,
    ) -> Problem:
        """Return the problem with nets given as ``(cost, pins)``; everything else is optional."""
        units = seconds.shape[-1]
        sizes = [len(pins) for _, pins in nets]
        return cls(
            seconds=np.atleast_2d(np.asarray(seconds, np.float64)),
            nbytes=np.zeros(units, np.int64) if nbytes is None else nbytes,
            net_costs=np.array([cost for cost, _ in nets], np.float64),
            net_starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            pins=np.array([pin for _, pins in nets for pin in pins], np.int64),
            edges=np.array(edges, np.int64).reshape(-1, 2),
            devices=tuple(devices),
            colours=np.full(units, -1, np.int64) if colours is None else colours,
            saved=np.zeros(units, np.int64) if saved is None else saved,
            in_flight=in_flight,
            links=links,
            ordered=ordered,
            fill=fill,
        )

    def __post_init__(self) -> None:
        bad = np.isnan(self.seconds).any(axis=0) | (self.seconds < 0).any(axis=0)
        if bad.any():
            raise BadProblemError("seconds are negative or missing", "seconds", _those(bad))
        bad = ~np.isfinite(self.net_costs) | (self.net_costs < 0)
        if bad.any():
            makers = tuple(map(int, self.pins[self.net_starts[:-1][bad]]))
            raise BadProblemError("the cost of a net is negative, missing or infinite", "net_costs", makers)
        if self.links is not None:
            linked = np.isfinite(self.links) & (self.links >= 0) | np.eye(len(self.devices), dtype=np.bool_)
            if not linked.all():
                devices = _those(~linked.all(axis=1))
                raise BadProblemError("a device has no link to another", "links", devices=devices)

    @property
    def units(self) -> int:
        """The number of units."""
        return int(self.seconds.shape[1])

    @cached_property
    def pin_nets(self) -> Ints:
        """(q,) the net of each pin."""
        return np.repeat(np.arange(len(self.net_costs)), np.diff(self.net_starts))


def _those(mask: Bools | np.bool_) -> tuple[int, ...]:
    return tuple(map(int, np.flatnonzero(mask)))
