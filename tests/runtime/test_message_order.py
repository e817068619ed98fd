"""The messages of a step, one after another on each rank as on a communicator of NCCL, never wait in a ring."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from torch.distributed.pipelining import schedules as torchs

from splitkit import _torch
from splitkit.pipeline.message_order import MessageOrder, waits
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import known_schedules, pipeline_order
from splitkit.pipeline.torch_orders import torch_cells
from splitkit.runtime.ranks.order_runner import _forward

Peer = Callable[[int, int, int], int]
"""Rank, stage and microbatch of its own numbering -> the rank that has this microbatch in the stage."""
TEXT = re.compile(r"(\d+)(SEND_|RECV_)?([A-Z]+)(\d+)")


def waits_in_a_ring(rows: Sequence[Sequence[str]], peer: Peer) -> bool:
    """Run the rows; a rank that sends or receives waits until its peer has come to the other end of this message."""
    at = [0] * len(rows)
    parsed = [[_parsed(text) for text in row] for row in rows]
    while any(a < len(row) for a, row in zip(at, parsed, strict=True)):
        before = list(at)
        for rank, row in enumerate(parsed):
            while at[rank] < len(row):
                stage, way, kind, number = row[at[rank]]
                if way:
                    toward = (1 if way == "SEND_" else -1) * (1 if kind == "F" else -1)
                    other = peer(rank, stage + toward, number)
                    if at[other] == len(parsed[other]):
                        break
                    far, far_way, far_kind, far_number = parsed[other][at[other]]
                    if not far_way or far_way == way or (far, far_kind) != (stage + toward, kind):
                        break
                    if peer(other, stage, far_number) != rank:
                        break
                    at[other] += 1
                at[rank] += 1
        if at == before:
            return True
    return False


def _parsed(text: str) -> tuple[int, str, str, int]:
    found = TEXT.fullmatch(text)
    assert found is not None, text
    stage, way, kind, number = found.groups()
    return int(stage), way or "", kind, int(number)


def torchs_rows(order: PipelineOrder, rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """The rows with the messages that torch's interpreter adds."""
    actions = {rank: [torchs._Action.from_str(str(a)) for a in row] for rank, row in enumerate(rows)}
    found = torchs._add_send_recv(actions, lambda stage: order.rank_of[stage], len(order.rank_of))
    texts = [[str(action) for action in found[rank]] for rank in sorted(found)]
    # torch 2.15 also says when a message must have been sent
    return [[text for text in row if "WAIT" not in text] for row in texts]


INTERPRETED = [s for s in known_schedules() if not (s.torch_class and s.is_single)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [schedule.word for schedule in INTERPRETED])
def test_no_schedule_waits_in_a_ring(name, ranks):
    local = next(s.stages_per_rank or 2 for s in INTERPRETED if s.word == name)
    order = pipeline_order(name, local * ranks, 2 * ranks, ranks)
    # forward of inference has other rows; torch needs backward in them and drops it
    inferred = torchs_rows(order, [_forward(row) for row in order.ranks])
    forward = [[text for text in row if _parsed(text)[2] == "F"] for row in inferred]
    placed = MessageOrder(order.name, order.ranks, torch_cells(order))
    waits(placed)  # which says the same of the rows with backward
    for rows in (torchs_rows(order, order.ranks), forward):
        assert sum("SEND" in text for row in rows for text in row) > 0
        assert not waits_in_a_ring(rows, lambda rank, stage, number: order.rank_of[stage])


def test_a_ring_is_seen():
    """Each rank sends before it receives, as a rank would that thinks of itself only."""
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "2RECV_F0", "2F0", "2SEND_F0"],
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "3RECV_F0"],
    ]
    assert waits_in_a_ring(rows, lambda rank, stage, number: stage % 2)
    mended = [["0F0", "0SEND_F0", "2RECV_F0", "0F1", "0SEND_F1", "2F0", "2SEND_F0"], rows[1]]
    assert not waits_in_a_ring(mended, lambda rank, stage, number: stage % 2)


def test_messages_end_where_torch_asks_for_it():
    row = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    made = _torch._with_waits(row)
    assert [a for a in made if "WAIT" not in a] == row
    assert made.index("0WAIT_SEND_F0") + 1 == made.index("0B0") and made.index("0WAIT_SEND_F1") + 1 == made.index("0B1")
    assert _torch._with_waits(["1RECV_F0", "1F0", "1B0", "1SEND_B0"])[-1] == "1WAIT_SEND_B0"
