"""The orders of torch's schedules: read right, mended where torch's list is wrong, and refused with a remedy."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from ownorders import own_order
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from splitkit.errors import ScheduleError
from splitkit.pipeline.order import ACTION, Action, PipelineOrder
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named
from splitkit.pipeline.simulate import StageCosts, simulate_schedule

TORCHS = [schedule.name for schedule in known_schedules() if schedule.torch_class]
MANY = [schedule.name for schedule in known_schedules() if not schedule.is_single]
TORCHS_MANY = [name for name in TORCHS if name in MANY]


def texts(order):
    return [" ".join(map(str, actions)) for actions in order.ranks]


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (2, 4), (4, 8), (4, 12), (3, 7), (8, 16)])
def test_the_order_is_that_of_torchs_own_reader(name, ranks, microbatches):
    """`get_schedule_ops` works sends and receives out too, and runs mocks: slow, but torch's own."""
    local = 1 if name in ("GPipe", "1F1B") else 2
    try:
        order = pipeline_order(name, ranks * local, microbatches)
    except ScheduleError:
        assert (ranks, microbatches) == (3, 7) and "Interleaved" in name  # 2 rounds of 3.5
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            get_schedule_ops(name, ranks, microbatches, local)
        return
    torchs = get_schedule_ops(name, ranks, microbatches, local)
    for rank, (actions, theirs) in enumerate(zip(order.ranks, torchs, strict=True)):
        plain = [one for a in theirs if a is not None for one in a.sub_actions or (a,)]
        plain = [repr(a) for a in plain if not repr(a).endswith("REDUCE_GRAD")]
        if name == "1F1B" and rank == ranks - 1:
            continue  # its numbers are wrong: below
        assert [str(a) for a in actions] == plain


def test_torchs_list_of_1f1b_numbers_the_last_rank_wrongly():
    """So the order of 1F1B is not read off torch's class; what torch executes is right."""
    last = get_schedule_ops("1F1B", 4, 6)[3]
    assert repr(last[0]) == "3F1" and "3F6" in map(repr, last)
    lines = [" ".join(repr(a) for a in rank if ACTION.fullmatch(repr(a))) for rank in get_schedule_ops("1F1B", 4, 6)]
    with pytest.raises(ScheduleError, match="1F1B never ends") as caught:
        own_order(lines, "1F1B")
    assert "rank 2 waits at 2B0 for 3B0 of rank 3; rank 3 waits at 3B0 for 3F0 that no rank runs" in str(caught.value)
    assert texts(pipeline_order("1f1b", 4, 6))[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5"


def test_1f1b_warms_up_and_takes_turns():
    assert texts(pipeline_order("1F1B", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_v_schedules_put_the_first_and_the_last_stage_on_one_rank():
    assert pipeline_order("zbv", 8, 8).rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert pipeline_order("DualPipeV", 8, 8).rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert pipeline_order("interleaved-1f1b", 8, 8).rank_of == (0, 1, 2, 3, 0, 1, 2, 3)


def test_an_overlapped_pair_runs_forward_first():
    order = pipeline_order("DualPipeV", 4, 4)
    assert texts(order)[0] == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3"


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_no_order_deadlocks_whatever_the_numbers(name, ranks):
    fixed = schedule_named(name).stages_per_rank
    sizes = [1, 2, 3] if fixed is None else [fixed]
    for local in sizes:
        for microbatches in (1, 2, ranks, 2 * ranks, 2 * ranks + 1, 4 * ranks):
            if name == "DualPipeV" and microbatches < 2 * ranks:
                continue
            if "Interleaved" in name and microbatches % max(1, microbatches // ranks):
                continue
            order = pipeline_order(name, ranks * local, microbatches, ranks)
            assert order.microbatches == microbatches and len(order.rank_of) == ranks * local


@pytest.mark.parametrize("name", ["GPipe", "1f1b", "Looped-BFS", "zbv", "ZBVZeroBubble", "interleaved zero bubble"])
def test_names_are_torchs_in_any_spelling(name):
    order = pipeline_order(name, 2, 4)
    assert schedule_named(name).name == order.name and pipeline_order(name, 2, 4) is order, "read once"


@pytest.mark.parametrize(
    "arguments, reason, remedy",
    [
        (("1f2b", 4, 8), "no schedule is called '1f2b'", "Did you mean 1F1B? Known: GPipe, 1F1B, Eager1F1B"),
        ((None, 4, 8), "no schedule is called None", "Known: GPipe"),
        (("1F1B", 4, 3), "4 stages and 3 microbatches", "Use 4 microbatches or more"),
        (("DualPipeV", 8, 7), "8 stages and 7 microbatches", "Use 8 microbatches or more"),
        (("ZBV", 5, 8), "ZBVZeroBubble of 5 stages", "Split into 4 or 6 stages."),
        (("LoopedBFS", 5, 8), "LoopedBFS of 5 stages", "Split into 4 or 6 stages, or say how many ranks there are"),
        (("ZBV", 1, 8), "ZBVZeroBubble of 1 stages", "Split into 2 stages"),
        (("ZBV", 12, 8, 4), "12 stages", "split into 8 stages"),
        (("GPipe", 4, 8, 2), "on 2 ranks", "use 4 ranks"),
        (("LoopedBFS", 7, 8, 3), "on 3 ranks", "split into 6 or 9"),
        (("LoopedBFS", 2, 8, 3), "on 3 ranks", "split into 3"),
        (("Interleaved1F1B", 6, 7), "they do not go into 2 equal rounds", "Use 6 or 8 microbatches"),
        (("GPipe", 0, 8), "0 stages", "1 or more"),
        (("GPipe", 4, 2.0), "2.0 microbatches", "whole number"),
        (("GPipe", 4, True), "True microbatches", "whole number"),
    ],
)
def test_numbers_that_do_not_go_are_refused_with_some_that_do(arguments, reason, remedy):
    with pytest.raises(ScheduleError) as caught:
        pipeline_order(*arguments)
    assert caught.value.code == "SK330"
    assert reason in caught.value.reason and remedy in caught.value.remedy


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["0F0 0B0 0F0"], "rank 0 runs 0F0 twice"),
        (["0F0 0B0", "0F1 0B1"], "stage 0 is on ranks 0 and 1"),
        (["1F0 1B0"], "has stages [1]"),
        ([], "has stages []"),
        (["0F0 0B0 0F1"], "2 F, 1 B, 0 I, 0 W for 1 stages and 2 microbatches"),
        (["0F0 0I0"], "1 F, 0 B, 1 I, 0 W"),
        (["0F1 0B1"], "1 F, 1 B, 0 I, 0 W for 1 stages and 2 microbatches"),
        (["0B0 0F0"], "rank 0 waits at 0B0 for 0F0 of rank 0"),
        (["0F0 0W0 0I0"], "rank 0 waits at 0W0 for 0I0 of rank 0"),
        (["0F0 0W0 0B0"], "rank 0 waits at 0W0 for 0I0 that no rank runs"),
        (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1"),
        (
            ["0F0 0I0 0W0", "1W0 1F0 1I0"],
            "rank 0 waits at 0I0 for 1I0 of rank 1; rank 1 waits at 1W0 for 1I0 of rank 1",
        ),
    ],
)
def test_an_order_that_cannot_run_is_refused_and_says_who_waits_for_what(lines, reason):
    with pytest.raises(ScheduleError) as caught:
        own_order(lines)
    assert caught.value.code == "SK331" and reason in str(caught.value)


def test_an_action_that_is_none_is_refused():
    for action in (Action(0, "Z", 0), Action(0, "F", -1), Action(-1, "F", 0)):
        with pytest.raises(ScheduleError, match="is not an action"):
            PipelineOrder("mine", ((action,),))


def test_a_subclass_may_leave_out_sends_and_receives():
    """The private names that `torch_orders` stands on."""
    for name in TORCHS_MANY:
        made = schedules.get_schedule_class(name)
        assert made._prepare_schedule_with_comms is schedules._PipelineScheduleRuntime._prepare_schedule_with_comms
    for name in ("GPipe", "1F1B"):
        assert issubclass(schedules.get_schedule_class(name), schedules.PipelineScheduleSingle)
    action = schedules._Action(3, schedules._ComputationType.FORWARD, 5)
    assert (action.stage_index, action.computation_type.value, action.microbatch_index) == (3, "F", 5)
    assert action.sub_actions is None
    values = {kind.name: kind.value for kind in schedules._ComputationType}
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    assert letters.items() <= values.items()


@pytest.mark.skipif(not hasattr(schedules, "analyze_pipeline_activation_liveness"), reason="since torch 2.15")
@pytest.mark.parametrize("name", TORCHS_MANY)
def test_torchs_own_analysis_finds_as_many_in_flight(name):
    run = simulate_schedule([StageCosts(1, 1, 1)] * 8, name, 8)
    stages = [SimpleNamespace(group_rank=0, group_size=4, num_stages=8, submod=None) for _ in range(2)]
    made = schedules.get_schedule_class(name)(stages, 8)
    for rank, expected in enumerate(run.in_flight):
        mine = [stage for stage, owner in enumerate(run.order.rank_of) if owner == rank]
        found = schedules.analyze_pipeline_activation_liveness(
            made, pp_rank=rank, stage_indices=mine, granularity="stage_microbatch"
        )
        assert found.num_slots == expected


def test_simulating_an_order_of_ones_own_does_not_import_torch():
    code = """
import sys
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
order = PipelineOrder("mine", ((Action(0, "F", 0), Action(0, "B", 0)),))
assert simulate_schedule([StageCosts(1, 2)], order).seconds == 3
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
