"""What a search for parts of given devices is asked, and what follows: prices of each kind, limits, hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from splitkit.costs import Costs, Device, roofline
from splitkit.graph.select import modules_matching
from splitkit.plans.parts import PartKey
from splitkit.search.demand import Demand


@dataclass(frozen=True, eq=False)
class DeviceDemand(Demand):
    """What a search for parts of given devices is asked; the ends of ``links`` are the keys of the devices.

    Attributes:
        devices: key of the part -> device.
        together: patterns of module paths; what one matches goes to one device.
        only: pattern of module paths -> the keys of the devices that can run what it matches.
    """

    devices: Mapping[PartKey, Device] = field(default_factory=dict)
    together: Sequence[str] = ()
    only: Mapping[str, Collection[PartKey]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[PartKey, ...]:
        """Of the devices."""
        return tuple(self.devices)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The row of prices of each device."""
        names = [device.name for device in self.devices.values()]
        distinct = list(dict.fromkeys(names))
        return tuple(map(distinct.index, names))

    @cached_property
    def kind_prices(self) -> tuple[Costs, ...]:
        """The prices of each kind: as given where all are alike, else those of its roofline."""
        distinct = dict(zip(self.kinds, self.devices.values(), strict=True))
        if len(distinct) == 1:
            return (self.prices,)
        return tuple(self.trained(roofline(self.flow, distinct[kind])) for kind in range(len(distinct)))

    @cached_property
    def kind_seconds(self) -> tuple[Mapping[Node, float], ...]:
        """The prices of all nodes to place on each kind."""
        return tuple({n: prices.seconds(n) for n in self.flow.nodes} for prices in self.kind_prices)

    @cached_property
    def hosts(self) -> frozenset[int]:
        """The places of CPUs among accelerators, unless it is said how much memory they have."""
        cpus = {place for place, device in enumerate(self.devices.values()) if device.name == "cpu"}
        return frozenset(cpus if self.memory is None and len(cpus) < len(self.devices) else ())

    @cached_property
    def capacities(self) -> tuple[int | None, ...]:
        """Bytes of each device; None for hosts, and for no limit."""
        if self.memory is not None:
            return self.limits(len(self.devices))
        return tuple(None if i in self.hosts else device.memory for i, device in enumerate(self.devices.values()))

    @cached_property
    def groups(self) -> Mapping[Node, int]:
        """Node -> the number of the pattern that it goes together by."""
        number = {pattern: i for i, pattern in enumerate(self.together)}
        return {node: number[pattern] for node, pattern in modules_matching(number, self.flow.nodes).items()}

    @cached_property
    def supported(self) -> Mapping[Node, tuple[PartKey, ...]]:
        """Node -> the keys of the devices that can run it, where not all can."""
        return {n: tuple(self.only[pattern]) for n, pattern in modules_matching(self.only, self.flow.nodes).items()}
