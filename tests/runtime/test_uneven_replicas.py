"""What each rank does, and with whom it talks, where stages have different numbers of replicas."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import accumulate, product

import pytest

from splitkit import _torch
from splitkit.errors import ScheduleError
from splitkit.pipeline.action import Action
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named
from splitkit.pipeline.windowed import as_stages_behind, windowed_row
from splitkit.runtime.ranks.order_runner import placed_order
from splitkit.runtime.ranks.replicas import Replicas, replica_rows, row_of_rank, with_messages

COUNTS = [counts for n in (2, 3, 4) for counts in product((1, 2, 3, 4), repeat=n) if len(set(counts)) > 1]
FEW = COUNTS[::15]
WINDOWED = [schedule.word for schedule in known_schedules() if schedule.window is not None]


def on(counts: tuple[int, ...], rank: int = 0) -> Replicas:
    ends = list(accumulate(counts))
    ranks = tuple(tuple(range(end - n, end)) for n, end in zip(counts, ends, strict=True))
    place = next(i for i, end in enumerate(ends) if rank < end)
    return Replicas(ranks, place, rank - ranks[place][0], None)


def cases(counts: tuple[int, ...]) -> list[PipelineOrder]:
    """Orders with few microbatches and many, also such as do not divide."""
    least = max(*counts, len(counts))
    return [pipeline_order(name, len(counts), m) for name in WINDOWED for m in (least, least + 1, 4 * least + 1)]


def arrive(replicas: Replicas, rows: tuple[list[str], ...], shares: list[range]) -> list[tuple[str, int, int]]:
    """Run the rows with messages that arrive in the order in which they were sent to a rank by another one.

    Returns:
        The computed actions, in the order in which they were: kind, stage, microbatch of the step.
    """
    wires: dict[tuple[int, int], deque[tuple[str, int]]] = defaultdict(deque)
    asked: list[dict[tuple[str, int], tuple[int, int]]] = [{} for _ in rows]
    at, ran = [0] * len(rows), list[tuple[str, int, int]]()
    last = len(replicas.counts) - 1
    while any(a < len(row) for a, row in zip(at, rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                text = row[at[rank]]
                stage, local = int(text[0]), int(text.lstrip("0123456789").lstrip("SENDRCVFB_"))
                kind, number = text.rstrip("0123456789")[-1], shares[rank][local]
                if "SEND" in text:
                    peer = replicas.rank_of(stage + (1 if kind == "F" else -1), number)
                    wires[rank, peer].append((kind, number))
                elif "RECV" in text:
                    peer = replicas.rank_of(stage - (1 if kind == "F" else -1), number)
                    asked[rank][kind, number] = peer, sum(p == peer for p, _ in asked[rank].values())
                elif stage != (0 if kind == "F" else last):
                    peer, place = asked[rank][kind, number]  # its receive stands before it
                    if len(wires[peer, rank]) <= place:
                        break
                    assert wires[peer, rank][place] == (kind, number), "another microbatch's value"
                    ran.append((kind, stage, number))
                else:
                    ran.append((kind, stage, number))
                at[rank] += 1
        assert at != before, "they wait for ever"
    return ran


@pytest.mark.parametrize("counts", [pytest.param(c, marks=() if c in FEW else pytest.mark.campaign) for c in COUNTS])
def test_each_value_gets_to_the_replica_that_runs_its_microbatch(counts):
    for order in cases(counts):
        replicas = on(counts)
        rows = replica_rows(order, replicas)
        shares = [on(counts, rank).share(order.microbatches) for rank in range(sum(counts))]
        for kinds in ("FB", "F"):
            wanted = tuple(tuple(a for a in row if a.kind in kinds) for row in rows)
            ran = arrive(replicas, with_messages(replicas, wanted), shares)
            assert sorted(ran) == sorted(product(kinds, range(len(counts)), range(order.microbatches)))
        assert all(row_of_rank(order, on(counts, rank)) == row for rank, row in enumerate(rows))


def seconds(counts: tuple[int, ...], rows: tuple[tuple[Action, ...], ...]) -> float:
    """A step where forward of a microbatch takes as many seconds as its stage has replicas, and backward twice that."""
    ends: dict[Action, float] = {}
    free, at, last = [0.0] * len(rows), [0] * len(rows), len(counts) - 1
    while any(a < len(row) for a, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                end, step, price = (0, -1, 1) if action.kind == "F" else (last, 1, 2)
                source = action._replace(stage=action.stage + step)
                if action.stage != end and source not in ends:
                    break
                ends[action] = free[rank] = max(free[rank], ends.get(source, 0.0)) + price * counts[action.stage]
                at[rank] += 1
    return max(free)


@pytest.mark.parametrize("counts", FEW)
def test_few_are_in_flight_and_all_are_busy(counts):
    microbatches = 48
    bound = 3 * microbatches + 3 * (sum(counts) - 1)  # all the work of a rank, and one microbatch through all stages
    for name in WINDOWED:
        rows = replica_rows(pipeline_order(name, len(counts), microbatches), on(counts))
        assert seconds(counts, rows) <= bound, name
        for rank, row in enumerate(rows):
            place = on(counts, rank).place
            inside = [sum(1 if a.kind == "F" else -1 for a in row[: i + 1]) for i in range(len(row))]
            most = schedule_named(name).window(counts, place)
            assert max(inside) == min(most, len(row) // 2)


def test_a_stage_of_many_among_stages_of_one_is_kept_busy():
    """With as many in flight as there are devices behind, a step took 2.2 times as long."""
    counts, order = (1, 4, 1), pipeline_order("1f1b", 3, 48)
    assert [as_stages_behind(counts, stage) for stage in range(3)] == [9, 2, 1]
    rows = replica_rows(order, on(counts))
    assert seconds(counts, rows) <= 3 * 48 + 15
    short = tuple(
        tuple(windowed_row(row[0].stage, range(at, 48, counts[row[0].stage]), (6, 2, 1)[row[0].stage]))
        for at, row in zip((0, 0, 1, 2, 3, 0), rows, strict=True)
    )
    assert seconds(counts, short) > 2 * (3 * 48 + 15)


def test_the_picture_in_the_docstring():
    rows = replica_rows(pipeline_order("1f1b", 2, 6), on((2, 1)))
    assert [" ".join(f"{a.kind}{a.microbatch}" for a in row) for row in rows] == [
        "F0 F2 B0 F4 B2 B4", "F1 F3 B1 F5 B3 B5", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]  # fmt: skip


def test_a_row_too_short_is_noticed():
    """Were forward of microbatch 1 forgotten in the first stage, the others would wait for ever."""
    rows = [list(row) for row in replica_rows(pipeline_order("1f1b", 2, 4), on((2, 1)))]
    rows[1].remove(Action(0, "F", 1))
    with pytest.raises(AssertionError):
        with_messages(on((2, 1)), rows)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved1f1b", PipelineOrder.parse(["0F0 0B0", "1F0 1B0"], "mine")])
def test_schedules_under_which_replicas_take_no_turns_are_refused(schedule):
    with pytest.raises(ScheduleError, match="SK330: .* for stages with 2, 1 replicas") as caught:
        placed_order(schedule, [2, 1], 4, 3)
    assert "Use gpipe, 1f1b or eager-1f1b" in caught.value.remedy


def test_orders_of_pipelines_side_by_side_are_those_of_one():
    order, at = placed_order("1f1b", [2, 2], 8, 4)
    assert order.microbatches == 4 and at == (2, 2)
    assert placed_order("1f1b", [2, 1], 8, 3)[1] == (2, 1)
    assert {a.microbatch for a in row_of_rank(order, on((2, 2), 3))} == {4, 5, 6, 7}


def test_messages_end_where_torch_asks_for_it():
    row = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    made = _torch._with_waits(row)
    assert [a for a in made if "WAIT" not in a] == row
    assert made.index("0WAIT_SEND_F0") + 1 == made.index("0B0") and made.index("0WAIT_SEND_F1") + 1 == made.index("0B1")
    assert _torch._with_waits(["1RECV_F0", "1F0", "1B0", "1SEND_B0"])[-1] == "1WAIT_SEND_B0"
