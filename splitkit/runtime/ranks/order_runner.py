"""Makes torch's schedule object for an order: torch's class if it has one for it, otherwise its action interpreter.

The interpreter also runs the messages of an order in their order, if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from splitkit import _torch
from splitkit.errors import ScheduleError
from splitkit.pipeline.message_order import MessageOrder
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.schedules import USUAL_MICROBATCHES, pipeline_order, schedule_of

Loss = Callable[[Any, Any], Any] | None


def microbatches_or_usual(schedule: str | PipelineOrder, microbatches: int | None) -> int | None:
    """Return the number of microbatches that was asked for; by default `USUAL_MICROBATCHES` under a named schedule.

    For an order, ``None`` stays ``None``: it has a number of its own.
    """
    return USUAL_MICROBATCHES if microbatches is None and isinstance(schedule, str) else microbatches


def order_of(schedule: str | PipelineOrder, stages: int, microbatches: int | None, ranks: int) -> PipelineOrder:
    """Return the order of a schedule, or check a given order against the numbers of stages, ranks and microbatches.

    Args:
        schedule: the name of a schedule, or an order.
        stages: the number of stages of the split.
        microbatches: per step; ``None`` for the number of an order.
        ranks: the number of ranks.

    Raises:
        ScheduleError: SK330 if the schedule or order does not allow these numbers.
    """
    if not isinstance(schedule, PipelineOrder):
        assert microbatches is not None, "a named schedule has a usual number"
        return pipeline_order(schedule, stages, microbatches, ranks)
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
    schedule: str | PipelineOrder, replicas: int, stages: int, microbatches: int | None, ranks: int
) -> PipelineOrder:
    """Return the order of one of several pipelines that run side by side.

    Args:
        schedule: as in `order_of`.
        replicas: the number of replicas of each stage.
        stages: the number of stages.
        microbatches: per step, of all replicas together; ``None`` as in `microbatches_or_usual`.
        ranks: of all replicas together.

    Raises:
        ScheduleError: SK330 as in `order_of`.
    """
    each = microbatches if microbatches is None or replicas == 1 else microbatches // replicas
    try:
        return order_of(schedule, stages, each, ranks // replicas)
    except ScheduleError as error:
        if replicas == 1:
            raise
        raise ScheduleError(error.code, f"{error.reason}, in each of {replicas} pipelines", error.remedy) from None


def torch_schedule(order: PipelineOrder, stages: Sequence[PipelineStage], loss: Loss) -> Any:
    """Return torch's schedule object for an order.

    Args:
        order: an order of forward and backward actions.
        stages: torch's stages of this rank.
        loss: torch's ``loss_fn``; ``None`` to run the forward actions only, on each rank sorted by microbatch and then
            by stage. That order cannot deadlock: no action precedes one that it depends on.
    """
    count = order.microbatches
    if loss is None:
        return _torch.action_schedule(list(stages), count, None, [_forward(row) for row in order.ranks])
    if isinstance(order, MessageOrder):
        return _torch.action_schedule(list(stages), count, loss, order.cells, messages=True)
    known = schedule_of(order)
    if known is None or not known.torch_class:
        return _torch.action_schedule(list(stages), count, loss, order.ranks)
    made = getattr(pipelining, known.torch_class)
    given = stages[0] if known.is_single else list(stages)
    return made(given, count, loss_fn=loss, scale_grads=False)


def _forward(row: Sequence[Action]) -> list[Action]:
    """Return forward actions by microbatch and stage, with backward ones: torch checks for them and drops them."""
    forward = sorted((a for a in row if a.kind == "F"), key=lambda a: (a.microbatch, a.stage))
    backward = sorted(forward, key=lambda a: (a.microbatch, -a.stage))
    return forward + [a._replace(kind="B") for a in backward]
