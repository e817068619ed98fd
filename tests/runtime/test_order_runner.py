"""Which schedule of torch runs an order, and which orders go with a number of stages and ranks."""

from __future__ import annotations

import pytest
from ownorders import own_order

from splitkit.errors import ScheduleError
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import pipeline_order, schedule_named, schedule_of
from splitkit.runtime.ranks.order_runner import _forward, order_of, placed_order

MINE = own_order(["0F0 2F0 2B0 0B0", "1F0 1B0"], "1F1B")


def test_a_name_of_torchs_is_not_enough_to_run_torchs_schedule():
    assert schedule_of(MINE) is None
    assert schedule_of(own_order(["0F0 0B0"])) is None
    for name in ("1f1b", "zbv"):
        assert schedule_of(pipeline_order(name, 4, 4)) is schedule_named(name)
    swapped = PipelineOrder("GPipe", pipeline_order("1f1b", 2, 4).ranks)
    assert schedule_of(swapped) is None


def test_an_order_says_how_many_microbatches_there_are():
    assert order_of(MINE, 3, None, 2) is MINE is order_of(MINE, 3, 1, 2)
    assert order_of("1f1b", 2, 8, 2).microbatches == 8


@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "reason"),
    [
        (4, None, 2, "has 3 stages, not 4"),
        (3, 8, 2, "has 1 microbatches, not 8"),
        (3, None, 3, "has 2 ranks, not 3"),
    ],
)
def test_an_order_for_other_numbers_is_refused(stages, microbatches, ranks, reason):
    with pytest.raises(ScheduleError, match=reason) as caught:
        order_of(MINE, stages, microbatches, ranks)
    assert caught.value.code == "SK330" and f"{ranks} ranks, {stages} stages" in caught.value.remedy


def test_a_rank_without_a_stage_is_refused():
    with pytest.raises(ScheduleError, match="rank 1 of custom has no stage") as caught:
        order_of(own_order(["0F0 0B0", ""]), 1, None, 2)
    assert "start 1 processes" in caught.value.remedy


def test_a_refusal_counts_the_ranks_of_each_pipeline():
    """ "On 2 ranks" was no help to one who had started 4 processes with ``--dp 2``."""
    with pytest.raises(ScheduleError, match="on 2 ranks, in each of 2 pipelines") as caught:
        placed_order("1f1b", 2, 4, 8, 4)
    assert caught.value.code == "SK330" and "use 4 ranks, or split into 2 stages" in caught.value.remedy


def test_a_forward_pass_alone_keeps_the_stages_of_a_rank_in_order_and_gives_torch_backward_actions_to_drop():
    order = own_order(["0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 1B0 1F1 1B1"])
    assert " ".join(map(str, _forward(order.ranks[0]))) == "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1"
