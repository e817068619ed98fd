"""Checks the link to the host, and the room there, that a policy or study is given for saved values."""

from __future__ import annotations

from math import inf

from splitkit.checks import nbytes, shown
from splitkit.costs.links import HostLink, Links
from splitkit.errors import PolicyError
from splitkit.hardware.link_specs import Link
from splitkit.prices import Costs, unit_of
from splitkit.units import measure

Offload = str | float | Link | Links | None
"""A link to the host as users give it; ``None`` for no offload."""


def require_offload(owner: object, offload: Offload, host: int | str | None, example: str) -> None:
    """Refuse a link that is none, and bytes of the host without a link.

    Args:
        owner: who is given them.
        offload: the link.
        host: the bytes that the host has room for; ``None`` for any number.
        example: the beginning of a call that is right, such as ``"Budget('2GiB', "``.

    Raises:
        PolicyError: SK302 for bytes without a link, or no bytes at all.
        CostError: SK322 for an unknown link.
    """
    name = owner if isinstance(owner, str) else type(owner).__name__
    if offload is None:
        if host is not None:
            text = f"{name} has host={shown(host)}, but no link to it"
            raise PolicyError("SK302", text, f"Name the link: {example}offload='pcie5', host='8GiB').")
        return
    HostLink.of(offload)
    if host is not None and not nbytes(owner, "host", host):
        remedy = "Give the bytes that it has room for, or leave host= or offload= out."
        raise PolicyError("SK302", f"{name} offloads to a host without memory: host={shown(host)}", remedy)


def room_of_host(owner: object, host: int | str | None) -> float:
    """Return the bytes that the host has room for, infinite for ``None``."""
    return inf if host is None else nbytes(owner, "host", host)


def require_seconds(costs: Costs) -> None:
    """Refuse prices that are not seconds: copies take time.

    Raises:
        PolicyError: SK302.
    """
    if (unit := unit_of(costs)) != "s":
        raise PolicyError(
            "SK302",
            f"offload= weighs copies against computation, but the prices are {measure(unit)}",
            "Give prices in seconds: costs=splitkit.costs.roofline(gm, 'h100').",
        )
