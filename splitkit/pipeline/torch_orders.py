"""Reads the orders of torch's schedules with several stages per rank off its classes, and how it places messages.

No process group is needed.

Private torch API, checked on 2.11, 2.13 and 2.15; ``tests/pipeline/test_schedule_torch.py`` fails when it goes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from splitkit import _torch
from splitkit.pipeline.order import KINDS, Action, PipelineOrder


def torch_rows(torch_class: str, stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """Return the actions of each rank, from ``pipeline_order`` of torch's schedule object.

    The object is made with stand-ins for stages that know only their number. The sends and receives that its
    constructor would compute are left out: they take a minute for 64 ranks and 512 microbatches on 2.15.
    """
    base: Any = getattr(schedules, torch_class)
    # _prepare_schedule_with_comms adds sends and receives and is called last in __init__: 2.11, 2.13, 2.15.
    made = type(base.__name__, (base,), {"_prepare_schedule_with_comms": _skip})
    stand_ins = [
        SimpleNamespace(group_rank=0, group_size=ranks, num_stages=stages, submod=None) for _ in range(stages // ranks)
    ]
    order = made(stand_ins, microbatches).pipeline_order  # 2.11, 2.13, 2.15
    return [list(_read(order[rank])) for rank in range(ranks)]


def torch_cells(order: PipelineOrder) -> tuple[tuple[str, ...], ...]:
    """Return the row of each rank as torch's ``_PipelineScheduleRuntime`` completes and runs it.

    Beside the actions these are its sends and receives (``_add_send_recv``), ``UNSHARD``, ``RESHARD`` and
    ``REDUCE_GRAD``; on torch 2.15 also waits.
    """
    stages = len(order.rank_of)
    local = SimpleNamespace(group_rank=0, group_size=len(order.ranks), num_stages=stages, submod=None, stage_index=0)
    rows = _torch.action_schedule([local], order.microbatches, _skip, order.ranks).pipeline_order_with_comms
    return tuple(tuple(map(str, rows[rank])) for rank in range(len(order.ranks)))


def _skip(first: object, second: object) -> None:
    """Do nothing: in place of computing sends and receives, or a loss."""


def _read(actions: Iterable[Any]) -> Iterator[Action]:
    """Yield the actions that compute, from schedules._Action (2.11, 2.13, 2.15); ``None`` is idle time, left out."""
    for action in actions:
        for one in () if action is None else action.sub_actions or (action,):
            kind = one.computation_type.value
            if kind in KINDS:
                yield Action(one.stage_index, kind, one.microbatch_index)
