"""Clips gradients by the norm of all gradients of the model, whichever ranks hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from splitkit.checks import is_number, shown
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.fsdp import local_tensor


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Scale the gradients of this rank so that the norm over all ranks is at most ``max_norm``. All ranks must call it.

    Args:
        parameters: the parameters of this rank.
        counted: those of them that this rank counts; of the copies of a parameter, one rank counts one.
        max_norm: the largest norm that is left as it is.
        norm_type: the exponent of the norm, positive; ``inf`` for the largest absolute value.
        device: the device of this rank.
        group: the ranks.

    Returns:
        The norm before clipping, float64, the same on every rank.

    Raises:
        PipelineError: SK802 for a ``max_norm`` or ``norm_type`` that is not a positive number.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not is_number(value) or value <= 0:
            raise PipelineError("SK802", f"{name} is {shown(value)}", "Give a positive number.")
    norms = [_norm(p.grad, norm_type, device) for p in counted if p.grad is not None]
    own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    every = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(dist.get_world_size(group))]
    # Norms are gathered, not summed as powers, which could overflow.
    dist.all_gather(every, own.to(torch.float64), group=group)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(every), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor)
    return total


def _norm(grad: torch.Tensor, norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of a gradient, or of this rank's shard of it, in at least single precision."""
    own = local_tensor(grad.detach())
    if own.dtype in (torch.float16, torch.bfloat16):
        own = own.float()
    norm: torch.Tensor = torch.linalg.vector_norm(own, norm_type)
    return norm.to(device)
