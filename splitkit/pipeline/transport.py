"""Prices messages between the ranks of a pipeline, by the links between their devices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from splitkit.checks import is_number, shown
from splitkit.errors import CostError


class LinkTimes(Protocol):
    """An object that prices messages, such as `splitkit.costs.Links`."""

    def seconds(self, source: Hashable, target: Hashable, nbytes: float) -> float:
        """Return the seconds of one message of ``nbytes`` from one device to another."""
        ...


@dataclass(frozen=True)
class Transport:
    """The communication model of a simulated step.

    Attributes:
        links: prices of messages; ``None``: they take no time.
        devices: rank -> the names of its devices in ``links``.
        overlap: whether ranks compute while messages travel.
    """

    links: LinkTimes | None
    devices: Sequence[Sequence[Hashable]]
    overlap: bool = True

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Return the seconds of one message between two ranks, over the slowest link between their devices.

        Raises:
            CostError: SK322 if the links give no number of seconds.
        """
        if self.links is None:
            return 0.0
        pairs = product(self.devices[source], self.devices[target])
        return max((message_seconds(self.links, here, there, nbytes) for here, there in pairs), default=0.0)


def message_seconds(links: LinkTimes, here: Hashable, there: Hashable, nbytes: float) -> float:
    """Return the seconds of one message; raise SK322 if the links give no number of seconds."""
    found: object = links.seconds(here, there, nbytes)
    if not is_number(found) or float(found) == math.inf:
        reason = f"{nbytes} bytes from {here} to {there} take {shown(found)} seconds"
        raise CostError("SK322", reason, "Give links whose times are finite numbers, 0 or more.")
    return float(found)
