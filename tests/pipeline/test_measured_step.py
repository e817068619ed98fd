"""Measured steps: a written step can be read again, and a bad trace is refused by event and field."""

from __future__ import annotations

import json

import pytest

import splitkit as sk
from splitkit.errors import FileError, ScheduleError, ViewError
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import Event, MeasuredStep


def stage(seconds):
    return StageCosts(seconds, 2 * seconds, 0.0, 100, 10, 10, 100, 100)


@pytest.fixture(scope="module")
def run():
    return sk.simulate_schedule([stage(1.0), stage(2.0)], "1f1b", 3)


@pytest.fixture
def step(run):
    later = [e._replace(start=e.start + 5, end=e.end + 5) for e in reversed(run.timeline)]
    memory = [[(e.start + 5, 10 * i) for i, e in enumerate(run.timeline) if e.rank == rank] for rank in range(2)]
    return MeasuredStep.of("1F1B", later, memory)


def test_a_step_starts_at_zero_and_knows_its_order(run, step):
    assert step.timeline == run.timeline and step.seconds == run.seconds and step.busy == run.busy
    assert step.order.ranks == run.order.ranks and step.order.name == "1F1B" and step.ranks == 2
    assert step.memory[0][0] == (0.0, 0) and len(step.memory[1]) == 6


def test_what_is_written_is_read_again(step, tmp_path):
    step.to_trace(tmp_path / "t.json")
    again = MeasuredStep.load(tmp_path / "t.json")
    assert again.schedule == "1F1B" and again.order.ranks == step.order.ranks
    for here, there in zip(again.timeline, step.timeline, strict=True):
        assert here[:4] == there[:4] and here[4:] == pytest.approx(there[4:])
    assert [[p[1] for p in points] for points in again.memory] == [[p[1] for p in points] for points in step.memory]


def test_the_trace_of_a_simulated_step_is_one_too_but_its_bytes_are_not_those_above_the_start(run, tmp_path):
    run.to_trace(tmp_path / "t.json")
    read = MeasuredStep.load(tmp_path / "t.json")
    assert read.order.ranks == run.order.ranks and read.memory == () and read.seconds == pytest.approx(run.seconds)


def test_arrows_go_from_each_action_that_sends_to_the_one_that_receives(run):
    events = run.to_chrome_trace()["traceEvents"]
    ends = {kind: {e["id"]: e for e in events if e["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys() and len(ends["s"]) == len(run.transfers) == 6
    inside = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X" and e["cat"] != "transfer"}
    found = {}
    for number, sent in ends["s"].items():
        read = ends["f"][number]
        for each in (sent, read):
            around = [
                name
                for (pid, name), e in inside.items()
                if pid == each["pid"] and e["ts"] < each["ts"] < e["ts"] + e["dur"]
            ]
            assert len(around) == 1 and each["tid"] == 0
            found[number, each["ph"]] = around[0]
    pairs = {(found[number, "s"], found[number, "f"]) for number in ends["s"]}
    assert pairs == {*((f"0F{m}", f"1F{m}") for m in range(3)), *((f"1B{m}", f"0B{m}") for m in range(3))}


def test_memory_counters_have_the_peak_of_each_rank(run):
    events = [e for e in run.to_chrome_trace()["traceEvents"] if e["ph"] == "C"]
    assert [max(e["args"]["bytes"] for e in events if e["pid"] == rank) for rank in range(2)] == list(run.peaks)


def changed(data, **fields):
    event = next(e for e in data["traceEvents"] if e["ph"] == "X")
    event.update(fields)
    return data


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda d: 3, "there is no list of events"),
        (lambda d: {"traceEvents": {}}, "there is no list of events"),
        (lambda d: {"traceEvents": []}, "none of the events"),
        (lambda d: changed(d, ts="now"), "ts of event 4 is 'now', not a number"),
        (lambda d: changed(d, ts=float("inf")), "ts of event 4 is inf"),
        (lambda d: changed(d, dur=-1), "dur of event 4 is -1 microseconds"),
        (lambda d: changed(d, dur=True), "dur of event 4 is True"),
        (lambda d: changed(d, pid=-1), "pid of event 4 is -1"),
        (lambda d: changed(d, pid=2**40), "12 actions on 1099511627777 ranks"),
        (lambda d: changed(d, args=None), "stage of event 4 is None"),
        (lambda d: changed(d, args={"stage": 0, "microbatch": 0.5}), "microbatch of event 4 is 0.5"),
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused(step, spoil, why):
    data = json.loads(json.dumps(step.to_chrome_trace()))
    with pytest.raises(FileError, match="SK510") as error:
        MeasuredStep.from_chrome_trace(spoil(data))
    assert why in error.value.reason and "splitkit train" in error.value.remedy


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path):
    with pytest.raises(FileError, match="SK504"):
        MeasuredStep.load(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("[1, ")
    with pytest.raises(FileError, match="SK510: .* is not JSON"):
        MeasuredStep.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="SK510"):
        MeasuredStep.load(tmp_path / "t.json")


def test_half_a_step_has_no_order(step):
    half = MeasuredStep("1F1B", step.timeline[1:])
    with pytest.raises(ScheduleError, match="SK331"):
        _ = half.order
    one = MeasuredStep("x", (Event(0, "F", 0, 0, 0.0, 1.0), Event(0, "B", 0, 0, 1.0, 2.0)))
    assert one.order.microbatches == 1


def test_a_trace_of_replicas_is_no_step_of_one_pipeline(step):
    twice = [*step.timeline, *(e._replace(rank=e.rank + 2, microbatch=e.microbatch + 3) for e in step.timeline)]
    with pytest.raises(ViewError, match="SK901: stage 0 has replicas on the ranks 0 and 2"):
        _ = MeasuredStep.of("1F1B", twice, []).order
