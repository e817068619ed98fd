"""What stages pay for messages and copies at least: never more than the best of all plans."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from campaigns import few_of_many
from copiedgraphs import cases, joined, loads, one_link, plans_of
from hypothesis import strategies as st
from placedgraphs import Prices

import splitkit as sk
from splitkit.costs import Link, Links
from splitkit.policies import Stages
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.traffic_bounds import least_load, least_without_units, with_copies
from splitkit.solvers.placement.problem import Slot
from splitkit.solvers.placement.solution import loads as loads_of

NEAR = 1 + 1e-9


def placing_of(flow, costs):
    return PlacementModel(flow, costs, [{n: costs.seconds(n) for n in flow.nodes}], repeat=True)


@few_of_many(25, 400, cases(least=1, most=3), one_link(), st.integers(2, 3))
def test_no_plan_is_below_the_least_load(case, links, stages):
    gm, costs = case
    flow = sk.analyze(gm)
    placing = placing_of(flow, costs)
    units, travel = set(placing.units), TransferTimes.over(links, range(stages), training=False)
    best = {True: np.inf, False: np.inf}  # by whether each stage has units
    for places, home in plans_of(flow, placing.shared, stages):
        filled = len({home[n] for n in units}) == stages
        best[filled] = min(best[filled], max(loads(flow, costs, links, places, home, stages)))
    assert least_load(placing, travel, stages) <= min(best.values()) * NEAR
    assert least_without_units(placing, travel) <= best[False] * NEAR


@few_of_many(25, 400, cases(least=1, most=3), one_link(), st.integers(2, 3))
def test_nets_of_copies_cost_no_stage_more_than_it_pays(case, links, stages):
    gm, costs = case
    flow = sk.analyze(gm)
    placing = placing_of(flow, costs)
    travel = TransferTimes.over(links, range(stages), training=False)
    problem = with_copies(placing.problem([Slot()] * stages, travel), placing, travel)

    @cache
    def least(device):
        return loads_of(problem, np.array(device))

    for places, home in plans_of(flow, placing.shared, stages):
        paid = np.array(loads(flow, costs, links, places, home, stages))
        assert (least(tuple(home[n] for n in placing.units)) <= paid * NEAR + 1e-12).all()


@few_of_many(8, 200, cases(least=3, most=3), one_link())
def test_no_three_stages_are_below_the_claim(case, links):
    gm, costs = case
    flow = sk.analyze(gm)
    plans = plans_of(flow, placing_of(flow, costs).shared, 3)
    best = min(max(loads(flow, costs, links, places, home, 3)) for places, home in plans)
    claim = sk.plan(gm, Stages(3, links=links), costs).claim
    assert claim.bound <= best * NEAR and claim.value >= best / NEAR


PAIR = [(0, 0), (1, 2), (1, 2)]
"""x + x, which may be copied, and two sums that read it and nothing of each other."""


def pieces_of(reads, outputs, seconds, link, nbytes=4):
    gm, nodes = joined(reads, outputs)
    costs = Prices({n.name: price for n, price in zip(nodes, seconds, strict=True)}, nbytes)
    placing = placing_of(sk.analyze(gm), costs)
    return placing, TransferTimes.over(Links(link), (0, 1), training=False)


def test_a_stage_without_units_sends():
    placing, _ = pieces_of(PAIR, [3, 4], [0.5, 1.0, 2.0], Link(4.0, 3.0))
    assert [n.name for n in placing.shared] == ["add"]
    travel = TransferTimes.over(Links(Link(4.0, 3.0)), (0, 1), training=True)
    assert least_without_units(placing, travel) == pytest.approx(2 * (3.0 + 4 / 4.0))
    one_rank = TransferTimes.over(Links(Link(4.0, 3.0)), (0, 0), training=False)
    assert least_without_units(placing, one_rank) == 0.0, "parts of one rank send each other for nothing"


def test_a_stage_without_units_may_be_there_for_the_output():
    placing, travel = pieces_of(PAIR, [2, 3, 4], [0.5, 1.0, 2.0], Link(1e9, 1.0))
    assert placing.shared and least_without_units(placing, travel) == 0.0


def test_without_shared_nodes_every_stage_has_units():
    placing, travel = pieces_of([(1, 0), (2, 0)], [3], [1.0, 1.0], Link(1e9, 1.0))
    assert least_without_units(placing, travel) == np.inf
