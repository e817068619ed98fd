"""Messages in order: deadlocks are found, times are those of the model, and no order of few messages is shorter."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
from campaigns import few_of_many
from hypothesis import assume
from hypothesis import strategies as st
from message_oracle import Machine, all_rows, seconds_of, with_rows
from ownorders import own_order

from splitkit.errors import ScheduleError
from splitkit.pipeline.message_order import MessageOrder, is_message, waits
from splitkit.pipeline.order_messages import order_messages
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_of
from splitkit.pipeline.simulate import StageCosts, price_actions, simulate_schedule, times_of_messages
from splitkit.pipeline.synthesize import load_order, order_from_csv, order_to_csv, save_order
from splitkit.pipeline.torch_orders import torch_cells
from splitkit.solvers.solve_sequence import sequenced

NAMES = [schedule.word for schedule in known_schedules()]


@pytest.fixture(autouse=True)
def with_less_effort(monkeypatch):
    monkeypatch.setattr("splitkit.pipeline.order_messages.sequenced", partial(sequenced, visits=30_000))


class Seconds:
    """Links with their own seconds for each pair of ranks."""

    def __init__(self, rng, scale=1.0):
        self.rng, self.scale, self.found = rng, scale, {}

    def seconds(self, source, target, nbytes):
        pair = frozenset((source, target))
        return self.found.setdefault(pair, self.scale * self.rng.choice([0.0, 0.25, 0.5, 1.5]))


def stages_of(count, rng):
    return [StageCosts(*(rng.choice([0.5, 1.0, 2.25]) for _ in range(3)), activation_bytes=1) for _ in range(count)]


@st.composite
def rows(draw):
    """An order, and rows of it in which some neighbours have changed places."""
    name, ranks = draw(st.sampled_from(NAMES)), draw(st.integers(2, 3))
    local = 1 if name in ("gpipe", "1f1b", "eager-1f1b") else 2
    order = pipeline_order(name, local * ranks, 2 * ranks, ranks)
    cells = [[c for c in row if "SHARD" not in c and "GRAD" not in c] for row in torch_cells(order)]
    for _ in range(draw(st.integers(0, 12))):
        row = draw(st.sampled_from(cells))
        at = draw(st.integers(0, len(row) - 2))
        if is_message(row[at]) or is_message(row[at + 1]):
            row[at : at + 2] = row[at + 1], row[at]
    return order, tuple(map(tuple, cells))


def is_sound(order, cells):
    """Whether each message leaves after it is computed and comes before it is read, at least."""
    for row in cells:
        for at, cell in enumerate(row):
            stage, _, rest = cell.partition("SEND_")
            kinds = "F" if rest.startswith("F") else "BI"
            if rest and not any(f"{stage}{kind}{rest[1:]}" in row[:at] for kind in kinds):
                return False
            stage, _, rest = cell.partition("RECV_")
            kinds = "F" if rest.startswith("F") else "BI"
            if rest and any(f"{stage}{kind}{rest[1:]}" in row[:at] for kind in kinds):
                return False
    return True


@few_of_many(25, 1000, rows())
def test_rows_deadlock_exactly_if_running_them_does_and_take_the_time_that_it_takes(drawn):
    order, cells = drawn
    assume(is_sound(order, cells))
    rng = random.Random(len(str(cells)))
    step = price_actions(stages_of(len(order.rank_of), rng), order, links=Seconds(rng))
    ended = []
    for communicators in ("rank", "pair"):
        made = object.__new__(MessageOrder)  # unchecked
        vars(made).update(name=order.name, ranks=order.ranks, cells=cells, communicators=communicators)
        machine = Machine(cells, communicators)
        ended.append(machine.run(seconds_of(order, step.durations, step.travel)))
        if not ended[-1]:
            with pytest.raises(ScheduleError, match="its messages wait for one another"):
                waits(made)
            continue
        starts, ends, leaves, arrives = times_of_messages(made, step.durations, step.travel)
        at = {cell: (rank, i) for rank, row in enumerate(machine.rows) for i, cell in enumerate(row)}
        for i, action in enumerate(a for row in order.ranks for a in row):
            assert (starts[i], ends[i]) == (machine.begun[at[str(action)]], machine.over[at[str(action)]])
            if i in made.readers:
                send = at[f"{action.stage}SEND_{'F' if action.kind == 'F' else 'B'}{action.microbatch}"]
                assert (leaves[i], arrives[i]) == (machine.begun[send], machine.over[send])
    rank, pair = ended
    assert rank <= pair
    for communicators, runs in (("rank", rank), ("pair", pair)):
        if runs:
            assert with_rows(order, cells, communicators).entries == made.entries
        else:
            with pytest.raises(ScheduleError, match="SK331"):
                with_rows(order, cells, communicators)


TINY = [
    own_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]),
    own_order(["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2"]),
    own_order(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", "2F0 2I0 2F1 2I1 2W0 2W1"]),
    own_order(["0F0 0F1 3F0 3I0 3F1 3W0 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 2B1 1B1 1W0"]),
    own_order(["0F0 2F0 0F1 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
    own_order(["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"]),  # a ring
]


@pytest.mark.parametrize("communicators", ["rank", "pair"])
@pytest.mark.parametrize("order", TINY, ids=range(len(TINY)))
def test_no_order_of_few_messages_has_a_shorter_step(order, communicators):
    every = [with_rows(order, cells, communicators) for cells in set(all_rows(order))]
    assert len(every) > 4
    for seed in range(3):
        rng = random.Random(seed)
        stages, links = stages_of(len(order.rank_of), rng), Seconds(rng, (0.5, 1, 3)[seed])
        found = order_messages(stages, order, links=links, communicators=communicators)
        step = price_actions(stages, order, links=links)
        best = min(max(times_of_messages(o, step.durations, step.travel)[1]) for o in every)
        assert found.seconds == pytest.approx(best) == pytest.approx(found.bound)
        assert found.gap == 0 and "no order has a shorter one" in str(found)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gets_an_order_that_is_never_longer_than_torchs_and_never_deadlocks(name):
    order = pipeline_order(name, 3 if name in ("gpipe", "1f1b", "eager-1f1b") else 6, 6, 3)
    rng = random.Random(name)
    stages, links = stages_of(len(order.rank_of), rng), Seconds(rng)
    for communicators in ("rank", "pair"):
        found = order_messages(stages, order, links=links, communicators=communicators)
        step = price_actions(stages, order, links=links)
        machine = Machine(found.order.cells, communicators, blocking=True)  # each entry waits for the one before it
        assert machine.run(seconds_of(order, step.durations, step.travel))
        torchs = simulate_schedule(
            stages, MessageOrder(order.name, order.ranks, torch_cells(order), communicators), links=links
        )
        assert found.bound <= found.seconds <= torchs.seconds + 1e-9
        assert schedule_of(found.order) is None and found.order.ranks == order.ranks
        own = [[cell for cell in row if not is_message(cell)] for row in found.order.cells]
        assert own == [[cell for cell in row if not is_message(cell)] for row in torch_cells(order)]


def test_an_order_for_one_model_has_its_simulated_step_in_it():
    """What the search promises is what the rows take: receives are posted late, but never too late."""
    rng = random.Random(5)
    stages, links = stages_of(8, rng), Seconds(rng)
    order = pipeline_order("interleaved-1f1b", 8, 8, 4)
    found = order_messages(stages, order, links=links)
    machine = Machine(found.order.cells)
    step = price_actions(stages, order, links=links)
    assert machine.run(seconds_of(order, step.durations, step.travel))
    assert max(machine.over.values()) == found.seconds


def test_rows_take_no_longer_than_the_schedule_that_they_come_from(monkeypatch):
    values = []

    def noted(problem):
        found = sequenced(problem, visits=3000)
        values.append(found.value)
        return found

    monkeypatch.setattr("splitkit.pipeline.order_messages.sequenced", noted)
    for seed in range(40):  # with messages and actions that take no time
        rng = random.Random(seed)
        name, ranks = rng.choice(NAMES), rng.choice([2, 3])
        order = pipeline_order(name, (1 if name in ("gpipe", "1f1b", "eager-1f1b") else 2) * ranks, 2 * ranks, ranks)
        stages = [
            StageCosts(*(rng.choice([0.0, 0.5, 1.0]) for _ in range(3)), activation_bytes=1) for _ in order.rank_of
        ]
        found = order_messages(stages, order, links=Seconds(rng), communicators=rng.choice(["rank", "pair"]))
        assert found.seconds == values.pop()


def test_an_order_that_is_ordered_again_is_the_same():
    rng = random.Random(5)
    stages, links = stages_of(8, rng), Seconds(rng)
    order = pipeline_order("interleaved-1f1b", 8, 8, 4)
    found = order_messages(stages, order, links=links)
    again = order_messages(stages, found.order, links=links)
    assert again.order.cells == found.order.cells and again.seconds == found.seconds


def test_torchs_first_receive_holds_up_its_sends_and_ours_does_not():
    """pytorch#188833: on one communicator the receive of the first round's end stands before sends that are ready."""
    stages = [StageCosts(1.0, 1.0, 1.0, activation_bytes=1)] * 8
    links = Seconds(random.Random(0))
    links.found = dict.fromkeys(map(frozenset, itertools.combinations(range(4), 2)), 0.05)
    order = pipeline_order("interleaved-1f1b", 8, 8, 4)
    torchs = simulate_schedule(stages, MessageOrder(order.name, order.ranks, torch_cells(order)), links=links)
    found = order_messages(stages, order, links=links)
    unordered = simulate_schedule(stages, order, links=links)
    assert found.seconds == pytest.approx(unordered.seconds) and torchs.seconds > 1.2 * found.seconds
    first = found.order.cells[0]
    assert first.index("4RECV_F0") > first.index("0SEND_F3") and "4RECV_F0" in torch_cells(order)[0]


def test_torchs_deferred_receives_deadlock():
    """pytorch#178815, ``defer_pp_recv`` of 2.13: the lower rank's receive is not there yet when it sends."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_defer_recv_ops"):
        pytest.skip("torch 2.13 has it")
    order = pipeline_order("1f1b", 2, 4)
    read = schedules._Action.from_str
    rows = {rank: list(map(read, row)) for rank, row in enumerate(torch_cells(order))}
    deferred = schedules._defer_recv_ops(rows, lambda stage: order.rank_of[stage])
    cells = tuple(tuple(map(str, deferred[rank])) for rank in range(2))
    assert not Machine(cells, "pair").run(lambda cell: 1.0)
    with pytest.raises(ScheduleError) as caught:
        with_rows(order, cells)
    text = str(caught.value)
    assert "on rank 0, 0RECV_B0 from rank 1 waits for 0SEND_F1 to rank 1 before it" in text
    assert "on rank 1, 1RECV_F1 from rank 0 waits for 1SEND_B0 to rank 0 before it" in text
    assert "splitkit.order_messages" in text


LATE = """
0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 0F2 0SEND_F2 2RECV_B0 2B0 2SEND_B0 0F3 0SEND_F3
2RECV_B1 2B1 2SEND_B1 2RECV_F2 2F2 2SEND_F2 0RECV_B0 0B0 2RECV_F3 2F3 2SEND_F3 0RECV_B1 0B1 2RECV_B2 2B2 2SEND_B2
2RECV_B3 2B3 2SEND_B3 0RECV_B2 0B2 0RECV_B3 0B3
;
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 1RECV_F2 1F2 1SEND_F2
1RECV_B0 1B0 1SEND_B0 1RECV_F3 1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3 3SEND_B3
1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3
"""
"""Interleaved1F1B with each receive right before its action: pytorch#172833, which was tried on two nodes of GPUs."""


def test_the_deadlock_that_was_met_on_gpus_is_found():
    """pytorch#172668: it hung with rank 0 at ``0SendF1, 2RecvF0`` and rank 1 at ``1SendF0, 1RecvF1``."""
    text = "\n".join(",".join(row.split()) for row in LATE.split(";"))
    with pytest.raises(ScheduleError) as caught:
        order_from_csv(text)
    assert "on rank 0, 2RECV_F0 from rank 1 waits for 0SEND_F1 to rank 1 before it" in str(caught.value)
    assert "on rank 1, 1RECV_F1 from rank 0 waits for 1SEND_F0 to rank 0 before it" in str(caught.value)


GOOD = ["0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1", "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0RECV_B0,0B0", "0B0", "rank 0 computes 0B0 without 0RECV_B0 before it"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "rank 0 computes 0B0 without 0RECV_B0 before it"),
        ("0SEND_F1,", "", "rank 0 never sends: 0SEND_F1 is missing"),
        ("0F1,0SEND_F1", "0SEND_F1,0F1", "rank 0 has 0SEND_F1 before the message is computed"),
        ("0SEND_F1", "0SEND_F1,0SEND_F1", "rank 0 has 0SEND_F1 twice"),
        ("0SEND_F1", "0SEND_F1,1SEND_B1", "row 1, column 5: '1SEND_B1' belongs to rank 1"),
        ("0SEND_F1", "0SEND_F1,1RECV_F1", "row 1, column 5: '1RECV_F1' belongs to rank 1"),
        ("0SEND_F1", "0SEND_F1,0SEND_F7", "'0SEND_F7' is not a message between two ranks"),
        ("0SEND_F1", "0SEND_F1,1SEND_F1", "'1SEND_F1' is not a message between two ranks"),
        ("0SEND_F1", "0SEND_F1,0SEND_F", "'0SEND_F' is not an action"),
        ("0SEND_F1", "0WAIT_SEND_F1,0SEND_F1", "rank 0 has 0WAIT_SEND_F1 before the message is sent"),
        ("0SEND_F1", "0SEND_F1,0WAIT_SEND_F1,0WAIT_SEND_F1", "rank 0 has 0WAIT_SEND_F1 twice"),
        ("0SEND_F1,0RECV_B0", "0RECV_B0,0SEND_F1", ""),
        ("0SEND_F1,0RECV_B0", "0SEND_F1,0WAIT_SEND_F1,0RECV_B0", "on rank 0, 0RECV_B0 from rank 1 waits for 0WAIT"),
    ],
)
def test_rows_that_cannot_run_are_refused_by_name(old, new, reason):
    text = "\n".join(GOOD)
    changed = text.replace(old, new)
    assert changed != text
    if not reason:
        assert isinstance(order_from_csv(changed), MessageOrder)
        return
    with pytest.raises(ScheduleError) as caught:
        order_from_csv(changed)
    assert caught.value.code == "SK331" and reason in str(caught.value)


def test_other_rows_than_the_actions_are_refused():
    order = pipeline_order("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="2 ranks and 1 rows with messages"):
        with_rows(order, torch_cells(order)[:1])
    swapped = tuple(tuple(c.replace("0F0", "0F9").replace("0F1", "0F0") for c in row) for row in torch_cells(order))
    with pytest.raises(ScheduleError, match="row 1 with messages has other actions than rank 0"):
        with_rows(order, swapped)
    with pytest.raises(ScheduleError, match="SK330.*communicators='own'"):
        order_messages([StageCosts(1, 1)] * 2, order, communicators="own")


def test_one_rank_has_nothing_to_order_and_a_rank_without_a_stage_is_refused():
    found = order_messages([StageCosts(1, 1)], "gpipe", 2)
    assert found.seconds == found.bound == 4 and not found.order.readers and found.order.ranks[0]
    assert not any(map(is_message, found.order.cells[0]))
    with pytest.raises(ScheduleError, match="SK330: rank 1 of custom has no stage"):
        order_messages([StageCosts(1, 1)], own_order(["0F0 0B0", ""]))


def test_what_is_written_comes_back_and_torch_reads_it(tmp_path):
    from test_order_file import torchs

    found = order_messages([StageCosts(1, 1, 1, activation_bytes=1)] * 4, "zbv", 4, links=Seconds(random.Random(1)))
    save_order(found.order, tmp_path / "zbv.csv")
    again = load_order(tmp_path / "zbv.csv")
    assert isinstance(again, MessageOrder) and (again.cells, again.ranks) == (found.order.cells, found.order.ranks)
    assert order_to_csv(again) == (tmp_path / "zbv.csv").read_bytes().decode()
    made = torchs(2, 4, 4)
    made._load_csv(tmp_path / "zbv.csv", format="compute_comms")
    assert [[str(a) for a in made.pipeline_order_with_comms[r]] for r in range(2)] == list(map(list, again.cells))
    made._dump_csv(tmp_path / "again.csv", "compute_comms")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "zbv.csv").read_bytes()
