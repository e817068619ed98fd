"""The bytes of stages and ranks by kind add up to the peaks that plans are judged by."""

from __future__ import annotations

import pytest
from capturedmodels import captured_example

import splitkit as sk
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import counted_optimizer, purpose
from splitkit.policies import Expert


@pytest.fixture(scope="module")
def gm():
    return captured_example("gpt2", layers=2, width=32, heads=2, vocab=100, batch=2, seq=8).graph


@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_kinds_add_up_to_the_peak_of_a_stage(gm, optimizer):
    stages = sk.stage_costs(gm, sk.plan(gm, Expert(2)), optimizer=optimizer)
    found = [ByteBreakdown.of_stage(stage) for stage in stages]
    assert [one.total for one in found] == [s.fixed_bytes + s.saved_bytes + s.temporary_bytes for s in stages]
    assert [bool(one.gradients) for one in found] == [optimizer is not None] * 2
    assert [one.optimizer for one in found] == [2 * one.gradients if optimizer == "adam" else 0 for one in found]
    three = ByteBreakdown.of_stage(stages[0], in_flight=3)
    assert three.activations - found[0].activations == 2 * stages[0].saved_bytes
    with_cache = ByteBreakdown.of_stage(stages[0], cache=1000)
    assert with_cache.total == found[0].total + 1000 and with_cache.to_dict()["cache"] == 1000


def test_kinds_add_up_to_the_peak_of_a_rank(gm):
    stages = sk.stage_costs(gm, sk.plan(gm, Expert(2)))
    run = sk.simulate_schedule(stages, "1f1b", 4)
    found = [ByteBreakdown.of_rank(rank) for rank in run.memory]
    assert [one.total for one in found] == list(run.peaks)
    assert all(one.weights and one.gradients and one.optimizer and one.activations for one in found)


def test_a_device_holds_all_of_its_stages_and_what_one_of_them_takes_at_a_time(gm):
    stages = sk.stage_costs(gm, sk.plan(gm, Expert(2)), optimizer="adam")
    found = ByteBreakdown.of_visits(stages, cache=7)
    held = sum(stage.fixed_bytes + stage.saved_bytes for stage in stages)
    assert found.total - 7 == held + max(stage.temporary_bytes for stage in stages) and found.cache == 7
    for kind, held in (("weights", "parameter"), ("gradients", "gradient"), ("optimizer", "optimizer")):
        assert getattr(found, kind) == sum(getattr(stage, f"{held}_bytes") for stage in stages) > 0


def test_text_leaves_out_what_is_zero():
    assert str(ByteBreakdown()) == "nothing"
    assert str(ByteBreakdown(weights=2048)) == "2.00 KiB of weights"
    text = str(ByteBreakdown(weights=2048, cache=1024, activations=512))
    assert text == "2.00 KiB of weights, 1.00 KiB of cache and 512 B of activations"
    assert purpose(None) == "inference" and purpose("adam") == "training with adam"


def test_training_is_what_a_schedule_or_prices_with_backward_ask_for(gm):
    costs = sk.costs.flops(gm)
    assert counted_optimizer(None, None) is None and counted_optimizer(None, None, costs) is None
    assert counted_optimizer(None, "1f1b", costs) == "adam"
    assert counted_optimizer(None, None, sk.costs.training(costs, gm)) == "adam"
    assert counted_optimizer("sgd", "1f1b", costs) == counted_optimizer("sgd", None, costs) == "sgd"
