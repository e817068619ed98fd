"""Copies to the host in simulated pipelines: windows, waits on a shared link, and the bytes of each rank over time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from pipelinegraphs import bytes_needed

from splitkit.errors import ScheduleError
from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.order import Action, HostWindow, StageCopies, host_windows, most_on_host
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import rank_loads

SCHEDULES = [("1f1b", 4, 6), ("gpipe", 2, 5), ("zbv", 4, 4), ("interleaved-1f1b", 4, 6)]


def test_windows_of_1f1b():
    row = pipeline_order("1f1b", 4, 5).ranks[0]  # F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
    found = host_windows(row)
    assert found[0, 0] == HostWindow(0, 1, 3, 4) and found[0, 1] == HostWindow(1, 2, 5, 6)
    last = pipeline_order("1f1b", 4, 5).ranks[3]  # each backward right after its forward
    assert found[0, 4] == HostWindow(5, 6, 8, 9) and host_windows(last)[3, 1] == HostWindow(2, 2, 3, 3)
    assert host_windows([Action(0, "F", 0), Action(0, "F", 1), Action(0, "I", 0), Action(0, "W", 0)])[0, 0] == (
        HostWindow(0, 1, 2, 2)
    )
    assert most_on_host(row, {0: 3}) == 12
    divided = [Action(0, kind, number) for kind, number in (("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1))]
    assert most_on_host(divided, {0: 3}) == 3  # away until the input part, as it reads them


def drawn(dice, copies):
    """A stage with random figures; whose copies take no time, or some."""
    saved = dice.randint(1, 99)
    stage = StageCosts(dice.random(), dice.random(), dice.random(), saved, temporary_bytes=dice.randint(0, 9))
    if copies is None:
        return stage
    out, back = (2 * copies * dice.random() for _ in range(2))
    tail, head = out + copies * stage.forward * dice.random(), back + copies * stage.backward_input * dice.random()
    return replace(stage, copies=StageCopies(dice.randint(0, saved), out, tail, back, head))


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), SCHEDULES)
def test_bytes_and_waits(schedule, stages, microbatches):
    dice = random.Random(stages)
    for _ in range(8):
        costs = [drawn(dice, 1) for _ in range(stages)]
        free = [replace(s, copies=replace(s.copies, out=0.0, out_end=0.0, back=0.0, back_tail=0.0)) for s in costs]
        kept, quick, slow = (
            simulate_schedule(given, schedule, microbatches)
            for given in ([replace(s, copies=None) for s in costs], free, costs)
        )
        assert kept.seconds == quick.seconds <= slow.seconds
        assert all(a <= b for a, b in zip(quick.peaks, kept.peaks, strict=True))
        for run in (quick, slow):
            assert [max(n for _, n in rank) for rank in memory_over_time(run)] == list(run.peaks)
            loads = rank_loads(run.order, offload=True)
            assert [bytes_needed(load, [costs[s] for s in load.stages]) for load in loads] == list(run.peaks)
        assert list(slow.host_peaks) == [most_at_once(slow, rank) for rank in range(slow.ranks)]
        no_overtaking(slow)


def most_at_once(run, rank):
    """The most bytes on the host, from the times of actions."""
    spans = {}
    for e in run.timeline:
        if e.rank == rank and e.kind in "FBI":
            spans.setdefault((e.stage, e.microbatch), []).extend([e.start, e.end])
    stamps = [s[0] for s in spans.values()]
    size = {s: run.stages[s].copies.nbytes for s, _ in spans}
    return max(sum(size[s] for (s, _), span in spans.items() if span[0] <= t < max(span)) for t in stamps)


def no_overtaking(run):
    """Each rank's copies to the host fit into the time before it goes on, one after the other."""
    for rank in range(run.ranks):
        busy = 0.0
        columns = run.order.columns
        for number in np.flatnonzero(columns.rank == rank).tolist():
            if columns.kind[number] == 0:
                copies = run.stages[columns.stage[number]].copies
                busy = max(busy + copies.out, run.starts[number] + copies.out_end)
        assert run.goes_on[columns.rank == rank].max() >= busy - 1e-9


def test_a_slow_link_paces_the_step():
    stage = StageCosts(1.0, 2.0, saved_bytes=10, copies=StageCopies(10, 9.0, 9.0, 0.0, 0.0))
    run = simulate_schedule([stage, StageCosts(1.0, 2.0)], "1f1b", 8)
    assert run.seconds >= 8 * 9.0
    plain = StageCosts(1.0, 2.0)
    fits = replace(stage, copies=StageCopies(10, 2.9, 3.0, 2.9, 3.0))  # what forward and backward take together
    without = simulate_schedule([plain] * 4, "1f1b", 64).seconds
    assert without <= simulate_schedule([fits, plain, plain, plain], "1f1b", 64).seconds < 1.05 * without
    over = replace(stage, copies=StageCopies(10, 6.0, 6.0, 2.9, 3.0))
    assert simulate_schedule([over, plain, plain, plain], "1f1b", 64).seconds > 1.8 * without


def test_what_is_not_simulated_is_refused():
    stage = StageCosts(1.0, 2.0, saved_bytes=1, copies=StageCopies(1, 1.0, 1.0, 1.0, 1.0))
    with pytest.raises(ScheduleError, match="SK332.*2 bytes go to the host"):
        replace(stage, copies=StageCopies(2, 1.0, 1.0, 1.0, 1.0))
    with pytest.raises(ScheduleError, match="SK332"):
        replace(stage, copies=1.0)
