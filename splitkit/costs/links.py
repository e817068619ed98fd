"""Describe the links between devices: how long a transfer takes from one to another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitkit.checks import is_number, is_whole, items_of, nbytes, shown
from splitkit.errors import CostError, PolicyError
from splitkit.hardware.link_specs import Link, find_link
from splitkit.prices import Costs, unit_of
from splitkit.units import measure

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Links:
    """The links between the devices of a machine or cluster, without contention: each transfer has its link to itself.

    A device has the name that a plan gives it: a number, ``"cuda:1"``, or a ``torch.device`` (the same as its text).

    Attributes:
        between: the link of any two devices that no other field names; ``None`` if they have none.
        inside: the link of two devices of one cluster node, if there are cluster nodes.
        size: number of devices of a cluster node, 0 without nodes. Device ``i``, or ``"cuda:i"``, is on node
            ``i // size``.
        pairs: (source, target) -> the link of that pair.
    """

    between: Link | None = None
    inside: Link | None = None
    size: int = 0
    pairs: Mapping[tuple[Hashable, Hashable], Link] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("between", "inside"):
            link = getattr(self, name)
            if link is not None and not isinstance(link, Link):
                raise CostError(
                    "SK322", f"{name} is {shown(link)}", "Give a Link, or use Links.preset, nodes or matrix."
                )
        if not is_whole(self.size):
            raise CostError("SK322", f"a node of {shown(self.size)} devices", "Give a whole number, 0 for no nodes.")
        pairs: object = self.pairs
        if not isinstance(pairs, Mapping):
            raise CostError("SK322", f"pairs is {shown(pairs)}", "Give {(source, target): Link(bandwidth)}.")
        for pair, link in pairs.items():
            if not isinstance(link, Link) or not isinstance(pair, tuple) or len(pair) != 2:
                text = f"pairs has {shown(pair)}: {shown(link)}"
                raise CostError("SK322", text, "Give {(source, target): Link(bandwidth)}.")

    @property
    def expression(self) -> str | None:
        """The call that makes these links again, in the expression of a policy; ``None`` for ends without a text."""
        pairs = []
        for (source, target), link in self.pairs.items():
            if not isinstance(source, str | int) or not isinstance(target, str | int):
                return None
            pairs.append(f"({source!r}, {target!r}): {link.expression}")
        ends = [None if link is None else link.expression for link in (self.between, self.inside)]
        return f"Links({ends[0]}, {ends[1]}, {self.size}, {{{', '.join(pairs)}}})"

    @classmethod
    def preset(cls, name: str) -> Links:
        """Return links that are all the same known link, such as ``"nvlink4"`` or ``"pcie5"`` (see `PRESETS`).

        Raises:
            CostError: SK322 if no link has that name.
        """
        return cls(find_link(name))

    @classmethod
    def uniform(cls, bandwidth: float, latency: float = 0.0) -> Links:
        """Return links that are all the same, from bytes per second and seconds of latency.

        Raises:
            CostError: SK322 for impossible figures.
        """
        return cls(Link(bandwidth, latency))

    @classmethod
    def nodes(cls, size: int, inside: str | Link, between: str | Link) -> Links:
        """Return the links of a cluster: ``Links.nodes(8, inside="nvlink4", between="ethernet400")``.

        Args:
            size: devices per cluster node.
            inside: the link of two devices of one node.
            between: the link of two devices of different nodes.

        Raises:
            CostError: SK322 if ``size`` is not a positive whole number or a link is unknown.
        """
        if not is_whole(size, 1):
            raise CostError("SK322", f"a node of {shown(size)} devices", "Give a whole number, 1 or more.")
        return cls(find_link(between), find_link(inside), size)

    @classmethod
    def matrix(
        cls, bandwidth: npt.ArrayLike, latency: npt.ArrayLike = 0.0, devices: Sequence[Hashable] | None = None
    ) -> Links:
        """Return a link for each (source, target) pair: rows send, columns receive, and the diagonal is ignored.

        Args:
            bandwidth: array ``[k, k]`` of bytes per second.
            latency: array ``[k, k]`` or one number, in seconds.
            devices: names of the rows, by default ``0 .. k - 1``.

        Raises:
            CostError: SK322 if the shapes do not fit or a figure is impossible.
        """
        try:
            speeds, waits = np.asarray(bandwidth, float), np.asarray(latency, float)
        except (TypeError, ValueError, OverflowError) as error:
            raise CostError(
                "SK322", f"bandwidth or latency is not a matrix: {error}", "Give rows of numbers."
            ) from error
        if speeds.ndim != 2 or speeds.shape[0] != speeds.shape[1]:
            raise CostError("SK322", f"bandwidth has shape {speeds.shape}", "Give a square matrix.")
        if waits.ndim and waits.shape != speeds.shape:
            raise CostError(
                "SK322", f"latency has shape {waits.shape}, bandwidth {speeds.shape}", "Give both the same shape."
            )
        names = _names_of(devices, len(speeds))
        if len(set(names)) != len(speeds) or len(names) != len(speeds):
            raise CostError("SK322", f"{len(speeds)} rows have {len(set(names))} distinct devices", "Name each once.")
        waits = np.broadcast_to(waits, speeds.shape)
        pairs: dict[tuple[Hashable, Hashable], Link] = {}
        for i, j in zip(*np.nonzero(~np.eye(len(names), dtype=bool)), strict=True):
            try:
                pairs[names[i], names[j]] = Link(float(speeds[i, j]), float(waits[i, j]))
            except CostError as error:
                raise CostError("SK322", f"from {names[i]} to {names[j]}: {error.reason}", error.remedy) from error
        return cls(pairs=pairs)

    def link(self, source: Hashable, target: Hashable) -> Link:
        """Return the link from one device to another.

        Raises:
            CostError: SK322 if there is none.
        """
        source, target = _name(source), _name(target)
        found = self.pairs.get((source, target))
        if found is None and self.size and self.inside is not None:
            near = _rank(source) // self.size == _rank(target) // self.size
            found = self.inside if near else self.between
        found = found or self.between
        if found is None:
            raise CostError("SK322", f"there is no link from {source} to {target}", "Use the names of the links.")
        return found

    def seconds(self, source: Hashable, target: Hashable, nbytes: float) -> float:
        """Return the seconds to send ``nbytes`` in one message; 0 within one device.

        Raises:
            CostError: SK322 if there is no such link, or ``nbytes`` is negative or not a number.
        """
        if not is_number(nbytes):
            raise CostError("SK322", f"{shown(nbytes)} bytes from {source} to {target}", "Give 0 or more.")
        return 0.0 if _name(source) == _name(target) else self.link(source, target).seconds(nbytes)

    def to_arrays(self, devices: Sequence[Hashable]) -> tuple[Array, Array]:
        """Return latency and bandwidth as ``[k, k]`` arrays (rows send); the diagonals are 0 and infinite.

        Raises:
            CostError: SK322 if two devices have no link.
        """
        names = [_name(device) for device in devices]
        latency, bandwidth = np.zeros((len(names),) * 2), np.full((len(names),) * 2, np.inf)
        for i, source in enumerate(names):
            for j, target in enumerate(names):
                if source != target:
                    link = self.link(source, target)
                    latency[i, j], bandwidth[i, j] = link.latency, link.bandwidth
        return latency, bandwidth


@dataclass(frozen=True)
class HostLink:
    """The link between a device and the memory of its host; both directions work at once.

    Attributes:
        out: from the device to the host.
        back: from the host to the device.
    """

    out: Link
    back: Link

    @classmethod
    def of(cls, given: object) -> HostLink:
        """Return the link that is meant.

        Args:
            given: the name of a preset (``"pcie5"``), bytes per second, a `Link`, or `Links` with the links from
                ``"device"`` to ``"host"`` and back.

        Raises:
            CostError: SK322 for an unknown name or impossible figures.
        """
        if isinstance(given, Links):
            return cls(given.link("device", "host"), given.link("host", "device"))
        link = Link(given) if is_number(given) else find_link(given)
        return cls(link, link)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> HostLink:
        """Return the link that ``asdict`` described."""
        return cls(Link(**data["out"]), Link(**data["back"]))


def _name(device: Hashable) -> Hashable:
    return str(device) if isinstance(device, torch.device) else device


def _names_of(devices: object, count: int) -> list[Hashable]:
    """Return the names of devices, ``0 .. count - 1`` by default."""
    found = list(range(count)) if devices is None else items_of(devices)
    if found is None or not all(isinstance(name, Hashable) for name in found):
        raise CostError("SK322", f"devices are {shown(devices)}", 'List their names: [0, 1], or ["cuda:0", "cuda:1"].')
    return [_name(name) for name in found]


def _rank(device: Hashable) -> int:
    """Return the number of a device: 3 for ``3`` and for ``"cuda:3"``."""
    number: Any = device.rpartition(":")[2] if isinstance(device, str) else device
    if isinstance(number, str) and number.isdecimal():
        return int(number)
    if is_whole(number):
        return number
    raise CostError("SK322", f"{device!r} is on no node", 'Links.nodes numbers devices: 3, or "cuda:3".')


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Return the link with the least sum of squared relative errors of its times; its latency is not negative."""
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    (latency, slope), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None)
    if latency < 0:
        latency, slope = 0.0, float((n / t).sum() / ((n / t) ** 2).sum())
    if slope <= 0:  # larger copies took no longer: the times show latency only
        return Link(inf, float(t.mean()))
    return Link(float(1 / slope), float(latency))


def as_links(links: object) -> Links | None:
    """Return given links, the preset of a name, or ``None`` for ``None``.

    Raises:
        CostError: SK322 for an unknown name or any other object.
    """
    if links is None or isinstance(links, Links):
        return links
    return Links(find_link(links))


def links_data(links: str | Links | None) -> str | Mapping[str, Any] | None:
    """Return links as data, which `links_of` reads: the name of a preset, the fields of `Links`, or ``None``."""
    if links is None or isinstance(links, str):
        return links
    between, inside = (None if link is None else asdict(link) for link in (links.between, links.inside))
    pairs = [(source, target, asdict(link)) for (source, target), link in links.pairs.items()]
    return {"between": between, "inside": inside, "size": links.size, "pairs": pairs}


def links_of(data: str | Mapping[str, Any] | None) -> Links | None:
    """Return the links that `links_data` described.

    Raises:
        CostError: SK322 for impossible figures, or the name of no preset.
    """
    if data is None or isinstance(data, str):
        return as_links(data)
    between, inside = (None if data[name] is None else Link(**data[name]) for name in ("between", "inside"))
    pairs = {(source, target): Link(**link) for source, target, link in data["pairs"]}
    return Links(between, inside, data["size"], pairs)


# Checks the link to the host, and the room there, that a policy or study is given for saved values.


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
