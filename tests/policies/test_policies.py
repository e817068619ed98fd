"""Properties of single policies; test_laws.py checks the laws of all."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit import policies
from splitkit.errors import NoPlanError, PolicyError
from splitkit.plans.parts import PARENT
from splitkit.policies import ByDevice, ByName, Random, RoundRobin, Stages


def mlp(depth=4, width=8):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
    return sk.capture(model, torch.ones(2, width))


@pytest.mark.parametrize("name", policies.__all__)
def test_policies_are_frozen_dataclasses_with_a_docstring(name):
    policy = getattr(policies, name)
    assert dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen
    assert policy.__doc__ and policy.assign.__doc__


@pytest.mark.parametrize("policy", [RoundRobin, Stages, Random])
@pytest.mark.parametrize("n", [0, -1, 2.5, "3", True])
def test_a_count_that_makes_no_sense(policy, n):
    with pytest.raises(PolicyError, match=rf"(?s)SK302: {policy.__name__}\(n=.*whole number >= 1"):
        policy(n)


def test_stages_are_as_even_as_can_be_and_use_the_given_costs(chain):
    class Costs:
        def __init__(self, seconds):
            self.by_name = seconds

        def seconds(self, node):
            return self.by_name[node.name]

        def nbytes(self, node):
            return 1

    flow = sk.analyze(chain)
    for seconds, stages in [
        ({"add": 1, "mul": 1, "sub": 2}, [0, 0, 1]),
        ({"add": 2, "mul": 1, "sub": 1}, [0, 1, 1]),
        ({"add": 0, "mul": 0, "sub": 0}, [0, 1, 1]),
    ]:
        plan = Stages(2).assign(flow, Costs(seconds))
        assert [plan.home(n) for n in flow.nodes] == stages
    assert (
        "Slowest: stage 0, 2 s, 0 % above the mean. No plan is faster"
        in Stages(2).assign(flow, Costs({"add": 2, "mul": 1, "sub": 1})).note
    )


def test_stages_break_ties_by_the_bytes_that_cross():
    class Model(nn.Module):
        def forward(self, x):
            wide = x.repeat(1, 8)
            narrow = wide.sum(1)
            return narrow.sin()

    gm = sk.capture(Model(), torch.ones(4, 4))
    flow = sk.analyze(gm)
    plan = Stages(2).assign(flow, sk.costs.unit(gm))
    assert [plan.home(n) for n in flow.nodes] == [0, 0, 1], "unit costs leave 1|2 and 2|1; the second sends less"


def test_more_stages_than_nodes(chain):
    with pytest.raises(NoPlanError, match=r"(?s)SK303: 4 parts.*only 3 nodes.*at most 3"):
        Stages(4).assign(sk.analyze(chain), sk.costs.unit(chain))
    with pytest.raises(NoPlanError, match=r"(?s)SK303.*computes something"):
        Stages(1).assign(sk.analyze(fx.symbolic_trace(nn.Identity())), sk.costs.unit(chain))


def test_round_robin_deals_in_turn(chain):
    plan = RoundRobin(2).assign(sk.analyze(chain), sk.costs.unit(chain))
    assert [key for keys in plan.values() for key in keys] == [(0, 0), (1, 1), (0, 2)]


def test_by_name_takes_the_first_pattern_that_matches_a_module_or_one_around_it():
    gm = mlp()
    plan = ByName({"2.0": "special", "[0-2]": "front", "*": "back"}).assign(sk.analyze(gm), sk.costs.unit(gm))
    assert [plan.home(n) for n in sk.analyze(gm).nodes] == ["front"] * 4 + ["special", "front"] + ["back"] * 2


def test_by_name_leaves_the_rest_in_the_host_and_works_on_called_modules():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    flow = sk.analyze(gm)
    plan = ByName({"0": 7}).assign(flow, sk.costs.unit(gm))
    assert [plan.home(n) for n in flow.nodes] == [7, PARENT]


def test_by_name_refuses_a_pattern_that_matches_nothing_and_names_what_is_near():
    gm = mlp()
    with pytest.raises(PolicyError, match=r"(?s)SK304: the pattern '3\.9' matches no module.*3\.0"):
        ByName({"3.9": 0}).assign(sk.analyze(gm), sk.costs.unit(gm))


def test_by_device_follows_the_rule_and_tells_parts_their_device():
    gm = mlp()
    flow = sk.analyze(gm)
    order = {n: i for i, n in enumerate(flow.nodes)}
    rule = {0: "cuda:1", 1: torch.device("cpu"), 2: None, 3: "cuda:1"}
    plan = ByDevice(lambda n: rule[order[n] // 2]).assign(flow, sk.costs.unit(gm))
    assert [(k, p.device) for k, p in plan.parts.items()] == [
        (("cuda:1", 0), torch.device("cuda:1")),
        (("cpu", 1), torch.device("cpu")),
        (("cuda:1", 2), torch.device("cuda:1")),
    ]
    assert plan.home(flow.nodes[4]) is PARENT


@pytest.mark.parametrize("answer", ["gpu7", 3.5])
def test_by_device_refuses_what_is_no_device(chain, answer):
    with pytest.raises(PolicyError, match="SK302: the rule puts add on"):
        ByDevice(lambda n: answer).assign(sk.analyze(chain), sk.costs.unit(chain))


def test_random_plans_differ_by_seed_and_only_by_it():
    gm = mlp()
    flow, costs = sk.analyze(gm), sk.costs.unit(gm)
    assert Random(3, seed=1).assign(flow, costs) == Random(3, seed=1).assign(flow, costs)
    assert Random(3, seed=1).assign(flow, costs) != Random(3, seed=2).assign(flow, costs)
