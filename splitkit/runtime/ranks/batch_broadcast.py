"""Sends a batch that only rank 0 has read to the other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from splitkit._torch import pytree


def broadcast_batch(batch: Any, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """Return rank 0's batch on every rank. All ranks must call it.

    Args:
        batch: tensors and other values, in dicts, lists and tuples; ignored on other ranks than 0.
        device: the device of this rank, to which tensors are sent.
        group: the ranks.
    """
    first = dist.get_rank(group) == 0
    leaves, spec = pytree.tree_flatten(batch)
    # Tensors are sent as they are, and described by empty ones; other values are pickled.
    plain = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if _is_tensor(leaf) else leaf for leaf in leaves]
    sent: list[Any] = [pytree.tree_unflatten(plain, spec) if first else None]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    likes, spec = pytree.tree_flatten(sent[0])
    for i, like in enumerate(likes):
        if _is_tensor(like):
            own = (
                leaves[i].to(device).contiguous() if first else torch.empty(like.shape, dtype=like.dtype, device=device)
            )
            dist.broadcast(own, group=group, group_src=0)
            likes[i] = own
    return pytree.tree_unflatten(likes, spec)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
