"""``--mesh tp=2``: the ranks that share each stage; one process makes and captures the share of the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from splitkit.cli.syntax.device_list import DeviceList
from splitkit.errors import PipelineError, UsageError
from splitkit.hardware.link_specs import Link, find_link

if TYPE_CHECKING:
    from splitkit.costs import Device

STAGES, REPLICAS = "pp", "dp"
"""The dimensions of the mesh along which ranks have different stages, and replicas of a stage."""


class Dimension(NamedTuple):
    """A dimension of a mesh.

    Attributes:
        name: its name, by which the collectives of the graph call it.
        ranks: the number of ranks along it.
        link: the name of the link between neighbours; empty for the usual one of the device.
    """

    name: str
    ranks: int
    link: str = ""


def read_mesh(text: str) -> tuple[Dimension, ...]:
    """Parse ``tp=2``, ``tp=8:nvlink4`` or ``ep=2:ethernet400,tp=8``.

    Raises:
        UsageError: SK601.
        CostError: SK322 for an unknown link.
    """
    found = list[Dimension]()
    for item in text.split(","):
        name, _, rest = item.partition("=")
        ranks, colon, link = rest.partition(":")
        if not (name.isidentifier() and ranks.isascii() and ranks.isdigit() and 1 < int(ranks[:9]) <= 10**6):
            reason = f"--mesh {text:.60}: {item!r:.40} is not NAME=N with two ranks or more"
            remedy = "Write --mesh tp=2, or --mesh tp=8:nvlink4 with the link between the ranks."
            raise UsageError("SK601", reason, remedy)
        taken = {one.name: "is named twice" for one in found}
        taken |= {STAGES: "is the dimension of stages", REPLICAS: "is the dimension of replicas"}
        if what := taken.get(name):
            raise UsageError("SK601", f"--mesh {text:.60}: {name} {what}", "Choose another name, such as tp.")
        if colon:
            find_link(link)
        found.append(Dimension(name, int(ranks), link))
    return tuple(found)


def ranks_of_mesh(text: str | None) -> int:
    """Return how many ranks share each stage; 1 without a mesh."""
    return prod(one.ranks for one in read_mesh(text)) if text else 1


def require_one_rank(mesh: str | None, command: str) -> None:
    """Refuse to run in one process, or to write to a file, a model of which each rank of a mesh has a share.

    Raises:
        UsageError: SK601.
    """
    if mesh is not None:
        reason = f"the plan is for ranks that share each stage ({mesh}), and splitkit {command} works on one"
        remedy = f"Train with it on its ranks: splitkit train PLAN.json --nproc N, {ranks_of_mesh(mesh)} a stage."
        raise UsageError("SK601", reason, remedy)


def links_of_mesh(text: str | None, device: Device) -> dict[str, Link]:
    """Return dimension -> the link between neighbours, the usual one of the device where none is named."""
    usual = DeviceList((device,)).usual_links
    return {one.name: find_link(one.link or usual) for one in read_mesh(text)} if text else {}


@contextmanager
def joined_mesh(text: str | None, replicas: int = 1) -> Iterator[Any]:
    """Yield torch's mesh of ``--mesh``, which has dimensions of stages and replicas if ranks were started; or ``None``.

    Raises:
        PipelineError: SK801 if the number of ranks is no multiple of the mesh's.
    """
    if text is None:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dimensions = read_mesh(text)
    names, counts = tuple(one.name for one in dimensions), tuple(one.ranks for one in dimensions)
    share = prod(counts)
    if dist.is_initialized():
        started = dist.get_world_size()
        each = share * replicas
        if started % each:
            reason = f"{started} ranks cannot have stages of {each} ranks each ({text}, {replicas} replicas)"
            raise PipelineError("SK801", reason, f"Start {each} for each stage.")
        yield init_device_mesh("cpu", (started // each, replicas, *counts), mesh_dim_names=(STAGES, REPLICAS, *names))
        return
    dist.init_process_group("fake", rank=0, world_size=share)
    try:
        yield init_device_mesh("cpu", counts, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
