"""Stages of several devices on paper: shares of work and memory, messages between them, and rings of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import ScheduleError
from splitkit.pipeline.memory import replica_of, undivided
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.plans.parts import Part

STAGE = StageCosts(
    4.0, 2.0, 2.0, saved_bytes=9, activation_bytes=100, input_gradient_bytes=60, temporary_bytes=20,
    parameter_bytes=50, gradient_bytes=40, optimizer_bytes=80,
)  # fmt: skip


def test_each_replica_has_all_parameters_and_a_share_of_the_rest():
    each = replica_of(STAGE, 2, gradients=4)
    assert (each.forward, each.backward_input, each.backward_weight) == (2.0, 1.0, 1.0)
    assert (each.parameter_bytes, each.gradient_bytes, each.optimizer_bytes) == (50, 40, 80)
    assert (each.saved_bytes, each.temporary_bytes) == (5, 12), "rounded up; 4 of 20 bytes are whole in each"
    assert each.activation_bytes == 100, "messages are of all replicas together"
    assert replica_of(STAGE, 1) is STAGE


def test_gradients_that_several_nodes_add_to_are_there_twice():
    assert undivided([8, 8, 4], 12) == 8 + 2 * 8
    assert undivided([], 0) == 0
    assert undivided([4], 12) == 4 + 8, "what no node is known to read may be of one"


def test_a_step_of_replicas_by_hand():
    first, last = replica_of(STAGE, 2), replica_of(STAGE, 4)
    link = sk.costs.Link(100.0, 0.5)
    run = simulate_schedule([first, last], "gpipe", 1, links=sk.costs.Links(link))
    there, back = 0.5 + 100 / 2 / 100, 0.5 + 60 / 2 / 100
    rings = [2 * (d - 1) * (0.5 + 40 / d / 100) for d in (2, 4)]
    ends = 2.0 + there + 1.0 + 1.0 + back + 2.0, 2.0 + there + 1.0 + 1.0
    assert run.syncs == pytest.approx(rings)
    assert run.seconds == pytest.approx(max(end + ring for end, ring in zip(ends, rings, strict=True)))
    assert run.replicas == (2, 4)
    free = simulate_schedule([first, last], "gpipe", 1)
    assert free.seconds == pytest.approx(6.0) and not free.syncs


def test_the_slowest_link_between_replicas_counts():
    slow = sk.costs.Links.matrix([[0, 1e9, 1e9], [1e9, 0, 10.0], [1e9, 10.0, 0]])
    run = simulate_schedule([replica_of(STAGE, 2), STAGE], "gpipe", 1, links=slow)
    assert run.arrivals[0] - run.departures[0] == pytest.approx(100 / 10)


def test_without_replicas_nothing_has_changed():
    stages = [STAGE, STAGE]
    run = simulate_schedule(stages, "1f1b", 4, links="pcie4")
    assert run.syncs == () and run.seconds == run.ends.max()


def test_replicas_of_a_rank_are_as_many_for_all_of_its_stages():
    stages = [replica_of(STAGE, d) for d in (1, 2, 2, 2)]
    with pytest.raises(ScheduleError, match="SK330.*1 and 2 replicas"):
        simulate_schedule(stages, "interleaved-1f1b", 4)
    with pytest.raises(ScheduleError, match="2 devices for 2 ranks of 3 replicas"):
        simulate_schedule([replica_of(STAGE, 2), STAGE], "gpipe", 1, devices=["a", "b"])


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_replicas_is_refused(replicas):
    with pytest.raises(ScheduleError, match="SK332.*replicas"):
        StageCosts(1.0, 1.0, replicas=replicas)
    with pytest.raises(sk.errors.PlanError, match="SK206.*replicas"):
        Part(0, replicas=replicas)


def test_a_replica_takes_at_least_what_a_smaller_batch_takes():
    """The formula for a share against the prices of a graph that was captured with half of the batch."""

    def captured(batch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
        gm = sk.capture(model, torch.randn(batch, 8))
        return gm, [list(sk.analyze(gm).nodes)[:3], list(sk.analyze(gm).nodes)[3:]]

    (whole, parts), (half, halves) = captured(64), captured(32)
    plan = sk.Plan.of({node: key for key, part in enumerate(parts) for node in part})
    twice = sk.Plan(plan.places, {key: Part(key, replicas=2) for key in (0, 1)})
    for each, small in zip(
        sk.stage_costs(whole, twice, sk.costs.unit(whole)),
        sk.stage_costs(half, halves, sk.costs.unit(half)),
        strict=True,
    ):
        assert (each.parameter_bytes, each.gradient_bytes) == (small.parameter_bytes, small.gradient_bytes)
        assert each.saved_bytes == small.saved_bytes
        assert small.temporary_bytes <= each.temporary_bytes <= 1.5 * small.temporary_bytes + 8 * 32 * 4
