"""The row of a rank: what it says as data and as text, and of devices that run several parts."""

from __future__ import annotations

from splitkit.pipeline.run import RankRow, rows_of_parts
from splitkit.pipeline.stage_costs import StageCosts


def test_a_row_as_text_and_as_data():
    row = RankRow("cuda:0", (0, "1 a"), 0.5, 0.25, 3, (100, 20, 3, 4), limit=254, replicas=2)
    assert row.used == 0.5 and RankRow("", (), 0.0, None, None, (1, 1, 1, 1)).used == 0.0
    assert row.cells(7) == {
        "rank": "7", "device": "cuda:0", "stages": "0,1 a", "replicas": "x2", "busy": "500 ms", "load": "",
        "bubble": "25.0%",
        "in flight": "3", "fixed": "100 B", "saved": "20 B", "messages": "3 B", "temporaries": "4 B",
        "temporary": "7 B", "peak": "127 B", "memory": "254 B",
    }  # fmt: skip
    memory = {"peak": 127, "fixed": 100, "saved": 20, "messages": 3, "temporaries": 4, "limit": 254}
    assert row.to_dict(7) == {
        "rank": 7, "device": "cuda:0", "stages": [0, "1 a"], "busy": 0.5, "unit": "s", "bubble": 0.25, "in_flight": 3,
        "memory": memory, "replicas": 2,
    }  # fmt: skip


def test_a_row_leaves_out_what_there_is_not():
    cells = RankRow("", (), 0.0, None, None, (0, 0, 0, 0)).cells(0)
    assert cells["stages"] == "none" and cells["busy"] == "0" and cells["memory"] == "no limit"
    assert not any(cells[column] for column in ("device", "replicas", "bubble", "in flight"))
    assert RankRow("", (), 0.0, None, None, (0, 0, 0, 0)).to_dict(0)["device"] is None


def test_a_device_holds_all_its_parts_and_the_most_that_one_takes_besides():
    first = StageCosts(1, 2, 3, saved_bytes=10, temporary_bytes=7, parameter_bytes=100, gradient_bytes=50)
    second = StageCosts(2, 2, 2, saved_bytes=1, temporary_bytes=9, optimizer_bytes=5, replicas=2)
    rows = list(rows_of_parts(["a", "b", "c"], [None, 8, 9], {(1, 0): first, 0: second, (1, 1): second}))
    assert [row.stages for row in rows] == [(0,), ("1 0", "1 1"), ()] and [row.limit for row in rows] == [None, 8, 9]
    assert [row.busy for row in rows] == [6, 12, 0] and [row.replicas for row in rows] == [2, 2, 1]
    assert [row.nbytes for row in rows] == [(5, 1, 0, 9), (155, 11, 0, 9), (0, 0, 0, 0)]
