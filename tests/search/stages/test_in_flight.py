"""`InFlight` against the microbatches that stages hold along each order of actions."""

from __future__ import annotations

import pytest
from ownorders import own_order

from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.stages.candidate_borders import InFlight


def most_held(order, stage, ends):
    """The most microbatches between a stage's forward and an action of the kinds ``ends``, and while backward runs."""
    row, now, most, late = order.ranks[order.rank_of[stage]], set(), 0, 0
    for of, kind, number in row:
        if of == stage:
            now |= {number} if kind == "F" else set()
            most = max(most, len(now))
            late = max(late, len(now) if kind in "BI" else 0)
            now -= {number} if kind in ends else set()
    return most, late


LATE = own_order(["0F0 0F1 0I0 0F2 0W0 0I1 0I2 0W1 0W2", "1F0 1I0 1F1 1W0 1I1 1W1 1F2 1I2 1W2"])


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 3), ("gpipe", 2), ("zbv", 4), ("interleaved-1f1b", 4), (LATE, 2)]
)
def test_numbers_are_those_of_the_order(schedule, stages):
    run = simulate_schedule([StageCosts(1.0, 1.0, 1.0)] * stages, schedule, 3 if schedule is LATE else 6)
    for surely in (False, True):
        found = InFlight.of(run, stages, surely=surely)
        for stage in range(stages):
            ends = "BI" if surely and stage else "BW"  # torch's first stage has no input part
            assert (found.forward[stage], found.backward[stage]) == most_held(run.order, stage, ends)
    of = run.order.rank_of
    assert found.handed.tolist() == [stage + 1 < stages and of[stage + 1] != of[stage] for stage in range(stages)]


def test_without_a_schedule_there_is_one_microbatch():
    found = InFlight.of(None, 2)
    assert found.forward.tolist() == found.backward.tolist() == [1, 1] and not found.handed.any()
