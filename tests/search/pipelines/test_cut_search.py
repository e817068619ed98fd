"""`CutSearch` against brute force over all cuts and all choices of recompute."""

from __future__ import annotations

import pytest
from pipelinegraphs import brute_force, random_joint

from splitkit.errors import NoPlanError
from splitkit.policies import Pipeline

CASES = [(seed, memory) for seed in range(6) for memory in (None, 0.95, 0.85, 0.75)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_stages_are_as_good_as_brute_force_says(seed, schedule):
    flow, costs = random_joint(seed, ops=4)
    free = Pipeline(2, schedule, 3).assign(flow, costs)
    whole = peak(flow, costs, free)
    for share in (None, 0.95, 0.85, 0.75):
        memory = None if share is None else int(whole * share)
        best, count = brute_force(flow, costs, 2, schedule, 3, memory)
        assert count > 8
        try:
            plan = Pipeline(2, schedule, 3, memory).assign(flow, costs)
        except NoPlanError:
            assert best == float("inf")
            continue
        print(seed, schedule, share, best, plan.claim.value, plan.claim.bound, plan.claim.optimal)
        assert plan.claim.value >= best - 1e-9
        assert plan.claim.bound <= best * (1 + 1e-12)
        assert not plan.claim.optimal or plan.claim.value == pytest.approx(best)


def peak(flow, costs, plan):
    from splitkit.units import read_size

    return read_size(plan.note.split("peak ")[1].split(" (")[0])
