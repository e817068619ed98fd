"""`Pipeline(offload=)` against brute force over all cuts and all ways to keep, recompute or offload."""

from __future__ import annotations

import pytest
from campaigns import these_first
from pipelinegraphs import brute_force_offload, random_joint

from splitkit.costs import Link, Links
from splitkit.costs.links import HostLink
from splitkit.errors import NoPlanError
from splitkit.policies import Pipeline

CASES = [(seed, schedule) for seed in range(40) for schedule in ("gpipe", "zbv", "v-half")]
FIRST = [(0, "gpipe")]


def both(bandwidth):
    """A link to the host and a faster one back."""
    there, back = Link(bandwidth, 0.1), Link(2 * bandwidth)
    return Links(pairs={("device", "host"): there, ("host", "device"): back})


def planned(flow, costs, *given, **words):
    try:
        return Pipeline(*given, **words).assign(flow, costs)
    except NoPlanError:
        return None


@pytest.mark.parametrize(("seed", "schedule"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_steps_are_as_short_as_brute_force_says(seed, schedule):
    flow, costs = random_joint(seed, ops=4)
    free = Pipeline(2, schedule, 5)
    whole = max(free.found(free.problems(flow, costs)).run.peaks)
    with pytest.raises(NoPlanError) as refusal:
        Pipeline(2, schedule, 5, 1).assign(flow, costs)
    enough = 1 + refusal.value.excess
    for memory in (enough * 6 // 7, enough + (whole - enough) // 3):
        for bandwidth, host in ((512.0, None), (4096.0, 8 * 1024)):
            links = both(bandwidth)
            alone = planned(flow, costs, 2, schedule, 5, memory)
            plan = planned(flow, costs, 2, schedule, 5, memory, offload=links, host=host)
            assert plan is not None or alone is None
            if plan is None:
                continue
            best = brute_force_offload(flow, costs, 2, schedule, 5, memory, HostLink.of(links), host)
            assert plan.claim.bound * (1 - 1e-9) <= best <= plan.claim.value + 1e-9
            assert alone is None or plan.claim.value <= alone.claim.value
            assert not plan.claim.optimal or plan.claim.value == pytest.approx(best)


def test_the_third_choice_is_worth_something():
    flow, costs = random_joint(4, ops=4)
    free = Pipeline(2, "gpipe", 5)
    whole = max(free.found(free.problems(flow, costs)).run.peaks)
    memory = whole * 17 // 20
    alone = planned(flow, costs, 2, "gpipe", 5, memory)
    plan = planned(flow, costs, 2, "gpipe", 5, memory, offload=4096.0)
    assert plan.offloaded and plan.claim.value < alone.claim.value
    assert "wait on the host, where a rank has " in plan.note
