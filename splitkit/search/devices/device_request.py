"""The request behind a search for parts of given devices, and what follows from it: prices, limits, CPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from splitkit.costs import Costs, Device, roofline
from splitkit.graph.node_selection import modules_matching
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.plans.parts import PartKey
from splitkit.search.request import StageRequest


@dataclass(frozen=True, eq=False)
class DeviceRequest(StageRequest):
    """A request for parts of given devices; the ends of ``links`` are the keys of the devices.

    Attributes:
        devices: key of the part -> device.
        together: patterns of module paths; all nodes that one pattern matches go to one device.
        only: pattern of module paths -> keys of the devices that can run the nodes it matches.
    """

    devices: Mapping[PartKey, Device] = field(default_factory=dict)
    together: Sequence[str] = ()
    only: Mapping[str, Collection[PartKey]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[PartKey, ...]:
        """The keys of the devices."""
        return tuple(self.devices)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The row of prices that each device uses."""
        distinct = list(dict.fromkeys(self.devices.values()))
        return tuple(map(distinct.index, self.devices.values()))

    @cached_property
    def kind_prices(self) -> tuple[Costs, ...]:
        """The prices of each kind of device: the given ones if all devices are alike, else each kind's roofline."""
        distinct = dict(zip(self.kinds, self.devices.values(), strict=True))
        if len(distinct) == 1:
            return (self.prices,)
        return tuple(self.trained(roofline(self.flow, distinct[kind])) for kind in range(len(distinct)))

    @cached_property
    def kind_seconds(self) -> tuple[Mapping[Node, float], ...]:
        """Seconds of every placeable node on each kind of device."""
        return tuple({n: prices.seconds(n) for n in self.flow.nodes} for prices in self.kind_prices)

    @cached_property
    def stage_prices(self) -> StagePrices:
        """The costs of parts as stages, each with the kernels of its own device where devices differ."""
        differ = len(self.kind_prices) > 1
        kernels = {key: device.kernels for key, device in self.devices.items()} if differ else {}
        return StagePrices(self.flow, self.prices, self.optimizer, divided=False, kernels=kernels)

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The places of CPUs among accelerators, unless it is said how much memory they have."""
        cpus = {place for place, device in enumerate(self.devices.values()) if device.is_cpu}
        return frozenset(cpus if self.memory is None and len(cpus) < len(self.devices) else ())

    @cached_property
    def capacities(self) -> tuple[int | None, ...]:
        """Bytes of each device; None for CPUs among accelerators, and where there is no limit."""
        if self.memory is not None:
            return self.limits(len(self.devices))
        return tuple(None if i in self.cpus else device.memory for i, device in enumerate(self.devices.values()))

    @cached_property
    def groups(self) -> Mapping[Node, int]:
        """Node -> number of the ``together`` pattern that matches it."""
        number = {pattern: i for i, pattern in enumerate(self.together)}
        return {node: number[pattern] for node, pattern in modules_matching(number, self.flow.nodes).items()}

    @cached_property
    def supported(self) -> Mapping[Node, tuple[PartKey, ...]]:
        """Node -> keys of the devices that can run it, for nodes that not all devices can run."""
        return {n: tuple(self.only[pattern]) for n, pattern in modules_matching(self.only, self.flow.nodes).items()}
