"""`Budget(offload=)`: against every way to keep, offload or recompute, and against either choice alone."""

from __future__ import annotations

import pytest
import torch
from campaigns import few_of_many
from hypothesis import strategies as st
from offloadgraphs import EveryWay, chained
from torch import nn

import splitkit as sk
from splitkit.costs import Link, Links, roofline
from splitkit.errors import CostError, NoPlanError, PolicyError
from splitkit.policies import Budget, SaveAll
from splitkit.search.recompute.offload_planner import OffloadBound
from splitkit.search.recompute.offload_search import OffloadSearch
from splitkit.search.recompute.plan_pool import Pool
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.peaks import eager_plan

HOSTS = (float("inf"), 6 * 1024.0)


def searched(every, budget, host):
    """What the search finds, and the pool of its plans."""
    pool = Pool(every.problem, every.peaks)
    whole = pool.see_plan(eager_plan(every.problem.flow))
    return OffloadSearch(RecomputeSearch(pool), every.model, host).best(budget, whole), pool


def check(seed, share, host):
    """A search against the oracle: the optimum lies between its bound and its value."""
    every = EveryWay(*chained(seed))
    budget = every.budgets(4)[share]
    least = every.least(budget, host)
    found, pool = searched(every, budget, host)
    assert (found.seconds if found else float("inf")) >= least - 1e-9
    bound = OffloadBound(every.model, pool, budget, host).seconds(2 * least + 1) if found else least
    assert bound <= least + 1e-9
    return every, budget, least, found


@few_of_many(6, 400, st.integers(0, 10**6), st.integers(0, 4), st.sampled_from(HOSTS))
def test_no_way_is_better(seed, share, host):
    check(seed, share, host)


@pytest.mark.parametrize("seed", [4, 6, 8, 13, 36])
@pytest.mark.parametrize("share", [0, 1])
def test_the_bound_counts_what_the_link_carries(seed, share):
    """A bound with half of the time of the link, or without the seconds in which a step waits, is above the optimum."""
    every = EveryWay(*chained(seed, late=0.0))
    budget = every.budgets(4)[share]
    least = every.least(budget)
    bound = OffloadBound(every.model, every.pool, budget).seconds(2 * least + 1)
    assert 0 <= bound <= least + 1e-9


@pytest.mark.parametrize("seed", [10, 54])
def test_the_third_choice_is_worth_something(seed):
    every, budget, least, found = check(seed, 1, HOSTS[0])
    assert found.seconds == pytest.approx(least)
    assert least < min(every.least(budget, host=0), every.least(budget, recompute=False))


class Mlp(nn.Module):
    """Layers of one width with a pointwise op between."""

    def __init__(self, layers=5, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    joint = sk.capture_joint(Mlp(), torch.randn(256, 64))
    return joint, roofline(joint.graph_module, "h100")


def taken(plan):
    return plan.claim.value


def largest_first(timeline, budget):
    """Return the run that offloads the largest values until the budget is kept, and nothing else is decided."""
    order = sorted(timeline.values, key=lambda item: (-int(timeline.trace.nbytes[item]), item))
    count = next((few for few in range(len(order) + 1) if timeline.fits(order[:few], budget)), None)
    transfers = None if count is None else timeline.transfers(order[:count], budget)
    return None if transfers is None else timeline.run(transfers)


@pytest.mark.parametrize("link", [5e9, 50e9, 500e9])
def test_never_above_either_choice_alone(step, link):
    joint, costs = step
    every = EveryWay.of_plan(joint.flow, costs, link)
    whole = simulated(joint.split(SaveAll())).peak
    for share in (0.5,):
        budget = Budget(share).assign(joint.flow, costs)
        limit = simulated(joint.split(budget)).peak
        both = joint.split(Budget(limit, offload=link), costs)
        assert simulated(both).peak <= limit < whole
        alone = recompute_seconds(joint, Budget(limit), costs)
        largest = largest_first(every, limit)
        assert taken(both.plan) <= alone + 1e-12
        assert largest is None or taken(both.plan) <= largest.exposed
        assert both.plan.claim.bound <= taken(both.plan) and "recompute and waiting" in str(both.plan.claim)


def simulated(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


def recompute_seconds(joint, policy, costs):
    plan = policy.assign(joint.flow, costs)
    return sum(costs.seconds(n) for n in joint.flow.nodes if len(plan[n]) == 2)


def test_below_the_lowest_peak_of_recompute(step):
    joint, costs = step
    lowest = simulated(joint.split(Budget("least"), costs)).peak
    with pytest.raises(NoPlanError, match="SK303"):
        joint.split(Budget(lowest - 1000), costs)
    pair = joint.split(Budget(lowest - 1000, offload="pcie5"), costs)
    assert simulated(pair).peak <= lowest - 1000 and pair.host_bytes
    with pytest.raises(NoPlanError, match=r"Budget\((\d+), offload='pcie5'\)") as refused:
        joint.split(Budget(1000, offload="pcie5"), costs)
    nearest = refused.value.nearest
    assert simulated(joint.split(nearest, costs)).peak == 1000 + refused.value.excess


def test_the_host_has_room_for_so_much(step):
    joint, costs = step
    free = joint.split(Budget(0.4, offload=5e9), costs)
    room = free.host_bytes // 2
    tight = joint.split(Budget(0.4, offload=5e9, host=room), costs)
    assert free.host_bytes > 0 and tight.host_bytes <= room and taken(tight.plan) >= taken(free.plan)


@pytest.mark.parametrize("link", ["pcie5", 50e9, Link(50e9), Links.preset("nvlink4")])
def test_links_in_all_forms(link):
    assert Budget("2GiB", offload=link).offload is link
    given = Links(pairs={("device", "host"): Link(1e9), ("host", "device"): Link(2e9)})
    assert Budget("2GiB", offload=given)


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        ({"offload": "pcie9"}, "SK322", "no link is called 'pcie9'"),
        ({"offload": 0}, "SK322", "bandwidth is 0"),
        ({"offload": Links()}, "SK322", "no link from device to host"),
        ({"offload": "pcie5", "host": 0}, "SK302", "a host without memory"),
        ({"offload": "pcie5", "host": "much"}, "SK302", "host"),
        ({"host": "8GiB"}, "SK302", "no link to it"),
        ({"offload": "pcie5", "of": "saved"}, "SK302", "of='saved'"),
        ({"offload": "pcie5", "budget": "least"}, "SK302", "budget='least'"),
    ],
)
def test_refusals(given, code, reason):
    with pytest.raises((CostError, PolicyError), match=code) as refused:
        Budget(**{"budget": "2GiB", **given})
    assert reason in str(refused.value)


def test_prices_must_be_seconds(step):
    with pytest.raises(PolicyError, match="SK302.*prices are"):
        step[0].split(Budget(0.5, offload="pcie5"))
