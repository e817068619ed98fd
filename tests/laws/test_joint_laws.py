"""Every policy of training steps on every small model keeps every law."""

from __future__ import annotations

import json
from functools import cache

import pytest
from campaigns import some_of_all, these_first
from jointmodels import SMALL, TRANSFORMERS, assert_steps_alike, captured, ran
from lawtables import JOINT_LAWS, LAWS, PLACERS, asked, written
from test_laws import picture

from splitkit.costs import roofline, unit
from splitkit.engine.pair import divide
from splitkit.engine.split import split
from splitkit.errors import PlanError, PolicyError
from splitkit.frontends.aot import joint_flow
from splitkit.memory.kernels.kernel_results import ARRIVED, TO_DEVICE, TO_HOST
from splitkit.memory.profile import simulate_memory
from splitkit.plans.record import Plan
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan, unrepeatable
from splitkit.training.peaks import Peaks

COPIES = (TO_HOST, TO_DEVICE, ARRIVED)


@cache
def prices(name):
    return roofline(captured(name).joint.graph_module, "a100")


@cache
def as_captured(name):
    """All there is to the graph, before anything was planned for it."""
    return picture(captured(name).joint.graph_module)


@cache
def planned(name, policy):
    as_captured(name)
    return asked(JOINT_LAWS[policy], captured(name).joint.flow, prices(name))


FEW = ("gpt2", "vit", "mixtral")
"""Of `TRANSFORMERS`, which are captured always; the others as a campaign."""

OF_SMALL = [pytest.param(name, policy) for name in SMALL for policy in JOINT_LAWS]
OF_OTHERS = these_first([], [(name, policy) for name in TRANSFORMERS if name not in FEW for policy in JOINT_LAWS])
CASES = [
    *OF_SMALL,
    *some_of_all(FEW, JOINT_LAWS, ["SaveAll", "RecomputeAll", "MinCut", "Budget, peak"], turns=4),
    *OF_OTHERS,
]
of_cases = pytest.mark.parametrize(("name", "policy"), CASES)


@cache
def peaks(name):
    return Peaks(captured(name).joint.flow)


@cache
def halves(name, policy):
    """The plan, and the pair that it gives; None where the policy says that there is no plan."""
    plan = planned(name, policy)
    return plan, plan and divide(captured(name).joint.flow, plan, prices(name))


@pytest.mark.parametrize("policy", JOINT_LAWS)
def test_every_policy_applies_to_most_steps(policy):
    tried = [case.values[0] for case in CASES if case.values[1] == policy and not case.marks]
    plans = [planned(name, policy) for name in tried]
    assert sum(plan is not None for plan in plans) >= (3 if policy == "Budget, tight" else len(tried)) >= 3


@of_cases
def test_halves_run_like_eager(name, policy):
    joint, args, kwargs, expected = captured(name)
    _, pair = halves(name, policy)
    if pair:
        assert_steps_alike(ran(joint, pair, args, kwargs), expected)


@of_cases
def test_what_may_run_once_runs_once_where_it_belongs(name, policy):
    flow = captured(name).joint.flow
    plan, pair = halves(name, policy)
    if plan is None:
        return
    late, fixed = set(flow.backward_inputs), unrepeatable(flow)
    for node in flow.index:
        if any(read in late for read in node.all_input_nodes):
            late.add(node)
    for node in flow.nodes:
        keys = pair.plan[node]
        assert {FORWARD, BACKWARD}.issuperset(keys)
        assert not (node in late and FORWARD in keys), f"{node} needs a gradient"
        if node in flow.once:
            assert keys == save_all_plan(flow)[node]
        if node in fixed:
            assert keys == (FORWARD,)
    for half, module in ((FORWARD, pair.forward), (BACKWARD, pair.backward)):
        own = [n for n in module.graph.nodes if n.op == "call_function" and n.target not in COPIES]
        emitted = [n.name for n in own]
        members = [n.name for n in pair.plan.members(half) if n.op == "call_function"]
        assert sorted(emitted) == sorted(members), "each node is emitted once for each of its places"


@of_cases
def test_memory_is_simulated_alike_for_a_plan_and_for_its_pair(name, policy):
    plan, pair = halves(name, policy)
    if plan is None:
        return
    trace = peaks(name).trace(plan)
    profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    if plan.offloaded:  # `tests/engine/test_offload_copies.py` has the exact bytes
        assert profile.peak <= trace.peak and profile.saved == trace.saved_bytes - pair.host_bytes
        return
    assert trace.timeline.tolist() == list(profile.timeline)
    assert (trace.peak, trace.saved_bytes) == (profile.peak, profile.saved)


@pytest.mark.parametrize(("name", "policy"), [*OF_SMALL, *some_of_all(FEW, JOINT_LAWS, (), turns=3), *OF_OTHERS])
def test_the_same_plan_again_from_a_graph_that_is_left_as_it_was(name, policy):
    joint = captured(name).joint
    before, plan = as_captured(name), planned(name, policy)
    again = asked(JOINT_LAWS[policy], joint_flow(joint.graph_module, joint.signature.forward_outputs), prices(name))
    if plan is None:
        assert again is None
    else:
        assert written(plan) == written(again)
        assert Plan.from_dict(joint.graph_module.graph, json.loads(written(plan))) == plan
        joint.split(plan)
    assert picture(joint.graph_module) == before


@pytest.mark.parametrize("policy", JOINT_LAWS)
def test_a_policy_of_training_steps_refuses_other_graphs(chain, policy):
    with pytest.raises(PolicyError, match="SK302"):
        split(chain, JOINT_LAWS[policy])


@pytest.mark.parametrize("policy", [policy for policy in LAWS if policy not in PLACERS])
def test_a_policy_of_forward_graphs_does_not_divide_a_training_step(policy):
    joint = captured("conv").joint
    with pytest.raises((PlanError, PolicyError), match="SK206|SK30[234]"):
        divide(joint.flow, LAWS[policy], unit(joint.graph_module))
