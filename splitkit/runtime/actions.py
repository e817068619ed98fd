"""What runs an order on the stages of a rank: torch's own orders by their classes, any other by its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from splitkit import _torch
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.torch_orders import SCHEDULES

_SINGLE = ("GPipe", "1F1B")

Loss = Callable[[Any, Any], Any] | None


def schedule_of(order: PipelineOrder, stages: Sequence[PipelineStage], loss: Loss) -> Any:
    """Torch's schedule for an order.

    Args:
        order: of forward and backward.
        stages: of this rank.
        loss: as torch's ``loss_fn``; ``None`` to run the forward actions only: those of a rank by microbatch, then by
            stage, which waits for nobody that waits for it.
    """
    count = order.microbatches
    if loss is None:
        return _torch.action_schedule(list(stages), count, None, [_forward(row) for row in order.ranks])
    if order.name not in SCHEDULES.values():
        return _torch.action_schedule(list(stages), count, loss, order.ranks)
    made = getattr(pipelining, f"Schedule{order.name}")
    given = stages[0] if order.name in _SINGLE else list(stages)
    return made(given, count, loss_fn=loss, scale_grads=False)


def _forward(row: Sequence[Action]) -> list[Action]:
    """Forward by microbatch and stage, and a backward that is left out again, as torch checks for one."""
    forward = sorted((a for a in row if a.kind == "F"), key=lambda a: (a.microbatch, a.stage))
    backward = sorted(forward, key=lambda a: (a.microbatch, -a.stage))
    return forward + [a._replace(kind="B") for a in backward]
