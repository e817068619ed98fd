"""Groups of units on devices whose links differ, with the price of each value on each link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.solution import cycles

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class LinkPrices:
    """What values (m) cost on the links between devices (d).

    Attributes:
        nbytes: (m,) bytes of each value.
        pins: for each value, the units that touch it, its maker first.
        latency: (d, d) seconds.
        bandwidth: (d, d) bytes a second.
        again: how many times a value crosses.
    """

    nbytes: Floats
    pins: tuple[tuple[int, ...], ...]
    latency: Floats
    bandwidth: Floats
    again: int


@dataclass(frozen=True, eq=False)
class UnequalLinks:
    """Groups (n) to be placed on devices (d), with the values (m) that more than one group touches.

    A device that reads a value of another device pays for the link from there; the maker's device pays for the slowest
    of the links over which it sends the value. A CPU pays nothing.

    Attributes:
        work: (d, n) seconds; infinite where a device does not support a group.
        nbytes: (n,) bytes of each group on its device.
        capacity: (d,) bytes.
        cpu: (d,) whether a device is a CPU, which pays nothing.
        edges: (e, 2) pairs of groups (first, then).
        acyclic: whether devices must not depend on each other in a cycle.
        makers: (m,) the group that makes each value.
        readers: for each value, the groups that read it, without its maker.
        sizes: (m,) bytes of each value.
        latency: (d, d) seconds of a transfer, times the number of crossings.
        slowness: (d, d) seconds per byte, times the number of crossings.
    """

    work: Floats
    nbytes: Ints
    capacity: Floats
    cpu: Bools
    edges: Ints
    acyclic: bool
    makers: Ints
    readers: tuple[Ints, ...]
    sizes: Floats
    latency: Floats
    slowness: Floats

    @classmethod
    def of(
        cls,
        work: Floats,
        nbytes: Ints,
        capacity: Floats,
        cpu: Bools,
        edges: Ints,
        prices: LinkPrices,
        group: Ints,
        *,
        acyclic: bool,
    ) -> UnequalLinks:
        """Return the problem over groups of units; ``work`` to ``edges`` are of groups already, ``prices``
        is of units.
        """
        apart = ~np.eye(len(work), dtype=np.bool_)
        found = [(group[list(pins)], size) for pins, size in zip(prices.pins, prices.nbytes.tolist(), strict=True)]
        kept = [(ends[0], np.setdiff1d(ends, ends[:1]), size) for ends, size in found if (ends != ends[0]).any()]
        return cls(
            work=work,
            nbytes=nbytes,
            capacity=capacity,
            cpu=cpu,
            edges=edges,
            acyclic=acyclic,
            makers=np.array([maker for maker, _, _ in kept], np.int64),
            readers=tuple(readers for _, readers, _ in kept),
            sizes=np.array([size for _, _, size in kept], np.float64),
            latency=np.where(apart, prices.again * prices.latency, 0.0),
            slowness=np.where(apart, prices.again / prices.bandwidth, 0.0),
        )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.work)

    @property
    def size(self) -> int:
        """The number of groups."""
        return int(self.work.shape[1])

    @cached_property
    def prices(self) -> Floats:
        """(m, d, d) seconds of each value from one device to another."""
        return self.latency[None] + self.slowness[None] * self.sizes[:, None, None]

    @cached_property
    def _reads(self) -> tuple[Ints, Ints]:
        """The value and the reader of each read."""
        counts = [len(readers) for readers in self.readers]
        return np.repeat(np.arange(len(counts)), counts), np.concatenate([_NONE, *self.readers])

    def loads(self, device: Ints) -> Floats:
        """Return (d,) seconds of each device, from the definition."""
        total = np.zeros(self.devices)
        np.add.at(total, device, self.work[device, np.arange(self.size)])
        value, reader = self._reads
        pairs = np.unique(value * self.devices + device[reader])
        value, to = pairs // self.devices, pairs % self.devices
        home = device[self.makers[value]]
        value, to, home = (column[home != to] for column in (value, to, home))
        price = self.latency[home, to] + self.slowness[home, to] * self.sizes[value]
        slowest = np.zeros(len(self.sizes))
        np.maximum.at(slowest, value, price)
        np.add.at(total, to[~self.cpu[to]], price[~self.cpu[to]])
        sends = np.unique(value)
        makers = device[self.makers[sends]]
        np.add.at(total, makers[~self.cpu[makers]], slowest[sends][~self.cpu[makers]])
        return total

    def is_legal(self, device: Ints) -> bool:
        """Return whether devices support and hold their groups, without cyclic dependencies."""
        if not np.isfinite(self.work[device, np.arange(self.size)]).all():
            return False
        held = np.bincount(device, self.nbytes, self.devices)
        if (held > self.capacity).any():
            return False
        return not self.acyclic or not cycles(device[self.edges], self.devices)
