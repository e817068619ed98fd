"""Torch's schedule CSV: what we write torch reads, and what torch writes we read, with uneven placement too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from campaigns import few_of_many
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from splitkit.errors import FileError, ScheduleError
from splitkit.pipeline.message_order import MessageOrder
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.schedules import known_schedules, pipeline_order
from splitkit.pipeline.synthesize import load_order, order_from_csv, order_to_csv, save_order
from splitkit.pipeline.torch_orders import torch_cells


@st.composite
def orders(draw):
    """Any placement of stages on ranks, and any order in which all can run: a random run of what is ready."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    more = draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    rank_of = draw(st.permutations([*range(ranks), *more]))
    divided = {(s, m): draw(st.booleans()) for s in range(stages) for m in range(microbatches)}
    done, rows = set(), [[] for _ in range(ranks)]
    left = {Action(s, k, m) for (s, m), both in divided.items() for k in ("FIW" if both else "FB")}
    while left:
        action = draw(st.sampled_from(sorted(a for a in left if is_ready(a, done, stages))))
        left.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return PipelineOrder("mine", tuple(map(tuple, rows)))


def is_ready(action, done, stages):
    stage, kind, m = action
    behind = stage == stages - 1 or any((stage + 1, k, m) in done for k in "BI")
    return {
        "F": stage == 0 or (stage - 1, "F", m) in done,
        "B": (stage, "F", m) in done and behind,
        "I": (stage, "F", m) in done and behind,
        "W": (stage, "I", m) in done,
    }[kind]


def torchs(ranks, stages, microbatches):
    """A schedule object of torch that reads and writes files, without a process group."""
    local = [SimpleNamespace(group_rank=0, group_size=ranks, num_stages=stages, submod=None, stage_index=0)]
    made = schedules._PipelineScheduleRuntime(local, microbatches)
    made._stages[0].stage_index_to_group_rank = None
    return made


def rows_of(lists):
    return [[str(a) for a in lists[rank] if a is not None] for rank in sorted(lists)]


@few_of_many(15, 400, orders())
def test_what_is_written_torch_reads_and_writes_again(order):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        mine, theirs, both = (Path(folder) / name for name in ("mine.csv", "theirs.csv", "both.csv"))
        save_order(order, mine)
        made = torchs(len(order.ranks), len(order.rank_of), order.microbatches)
        made._load_csv(mine)
        assert rows_of(made.pipeline_order) == [[str(a) for a in row] for row in order.ranks]
        assert dict(made.stage_index_to_group_rank) == dict(enumerate(order.rank_of))
        made._dump_csv(theirs, "compute_only")
        assert theirs.read_bytes() == mine.read_bytes()
        assert load_order(theirs).ranks == order.ranks
        made._dump_csv(both, "compute_comms")
        both_read = order_from_csv(both.read_text())
        assert both_read.ranks == order.ranks
        assert not isinstance(both_read, MessageOrder) or both_read.cells == torch_cells(order)


@pytest.mark.parametrize("name", [schedule.name for schedule in known_schedules() if schedule.torch_class])
def test_torchs_schedules_come_back(name, tmp_path):
    order = pipeline_order(name, 4, 8)
    save_order(order, tmp_path / "order.csv")
    assert load_order(tmp_path / "order.csv").ranks == order.ranks
    assert load_order(tmp_path / "order.csv").name == "order.csv"


def test_idle_time_pairs_and_what_shards_are_read():
    text = "0F0,,0F1, 0B0 ,0B1,0REDUCE_GRAD\n1UNSHARD,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert order_to_csv(order_from_csv(text)) == "0F0,0F1,0B0,0B1\r\n1F0,1F1,1B0,1B1\r\n"


def test_what_communicates_is_kept_with_all_other_cells():
    text = (
        "0F0,,0SEND_F0, 0F1 ,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n"
    )
    order = order_from_csv(text)
    assert isinstance(order, MessageOrder) and [str(a) for a in order.ranks[1]] == ["1F0", "1F1", "1B0", "1B1"]
    assert order_to_csv(order) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\r\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0\n1F0,1X0", "row 2, column 2: '1X0' is not an action"),
        ("0F0,0B0 0F1", "row 1, column 2: '0B0 0F1' is not an action"),
        ("0F0;0B0", "row 1, column 1: '0F0;0B0' is not an action"),
        ("0F0,(0B0)OVERLAP", "row 1, column 2: '(0B0)OVERLAP' is not an action"),
        ("(0F0;x)OVERLAP_F_B", "row 1, column 1: '(0F0;x)OVERLAP_F_B' is not an action"),
        ("0F0,0B0junk", "row 1, column 2: '0B0junk' is not an action"),
        ("0F,0B0", "row 1, column 1: '0F' is not an action"),
        ("0F0,0B99999999999999999999", "row 1, column 2: "),
        ("0F999999999,0B0", "0F999999999 is one of 2 actions"),
        ("0F٣,0B0", "row 1, column 1"),
        ("0F0,0B0\n1B0,1F0", "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1B0 for 1F0 of rank 1"),
        ("", "has stages []"),
    ],
)
def test_what_is_no_order_is_refused_by_row_and_column(text, reason):
    with pytest.raises(ScheduleError) as caught:
        order_from_csv(text)
    assert caught.value.code == "SK331" and reason in str(caught.value)


def test_files_that_cannot_be_read_or_written_say_so(tmp_path):
    with pytest.raises(FileError) as caught:
        load_order(tmp_path / "none.csv")
    assert caught.value.code == "SK504" and "none.csv" in str(caught.value)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(FileError, match="SK504"):
        load_order(tmp_path / "bytes.csv")
    with pytest.raises(FileError, match="SK504"):
        save_order(pipeline_order("gpipe", 1, 1), tmp_path / "no" / "order.csv")
