"""What runs an order on the stages of a rank: torch's own orders by their classes, any other by its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from splitkit import _torch
from splitkit.errors import ScheduleError
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.torch_orders import SCHEDULES, is_single, pipeline_order
from splitkit.runtime.replicas import is_even

_SINGLE = ("GPipe", "1F1B")

Loss = Callable[[Any, Any], Any] | None


def order_of(schedule: str | PipelineOrder, stages: int, microbatches: int | None, ranks: int) -> PipelineOrder:
    """The order that a schedule stands for, on so many ranks.

    Args:
        schedule: a name of torch's, or an order.
        stages: how many the split has.
        microbatches: how many in a step; ``None`` for as many as the order has, 8 for a schedule that is named.
        ranks: how many there are.

    Raises:
        ScheduleError: SK330 where it does not go with these numbers.
    """
    if not isinstance(schedule, PipelineOrder):
        return pipeline_order(schedule, stages, 8 if microbatches is None else microbatches, ranks)
    for what, has, given in (
        ("stages", len(schedule.rank_of), stages),
        ("ranks", len(schedule.ranks), ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if given not in (None, has):
            remedy = f"Use as many, or another order: a row for each of {ranks} ranks, {stages} stages."
            raise ScheduleError("SK330", f"{schedule.name} has {has} {what}, not {given}", remedy)
    idle = [rank for rank, actions in enumerate(schedule.ranks) if not actions]
    if idle:
        text = f"rank {idle[0]} of {schedule.name} has no stage"
        raise ScheduleError("SK330", text, f"Put a stage there, or start {ranks - len(idle)} processes.")
    return schedule


def placed_order(
    schedule: str | PipelineOrder, counts: Sequence[int], microbatches: int | None, ranks: int
) -> tuple[PipelineOrder, tuple[int, ...]]:
    """The order of one pipeline, and how many replicas there are at each of its places.

    Args:
        schedule: as of `order_of`.
        counts: stage -> how many replicas.
        microbatches: of all replicas together; ``None`` as of `order_of`.
        ranks: of all replicas together.

    Raises:
        ScheduleError: SK330 as `order_of`, and for a schedule under which replicas cannot take turns.
    """
    stages, count = len(counts), counts[0]
    if is_even(counts):
        each = microbatches if microbatches is None or count == 1 else microbatches // count
        try:
            order = order_of(schedule, stages, each, ranks // count)
        except ScheduleError as error:
            if count == 1:
                raise
            raise ScheduleError(error.code, f"{error.reason}, in each of {count} pipelines", error.remedy) from None
        return order, (count,) * len(order.ranks)
    if isinstance(schedule, PipelineOrder) or not is_single(schedule):
        what = schedule.name if isinstance(schedule, PipelineOrder) else schedule
        raise ScheduleError(
            "SK330",
            f"{what} for stages with {', '.join(map(str, counts))} replicas",
            "Use 1f1b or gpipe, or as many replicas for all parts: splitkit train --dp 2.",
        )
    return order_of(schedule, stages, microbatches, stages), tuple(counts)


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
    if not _is_torchs(order):
        return _torch.action_schedule(list(stages), count, loss, order.ranks)
    made = getattr(pipelining, f"Schedule{order.name}")
    given = stages[0] if order.name in _SINGLE else list(stages)
    return made(given, count, loss_fn=loss, scale_grads=False)


def _is_torchs(order: PipelineOrder) -> bool:
    """Whether it is the order of the schedule of torch whose name it has: anybody may call an order so."""
    if order.name not in SCHEDULES.values():
        return False
    try:
        found = pipeline_order(order.name, len(order.rank_of), order.microbatches, len(order.ranks))
    except ScheduleError:
        return False
    return found.ranks == order.ranks


def _forward(row: Sequence[Action]) -> list[Action]:
    """Forward by microbatch and stage, and a backward that is left out again, as torch checks for one."""
    forward = sorted((a for a in row if a.kind == "F"), key=lambda a: (a.microbatch, a.stage))
    backward = sorted(forward, key=lambda a: (a.microbatch, -a.stage))
    return forward + [a._replace(kind="B") for a in backward]
