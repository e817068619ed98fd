"""How the ranks of a pipeline talk: which devices they are, and how long messages take."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from splitkit.checks import is_number, shown
from splitkit.errors import CostError


class LinkTimes(Protocol):
    """What knows how long messages take: `splitkit.costs.Links`."""

    def seconds(self, source: Hashable, target: Hashable, nbytes: float) -> float:
        """Seconds for one message of ``nbytes`` from one device to another."""
        ...


@dataclass(frozen=True)
class Wires:
    """What a step was simulated with.

    Attributes:
        links: how long messages take; ``None``: no time.
        devices: what the links call the devices of each rank.
        overlap: whether ranks compute while messages travel.
    """

    links: LinkTimes | None
    devices: Sequence[Sequence[Hashable]]
    overlap: bool = True

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Seconds for one message from a rank to another, over the slowest of the links between their devices.

        Raises:
            CostError: SK322 if the links give no number.
        """
        if self.links is None:
            return 0.0
        pairs = product(self.devices[source], self.devices[target])
        return max((trip(self.links, here, there, nbytes) for here, there in pairs), default=0.0)


def trip(links: LinkTimes, here: Hashable, there: Hashable, nbytes: float) -> float:
    """Seconds for one message, checked: SK322 for what is no number of seconds."""
    found: object = links.seconds(here, there, nbytes)
    if not is_number(found) or float(found) == math.inf:
        reason = f"{nbytes} bytes from {here} to {there} take {shown(found)} seconds"
        raise CostError("SK322", reason, "Give links whose times are numbers, 0 or more.")
    return float(found)
