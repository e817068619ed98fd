"""Parameters that are sharded over ranks (``DTensor``), and the pieces of them that this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from splitkit._torch import group_of_name


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a ``DTensor``; nothing is imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_over(tensor: Any) -> str:
    """Return the type of device of the mesh over which a tensor is sharded."""
    return str(tensor.device_mesh.device_type)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a tensor that may be sharded, through which gradients reach the whole."""
    piece: Any = tensor
    return piece.to_local() if is_sharded(tensor) else tensor


def sharded_as(piece: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return the tensor that has ``piece`` on this rank and is sharded as ``whole`` is; the piece if that is plain."""
    if not is_sharded(whole):
        return piece
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        piece, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded. All ranks that hold it call this, in the same order."""
    whole: Any = tensor
    return whole.full_tensor() if is_sharded(tensor) else tensor


class MeshGroup(NamedTuple):
    """The ranks along a dimension of a mesh, which graphs call ``"tp=4"`` on each of them.

    Attributes:
        dimension: the name of the dimension.
        ranks: the number of ranks.
    """

    dimension: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.dimension}={self.ranks}"


def mesh_groups(tensors: Iterable[Any]) -> dict[MeshGroup, Any]:
    """Return the dimensions of the meshes over which tensors are sharded -> the process group of this rank along it."""
    meshes = dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t))
    return {
        MeshGroup(name, mesh.size(i)): mesh.get_group(i) for mesh in meshes for i, name in enumerate(_dimensions(mesh))
    }


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective of torch's functional kind, whose result must not be read before."""
    space = getattr(node.target, "namespace", "")
    return space.startswith("_c10d_functional") and str(node.target).startswith(f"{space}.wait_tensor")


PIECES = "pieces of sharded tensors"
"""Where ``meta`` of a captured forward names the parameters and buffers of which it has a piece."""


def groups_met(graphs: Iterable[Graph]) -> dict[MeshGroup, Any]:
    """Return the ranks that take part in collectives of captured graphs -> the process group of this rank."""
    groups = dict.fromkeys(filter(None, (collective_group(node) for graph in graphs for node in graph.nodes)))
    return {group: found for group in groups if (found := group_of_name(str(group))) is not None}


def is_sharded_over(tensor: Any, ranks: Sequence[int]) -> bool:
    """Whether the ranks are those along a dimension of the mesh of a tensor."""
    mesh = tensor.device_mesh if is_sharded(tensor) else None
    groups = [] if mesh is None else [mesh.get_group(i) for i in range(mesh.ndim)]
    return any(sorted(dist.get_process_group_ranks(group)) == sorted(ranks) for group in groups)


def _dimensions(mesh: Any) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]


def copies_of(tensor: Any, groups: Iterable[MeshGroup]) -> int:
    """Return how many ranks of some dimensions of meshes have the same piece of a tensor."""
    placed = dict(zip(_dimensions(tensor.device_mesh), tensor.placements, strict=True)) if is_sharded(tensor) else {}
    return prod(g.ranks for g in groups if not (g.dimension in placed and placed[g.dimension].is_shard()))


def collective_group(node: Node) -> MeshGroup | None:
    """Return the ranks that take part in a collective of a captured graph; ``None`` for other nodes."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return None
    names = [a.partition("=") for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    return next((MeshGroup(name, int(size)) for name, equals, size in names if equals), None)
