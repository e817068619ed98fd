"""Memory of stages: every limit that some plan meets is met, and refusals name one that can be met."""

from __future__ import annotations

import re

import pytest
from leastmemory import captured, cases, least_memory, peaks_of

import splitkit as sk
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import Stages

SHORT = [
    ("chain", 8, 4, 2, None),
    ("branches", 8, 4, 2, None),
    ("tied", 8, 4, 3, "1f1b"),
    ("relus", 32, 64, 2, "gpipe"),
]
"""Each schedule, either number of stages, and either size; others take as much memory for more of the same."""
ALL = [pytest.param(*case, marks=() if case in SHORT else pytest.mark.campaign) for case in cases()]


def peak_of(gm, costs, plan, count, schedule):
    """Return the greatest peak, by definition."""
    flow = sk.analyze(gm)
    parts = [[n for n in flow.nodes if plan.home(n) == part] for part in range(count)]
    return max(peaks_of(StagePrices(flow, sk.costs.training(costs, gm)), parts, schedule, 2 * count))


@pytest.mark.parametrize(("kind", "width", "batch", "count", "schedule"), ALL)
def test_what_fits_is_found_and_what_is_named_fits(kind, width, batch, count, schedule):
    gm, costs = captured(kind, width, batch)
    least, _ = least_memory(gm, costs, count, schedule)
    asked = {"schedule": schedule, "microbatches": 2 * count if schedule else None, "optimizer": "adam"}
    for factor in (1, 1.05):
        memory = int(least * factor)
        plan = sk.plan(gm, Stages(count, memory=memory, **asked), costs)
        assert peak_of(gm, costs, plan, count, schedule) <= memory
    with pytest.raises(sk.errors.NoPlanError, match="SK303") as refused:
        sk.plan(gm, Stages(count, memory=least - 1, **asked), costs)
    lowest = sk.plan(gm, Stages(count, memory="least", **asked), costs)
    assert peak_of(gm, costs, lowest, count, schedule) == least
    named = int(re.search(r"Give (\d+) bytes", refused.value.remedy)[1])
    assert least <= named <= 1.02 * least
    sk.plan(gm, Stages(count, memory=named, **asked), costs)
