"""Simulated schedules against closed formulas, cases worked by hand, laws, and bounds."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ownorders import own_order

from splitkit.costs import Link, Links
from splitkit.errors import CostError, ScheduleError
from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.order import BACKWARD_WEIGHT
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named
from splitkit.pipeline.simulate import StageCosts, simulate_schedule

SINGLE = ("GPipe", "1F1B")
EQUAL = StageCosts(1, 1, 1)


def equal(name, ranks, microbatches, local=2, **options):
    count = ranks * (1 if schedule_named(name).is_single else local)
    return simulate_schedule([EQUAL] * count, name, microbatches, ranks=ranks, **options)


def times(run, rank):
    """Action -> (start, end) of a rank."""
    return {event.action: (event.start, event.end) for event in run.timeline if event.rank == rank}


# Closed formulas


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 2), (4, 8), (8, 16), (7, 30)])
def test_the_bubble_of_gpipe_and_1f1b(name, p, m):
    run = equal(name, p, m)
    assert run.bubble == pytest.approx(Fraction(p - 1, m + p - 1))
    assert run.seconds == 3 * (m + p - 1)
    assert run.bubbles == pytest.approx([run.bubble] * p)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("p, m, v", [(1, 3, 2), (2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_the_bubble_of_interleaved_schedules(name, p, m, v):
    assert equal(name, p, m, v).bubble == pytest.approx(Fraction(p - 1, v * m + p - 1))


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 20), (6, 12)])
def test_v_schedules_only_wait_for_the_first_microbatch_to_arrive(name, p, m):
    """At F = I = W: rank r starts after r steps and then never waits, so the bubble is the p - 1 steps at the ends."""
    run = equal(name, p, m)
    assert run.seconds == 6 * m + p - 1
    if name == "ZBVZeroBubble":
        for rank in range(p):
            events = list(times(run, rank).values())
            assert events[0][0] == rank and all(a[1] == b[0] for a, b in pairwise(events))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (5, 20)])
def test_the_bubble_of_zb1p_is_a_third_of_1f1bs(p, m):
    """Qi et al. (2023): (p - 1)(F + I - W) of idle time against (p - 1)(F + I + W)."""
    run = equal("InterleavedZeroBubble", p, m, local=1)
    assert run.seconds - run.busy[0] == p - 1
    assert equal("1F1B", p, m).seconds - run.busy[0] == 3 * (p - 1)


@pytest.mark.parametrize("p, m", [(4, 8), (8, 16)])
def test_microbatches_in_flight(p, m):
    """The table of Narayanan et al. (2021) and Qi et al. (2023), as torch's lists have it."""
    ranks = range(p)
    assert equal("GPipe", p, m).in_flight == (m,) * p
    assert equal("1F1B", p, m).in_flight == tuple(min(m, p - r) for r in ranks)
    for v in (2, 3):
        interleaved = equal("Interleaved1F1B", p, m, v).in_flight
        assert interleaved == tuple((v - 1) * p + 2 * (p - 1 - r) + 1 for r in ranks)
        assert equal("LoopedBFS", p, m, v).in_flight == (v * m,) * p
    assert equal("InterleavedZeroBubble", p, m).in_flight == (2 * p,) * p
    zbv = equal("ZBVZeroBubble", p, m)
    assert zbv.in_flight == (2 * p,) * p
    assert zbv.in_flight_of_stages == tuple(2 * p - s for s in range(2 * p))


def test_the_numbers_of_four_ranks():
    assert equal("1F1B", 4, 8).in_flight == (4, 3, 2, 1)
    assert equal("Interleaved1F1B", 4, 8).in_flight == (11, 9, 7, 5)
    assert equal("Interleaved1F1B", 4, 8).in_flight_of_stages[::4] == (8, 4), "which do not add up to 11"
    # Of an overlapped pair forward runs first; taken as one, as if forward and backward ended together, it is one less.
    assert equal("DualPipeV", 4, 8).in_flight == (9, 9, 9, 9)
    assert equal("GPipe", 4, 8).bubble == pytest.approx(0.273, abs=5e-4)
    assert equal("Interleaved1F1B", 4, 8).bubble == pytest.approx(0.158, abs=5e-4)


@pytest.mark.parametrize("name", [schedule.name for schedule in known_schedules()])
def test_schedules_that_divide_backward_are_known(name):
    order = pipeline_order(name, 4 * schedule_named(name).usual_stages_per_rank, 8)
    assert schedule_named(name).divided == (BACKWARD_WEIGHT in order.columns.kind)


@pytest.mark.parametrize("p, m", [(4, 8), (8, 16)])
def test_what_zero_bubble_holds_up_to_the_input_part(p, m):
    """v p - r microbatches, where the weight part needs nothing of what was saved."""
    stage = StageCosts(1, 1, 1, saved_bytes=1, deferred_bytes=0)
    run = simulate_schedule([stage] * (2 * p), "InterleavedZeroBubble", m)
    assert run.peaks == tuple(2 * p - r for r in range(p))


# Worked by hand


def test_two_uneven_stages_with_transfers_under_1f1b():
    """The message of F takes 1, that of B takes 2: 4 and 8 bytes at 4 a second.

    time    0 . . . . 5 . . . . 10. . . . 15.
    rank 0  0 1               0 0       1 1      one digit a unit of time: the microbatch
    rank 1      0 0 0 0 0 1 1 1 1 1
    """
    stages = [
        StageCosts(1, 1, 1, activation_bytes=4),
        StageCosts(3, 1, 1, input_gradient_bytes=8),
    ]
    run = simulate_schedule(stages, "1f1b", 2, links=Links.uniform(4))
    assert times(run, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (9, 11), "0B1": (14, 16)}
    assert times(run, 1) == {"1F0": (2, 5), "1B0": (5, 7), "1F1": (7, 10), "1B1": (10, 12)}
    assert run.seconds == 16 and run.busy == (6, 10) and run.busiest_rank == 1
    assert run.bubbles == (1 - 6 / 16, 1 - 10 / 16) and run.bubble == 0.5
    assert [tuple(t) for t in run.transfers] == [
        (0, 1, "0F0", 4, 1, 2),
        (0, 1, "0F1", 4, 2, 3),
        (1, 0, "1B0", 8, 7, 9),
        (1, 0, "1B1", 8, 12, 14),
    ]


def test_messages_of_one_pair_of_ranks_travel_one_at_a_time():
    stages = [StageCosts(1, 1, activation_bytes=5), StageCosts(1, 1, input_gradient_bytes=0)]
    run = simulate_schedule(stages, "gpipe", 3, links=Links.uniform(1))
    assert [(t.start, t.end) for t in run.transfers[:3]] == [(1, 6), (6, 11), (11, 16)]
    assert [times(run, 1)[f"1F{m}"][0] for m in range(3)] == [6, 11, 16]


def test_the_two_directions_do_not_disturb_each_other():
    stages = [StageCosts(1, 1, activation_bytes=5), StageCosts(1, 1, input_gradient_bytes=4)]
    run = simulate_schedule(stages, "1f1b", 2, links=Links.uniform(1))
    assert [(t.start, t.end) for t in run.transfers] == [(1, 6), (6, 11), (8, 12), (13, 17)]


def test_each_direction_has_its_own_link_and_ranks_their_own_names():
    there, back = Link(4.0, 1.0), Link(2.0, 0.5)
    links = Links(pairs={("cuda:0", "cuda:1"): there, ("cuda:1", "cuda:0"): back})
    stages = [StageCosts(1, 1, activation_bytes=4), StageCosts(1, 1)]
    run = simulate_schedule(stages, "gpipe", 1, links=links, devices=["cuda:0", "cuda:1"])
    assert times(run, 1) == {"1F0": (3, 4), "1B0": (4, 5)}, "latency 1 and 4 bytes at 4 a second"
    assert times(run, 0)["0B0"] == (7.5, 8.5), "the gradient is as large: latency 0.5 and 4 bytes at 2 a second"
    with pytest.raises(CostError, match="no link from 0 to 1"):
        simulate_schedule(stages, "gpipe", 1, links=links)


def test_values_between_stages_of_one_rank_do_not_travel():
    stages = [StageCosts(1, 1, 1, activation_bytes=10)] * 4
    run = simulate_schedule(stages, "zbv", 1, links=Links.uniform(1))
    assert times(run, 1)["1F0"] == (11, 12) and times(run, 1)["2F0"] == (12, 13)
    assert {(t.source, t.target) for t in run.transfers} == {(0, 1), (1, 0)}


def test_schedules_that_split_backward_time_its_parts_and_others_their_sum():
    stages = [StageCosts(1, 2, 4), StageCosts(1, 2, 4)]
    split = times(simulate_schedule(stages, "interleaved-zero-bubble", 1, ranks=2), 1)
    assert split == {"1F0": (1, 2), "1I0": (2, 4), "1W0": (4, 8)}
    assert times(simulate_schedule(stages, "1f1b", 2), 1)["1B0"] == (2, 8)


def test_a_heavy_first_stage_hides_in_the_warm_up_and_a_heavy_last_one_does_not():
    """3 equal stages and one twice as heavy, m = 8: sum + (m - 1) max is right only for the last."""
    light, heavy = StageCosts(1, 1, 1), StageCosts(2, 2, 2)
    first = simulate_schedule([heavy, light, light, light], "1f1b", 8)
    last = simulate_schedule([light, light, light, heavy], "1f1b", 8)
    assert last.seconds == 15 + 7 * 6
    # Rank 0 forwards 4 in 8 and goes on with B0 when that is back, at 2 + 3 + 6 = 11; from there it never waits.
    assert first.seconds == 11 + 8 * 4 + 4 * 2
    assert times(first, 0)["0B0"][0] == 11 and last.seconds > first.seconds


def test_the_memory_of_a_rank_worked_by_hand():
    """Rank 0 of 1F1B on two ranks, two microbatches: both activations are saved at 1, and B0 runs on top of them."""
    stages = [
        StageCosts(1, 1, 1, 100, None, 8, None, 7, 1000, 500, 2000),
        StageCosts(1, 1, 1, 30, None, 0, 16, 5, 10, 0, 0),
    ]
    first, last = simulate_schedule(stages, "1f1b", 2, links=Links.uniform(16)).memory
    assert (first.parameters, first.gradients, first.optimizer) == (1000, 500, 2000)
    # F0 0-1, its message to 1.5, 1F0 to 2.5, 1B0 to 4.5, its message to 5.5, 0B0 to 7.5. As that ends, the gradient for
    # 0B1 sets out, so that there are two.
    assert (first.saved, first.messages, first.temporaries, first.seconds) == (200, 32, 7, 7.5)
    assert first.peak == 3739
    # The activation of F1 waits from 2 on (8 bytes) while F0 and B0 run. F1, having read it, runs from 4.5 on, while
    # the gradient of B0 is on its way (16 bytes).
    assert (last.saved, last.messages, last.temporaries, last.seconds) == (30, 16, 5, 4.5)


def test_saved_bytes_are_weighed_at_one_time_not_added_up():
    """Interleaved: stage 0 has 8 in flight at most, stage 4 has 4, at most 11 of both."""
    stages = [StageCosts(1, 1, 1, saved_bytes=1 if s < 4 else 100) for s in range(8)]
    run = simulate_schedule(stages, "interleaved-1f1b", 8)
    assert run.in_flight_of_stages[::4] == (8, 4)
    # By the list of rank 0: 8 + 2 forwards, then F and B of one kind in turn; four of stage 4 are met by 7 of stage 0.
    live = {0: 0, 4: 0}
    most = 0
    for stage, kind, _ in run.order.ranks[0]:
        live[stage] += 1 if kind == "F" else 0
        most = max(most, live[0] + 100 * live[4])
        live[stage] -= 1 if kind == "B" else 0
    assert run.memory[0].saved == run.peaks[0] == most == 407


def test_static_buffers_are_there_for_every_microbatch_all_the_time():
    """As torch 2.11 and 2.13 allocate them: the input that a stage keeps for backward lies in one."""
    stages = [StageCosts(1, 1, 1, saved_bytes=50, activation_bytes=20)] * 3
    live, static = (simulate_schedule(stages, "1f1b", 6, static_buffers=flag) for flag in (False, True))
    assert [m.saved for m in live.memory] == [150, 100, 50]
    assert [m.saved for m in static.memory] == [150, 60, 30]
    # besides, an activation that the first two have sent, and a gradient that the last two have sent
    assert [m.messages for m in static.memory] == [6 * 20 + 20, 6 * 40 + 20 + 20, 6 * 20 + 20]


def test_orders_that_torch_interprets_keep_what_they_sent_to_the_end_of_the_step():
    """Before 2.15; its class of 1F1B keeps one activation and one gradient."""
    stages = [StageCosts(1, 1, 1, saved_bytes=50, activation_bytes=20)] * 2
    ranks = ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    single, kept = (
        simulate_schedule(stages, own_order(ranks, name), static_buffers=True).memory for name in ("1F1B", "mine")
    )
    assert [(m.saved, m.messages) for m in single] == [(100, 3 * 20 + 20), (30, 3 * 20 + 20)]
    # Rank 0: what F0 sent is there when F2 runs. Rank 1: the gradients of two microbatches, when the third runs.
    assert [(m.saved, m.messages) for m in kept] == [(100, 3 * 20 + 20), (30, 3 * 20 + 2 * 20)]
    live = simulate_schedule(stages, own_order(ranks, "mine")).memory
    assert live == simulate_schedule(stages, own_order(ranks, "1F1B")).memory, "torch 2.15 keeps nothing"


def test_gradients_between_stages_of_one_rank_are_held_until_read():
    order = own_order(["0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"])
    stages = [StageCosts(1, 1), StageCosts(1, 1, input_gradient_bytes=3)]
    memory = simulate_schedule(stages, order).memory
    assert memory[0].messages == 6 and memory[0].seconds == 6
    reader = [StageCosts(1, 1, temporary_bytes=4), StageCosts(1, 1, input_gradient_bytes=3)]
    memory = simulate_schedule(reader, own_order(["0F0 1F0 1B0 0B0"])).memory
    assert (memory[0].messages, memory[0].temporaries, memory[0].seconds) == (3, 4, 3), "while it is read"


def test_a_gradient_is_held_to_the_end_of_its_journey():
    """1B1 ends just as the gradient of 1B0 is there: for that moment there are both."""
    stages = [StageCosts(1, 1), StageCosts(1, 1, input_gradient_bytes=6)]
    memory = simulate_schedule(stages, "gpipe", 2, links=Links.uniform(6)).memory
    assert (memory[1].messages, memory[1].seconds) == (12, 5)


def test_actions_that_take_no_time_still_take_memory():
    run = simulate_schedule([StageCosts(0, 0, saved_bytes=4, temporary_bytes=3)] * 2, "gpipe", 5)
    assert run.seconds == 0 and run.bubble == 0 and run.in_flight == (5, 5)
    assert run.peaks == (23, 23)


def test_an_order_of_ones_own():
    order = own_order(["0F0 0F1 0I1 0W1 0I0 0W0", "1F0 1F1 1B1 1B0"], "mine")
    run = simulate_schedule([EQUAL, EQUAL], order)
    assert times(run, 1) == {"1F0": (1, 2), "1F1": (2, 3), "1B1": (3, 5), "1B0": (5, 7)}
    assert times(run, 0)["0I1"] == (5, 6) and times(run, 0)["0I0"] == (7, 8) and run.seconds == 9
    assert run.order.name == "mine" and run.in_flight == (2, 2)


def test_a_rank_may_have_nothing_to_do():
    run = simulate_schedule([StageCosts(1, 1, saved_bytes=5)], own_order(["", "0F0 0B0", ""]))
    assert run.bubbles == (1, 0, 1) and run.in_flight == (0, 1, 0) and run.peaks == (0, 5, 0)


# Laws

STAGES = st.builds(StageCosts, *[st.integers(0, 20)] * 4, activation_bytes=st.integers(0, 30))
NAMES = st.sampled_from([schedule.name for schedule in known_schedules()])
LINKS = st.sampled_from([None, Links.uniform(3.0, 1.0), Links.uniform(100.0)])
SMALL = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def cases(draw):
    name, ranks = draw(NAMES), draw(st.integers(1, 4))
    count = ranks * schedule_named(name).usual_stages_per_rank
    stages = draw(st.lists(STAGES, min_size=count, max_size=count))
    return name, stages, 2 * ranks * draw(st.integers(1, 2)), draw(LINKS)


def simulated(case, stages=None):
    name, own, microbatches, links = case
    return simulate_schedule(stages or own, name, microbatches, links=links)


@SMALL
@given(cases())
def test_bounds(case):
    """No shorter than the busiest rank, nor than one microbatch through all stages; no longer than all in turn."""
    run = simulated(case)
    _, stages, microbatches, *_ = case
    work = [s.forward + s.backward for s in stages]
    trips = sum(t.end - t.start for t in run.transfers)
    through = [e for e in run.timeline if e.microbatch == 0 and e.kind != "W"]
    path = sum(e.end - e.start for e in through) + sum(
        t.end - t.start for t in run.transfers if re.fullmatch(r"\d+[FBI]0", t.action)
    )
    assert run.seconds >= max(run.busy) - 1e-9 and run.seconds >= path - 1e-9
    assert run.seconds <= microbatches * sum(work) + 2 * trips + 1e-9, "a message is paid at both ends at most"
    assert sum(run.busy) == pytest.approx(microbatches * sum(work))
    assert all(0 <= bubble <= 1 for bubble in run.bubbles)
    assert run.bubble == pytest.approx(1 - sum(run.busy) / (run.ranks * run.seconds) if run.seconds else 0)


@SMALL
@given(cases())
def test_ranks_do_one_thing_at_a_time_and_nothing_runs_before_what_it_needs(case):
    run = simulated(case)
    ended = {event.action: event.end for event in run.timeline}
    came = {t.action: t.end for t in run.transfers}
    for rank in range(run.ranks):
        events = [event for event in run.timeline if event.rank == rank]
        assert [e.action for e in events] == [str(a) for a in run.order.ranks[rank]]
        assert all(a.end <= b.start for a, b in pairwise(events))
    last = len(case[1]) - 1
    for e in run.timeline:
        needs = []
        if e.kind == "F" and e.stage:
            needs = [f"{e.stage - 1}F{e.microbatch}"]
        elif e.kind in "BI" and e.stage < last:
            needs = [n for k in "BI" if (n := f"{e.stage + 1}{k}{e.microbatch}") in ended]
        elif e.kind == "W":
            needs = [f"{e.stage}I{e.microbatch}"]
        assert len(needs) == {"F": e.stage > 0, "W": 1}.get(e.kind, e.stage < last)
        there = ended if e.kind == "W" else ended | came  # W follows I on its rank; the others wait for a message
        assert all(there[n] <= e.start + 1e-9 for n in needs)
        assert e.kind not in "BI" or ended[f"{e.stage}F{e.microbatch}"] <= e.start


@SMALL
@given(cases(), st.data())
def test_a_longer_stage_never_shortens_the_step(case, data):
    _, stages, *_ = case
    at = data.draw(st.integers(0, len(stages) - 1))
    s = stages[at]
    field = data.draw(st.sampled_from(["forward", "backward_input", "backward_weight", "activation_bytes"]))
    values = {f: getattr(s, f) for f in ("forward", "backward_input", "backward_weight", "activation_bytes")}
    values[field] += data.draw(st.integers(1, 9))
    longer = [*stages[:at], StageCosts(**values), *stages[at + 1 :]]
    before, after = simulated(case), simulated(case, longer)
    assert after.seconds >= before.seconds - 1e-9
    assert after.in_flight == before.in_flight, "the order alone decides"


@SMALL
@given(cases())
def test_more_microbatches_never_shorten_the_step(case):
    name, stages, microbatches, links = case
    double = simulated((name, stages, 2 * microbatches, links))
    assert double.seconds >= simulated(case).seconds - 1e-9


@SMALL
@given(cases())
def test_the_peak_is_the_most_at_any_time(case):
    """Counted again, at the middle of every stretch in which nothing changes."""
    own = case[1]
    stages = [StageCosts(s.forward + 1, s.backward + 1, 1, s.saved_bytes, temporary_bytes=2) for s in own]
    run = simulated(case, stages)
    moments = np.unique(np.concatenate([run.starts, run.ends]))
    moments = (moments[1:] + moments[:-1]) / 2
    for rank in range(run.ranks):
        live = np.zeros(len(moments), int)
        events = [event for event in run.timeline if event.rank == rank]
        frees = {(e.stage, e.microbatch): e.end for e in events if e.kind in "BW"}
        for e in events:
            live[(moments > e.start) & (moments < e.end)] += 2
            if e.kind == "F":
                live[(moments > e.start) & (moments < frees[e.stage, e.microbatch])] += stages[e.stage].saved_bytes
        assert run.peaks[rank] == live.max()


# What is refused


@pytest.mark.parametrize("field", ["forward", "backward_input", "backward_weight", "saved_bytes", "gradient_bytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1", None, True])
def test_costs_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(ScheduleError) as caught:
        StageCosts(**{"forward": 1, "backward_input": 1, field: value})
    assert caught.value.code == "SK332" and caught.value.reason == f"{field} is {value!r}"


def test_bytes_are_whole():
    with pytest.raises(ScheduleError, match="saved_bytes is 1.5"):
        StageCosts(1, 1, saved_bytes=1.5)
    with pytest.raises(ScheduleError, match="deferred_bytes is -1"):
        StageCosts(1, 1, saved_bytes=1, deferred_bytes=-1)
    stage = StageCosts(np.float32(1), 1, saved_bytes=np.int32(3))
    assert simulate_schedule([stage], "gpipe", 1).peaks == (3,)


@pytest.mark.parametrize(
    "arguments, options, reason",
    [
        (([], "1f1b", 8), {}, "stages are []"),
        (([(1, 2)], "1f1b", 8), {}, "stages are [(1, 2)]"),
        (([EQUAL], "1f1b"), {}, "the number of microbatches is not given"),
        (([EQUAL] * 2, "1f1b", 1), {}, "1F1B of 2 stages and 1 microbatches"),
        (([EQUAL] * 3, "zbv", 8), {}, "ZBVZeroBubble of 3 stages puts two on each rank"),
        (([EQUAL] * 2, "1f1b", 2), {"devices": ["cuda:0"]}, "1 devices for 2 ranks"),
        (([EQUAL] * 2, own_order(["0F0 0B0"], "mine")), {}, "mine has 1 stages, not 2"),
        (([EQUAL], own_order(["0F0 0B0"], "mine"), 2), {}, "mine has 1 microbatches, not 2"),
        (([EQUAL], own_order(["0F0 0B0"], "mine")), {"ranks": 2}, "mine has 1 ranks, not 2"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, options, reason):
    with pytest.raises(ScheduleError) as caught:
        simulate_schedule(*arguments, **options)
    assert caught.value.code == "SK330" and reason in caught.value.reason and caught.value.remedy


# What a run shows


@pytest.fixture
def run():
    stages = [StageCosts(1e-3, 1e-3, 1e-3, 1 << 20, None, 1 << 10, None, 0, 1 << 21) for _ in range(4)]
    return simulate_schedule(stages, "zbv", 4, links=Links.uniform(1e6))


def test_the_trace_is_what_chrome_reads(run):
    trace = json.loads(json.dumps(run.to_chrome_trace()))
    events = trace["traceEvents"]
    work = [e for e in events if e["ph"] == "X" and e["cat"] != "transfer"]
    assert len(work) == len(run.timeline) == 2 * 2 * 4 * 3
    for e, event in zip(work, run.timeline, strict=True):
        assert (e["name"], e["pid"], e["tid"]) == (event.action, event.rank, 0)
        assert (e["ts"], e["dur"]) == pytest.approx((event.start * 1e6, (event.end - event.start) * 1e6))
        assert e["args"] == {"stage": event.stage, "microbatch": event.microbatch}
    sent = [e for e in events if e["ph"] == "X" and e["cat"] == "transfer"]
    assert len(sent) == len(run.transfers) == 2 * 2 * 4 and {e["args"]["bytes"] for e in sent} == {1 << 10}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "compute", (1, 0): "compute", (0, 2): "to rank 1", (1, 1): "to rank 0"}
    assert {(e["pid"], e["tid"]) for e in work + sent} == set(names)


def test_the_run_as_data(run):
    data = json.loads(json.dumps(run.to_dict()))
    assert data["schedule"] == "ZBVZeroBubble" and data["microbatches"] == 4 and data["seconds"] == run.seconds
    assert [rank["stages"] for rank in data["ranks"]] == [[0, 3], [1, 2]]
    assert [rank["memory"]["peak"] for rank in data["ranks"]] == list(run.peaks)
    assert data["peak"] == max(run.peaks) == run.peaks[data["limiting_rank"]]
    parts = data["ranks"][0]["memory"]
    assert parts["peak"] == sum(parts[part] for part in parts if part not in ("peak", "seconds"))


def test_the_run_as_text(run):
    lines = str(run).splitlines()
    assert lines[0].startswith("ZBVZeroBubble of 4 stages on 2 ranks, 4 microbatches: step ")
    assert lines[1].split() == [
        "rank",
        "stages",
        "busy",
        "bubble",
        "in",
        "flight",
        *("peak", "fixed", "saved", "messages", "temporaries"),
    ]
    assert len(lines) == 4 and lines[2].split()[:4] == ["0", "0,3", "24", "ms"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_memory_over_time_keeps_the_most_of_each_moment():
    """Backward takes no time: at second 2 both start and end, each with 3 bytes besides, and then nothing is left."""
    run = simulate_schedule([StageCosts(1, 0, saved_bytes=10, temporary_bytes=3, parameter_bytes=100)], "gpipe", 2)
    assert memory_over_time(run) == (((0, 113), (1, 123), (2, 123), (2, 100)),)


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        (["0F0 0B0", "1F0 1F1 1B0 1B1"], "1F1 for 0F1"),
        (["0F0 0B0 0B1", "1F0 1B0"], "0B1 for 1B1"),
        (["0F0 0I0 0W0 0W1", "1F0 1B0"], "0W1 for 0I1"),
        (["0F0 0B0", "1F0 1B0 1B1"], "1B1 for 1F1"),
    ],
)
def test_an_order_that_waits_for_what_no_rank_runs_is_refused_by_its_name(ranks, missing):
    with pytest.raises(ScheduleError, match=f"SK331.*waits at {missing} that no rank runs"):
        simulate_schedule([EQUAL] * 2, own_order(ranks))
