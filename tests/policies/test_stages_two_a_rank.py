"""Two stages per rank: claims, bounds and memory, compared with all plans of four stages on two ranks."""

from __future__ import annotations

from itertools import product

import pytest
from leastmemory import KINDS, captured, every_plan

import splitkit as sk
from splitkit.pipeline.purpose import ranks_of
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import Stages

LINK = sk.costs.Link(1e9, 2e-6)
LINKS = {"free": None, "nvlink4": sk.costs.Links.preset("nvlink4"), "slow": sk.costs.Links(LINK)}
CASES = list(product(["interleaved-1f1b", "zbv"], KINDS, [(8, 4), (32, 64)], LINKS))
SHORT = [("zbv", "chain", (8, 4), "free"), ("interleaved-1f1b", "tied", (32, 64), "slow")]
ALL = [pytest.param(*case, marks=() if case in SHORT else pytest.mark.campaign) for case in CASES]
TOLERANCE = 1e-9


def most_loaded(flow, costs, places, links, rank_of):
    """Return the bottleneck by definition, from the parts of each node, its home first."""
    loads = [0.0] * len(rank_of)
    for node in flow.nodes:
        for part in places[node]:
            loads[part] += costs.seconds(node)
    for value in flow.index if links else ():
        maker = flow.producer(value)
        if maker not in places:
            continue
        home = places[maker][0]
        readers = {part for user in value.users if user in places for part in places[user]} - set(places[maker])
        wait, speed = links.to_arrays([0, 1])
        paid = {
            reader: 2 * float(wait[0, 1] + costs.nbytes(value) / speed[0, 1]) * (rank_of[reader] != rank_of[home])
            for reader in readers
        }
        for reader, price in paid.items():
            loads[reader] += price
        loads[home] += max(paid.values(), default=0.0)
    return max(sum(load for load, of in zip(loads, rank_of, strict=True) if of == rank) for rank in (0, 1))


@pytest.mark.parametrize(("schedule", "kind", "sizes", "link"), ALL)
def test_claims_of_two_stages_a_rank_are_what_all_plans_say(schedule, kind, sizes, link):
    """The value is right and nearly the least, no plan is below the bound, and a limit that can be met is met."""
    gm, plain = captured(kind, *sizes)
    flow, costs, links = sk.analyze(gm), sk.costs.training(plain, gm), LINKS[link]
    rank_of = ranks_of(schedule, 8, 4)
    assert sorted(rank_of) == [0, 0, 1, 1]
    prices = StagePrices(flow, costs, divided=schedule == "zbv")

    def peak(parts):
        return max(sk.simulate_schedule(prices.of(parts), schedule, 8, links=links).peaks)

    values, peaks = [], []
    for stages in every_plan(flow, 4):
        at = dict(zip(flow.nodes, stages, strict=True))
        values.append(most_loaded(flow, costs, {n: (part,) for n, part in at.items()}, links, rank_of))
        peaks.append(peak([[n for n in flow.nodes if at[n] == part] for part in range(4)]))
    asked = {"schedule": schedule, "microbatches": 8, "links": links}
    plan = sk.plan(gm, Stages(4, tolerance=0, **asked), plain)
    value = most_loaded(flow, costs, plan.places, links, rank_of)
    assert plan.claim.value == pytest.approx(value, rel=TOLERANCE)
    assert plan.claim.bound <= min(*values, value) * (1 + TOLERANCE)
    assert value <= 1.02 * min(values)  # by the ranks' loads; by the stages', it was 1.22 times the least
    least = min(peaks)
    for memory in (least, "least"):
        plan = sk.plan(gm, Stages(4, memory=memory, **asked), plain)
        fitting = [value for value, its in zip(values, peaks, strict=True) if its <= least]
        assert peak(plan) <= least and plan.claim.bound <= min(fitting) * (1 + TOLERANCE)
    with pytest.raises(sk.errors.NoPlanError, match="SK303"):
        sk.plan(gm, Stages(4, memory=least - 1, **asked), plain)
