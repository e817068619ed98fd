"""Real models, small: split by every kind of plan, outputs to the bit, every gradient to rounding."""

from __future__ import annotations

from functools import cache

import pytest
from campaigns import some_of_all, these_first

import splitkit as sk
from splitkit.policies import Random, RoundRobin, Stages
from splitkit.testing.models import NAMES, build

SMALL = {"layers": 2, "width": 32, "heads": 2, "batch": 2}
SIZES = {
    **{name: {**SMALL, "vocab": 96, "seq": 12} for name in NAMES},
    "vit": {**SMALL, "image": 32, "patch": 8},
}
POLICIES = {
    "Stages(2)": Stages(2, seconds=1),
    "Stages(4)": Stages(4, seconds=1),
    "RoundRobin(3)": RoundRobin(3),
    "Random(5)": Random(5, seed=1, parent=0.05, copies=0.5),
}


@cache
def captured(name):
    example = build(name, **SIZES[name])
    return example, sk.capture(example.model, *example.args, **example.kwargs)


@pytest.mark.parametrize(("name", "policy"), some_of_all(NAMES, POLICIES, always=()))
def test_a_split_model_equals_the_model(name, policy):
    example, gm = captured(name)
    made = sk.split(gm, POLICIES[policy])
    result = sk.compare(example.model, made, *example.args, **example.kwargs)
    result.raise_if_different()
    assert result.loss_is_models and result.loss[0] == result.loss[1]
    trained = {n for n, p in example.model.named_parameters() if p.requires_grad}
    assert len(result.gradients) == len(trained) and all(d.scale > 0 for d in result.gradients if "bias" not in d.name)


@pytest.mark.parametrize("name", these_first(["gpt2"], [name for name in NAMES if name != "gpt2"]))
def test_a_plan_file_gives_the_same_split_after_another_capture(name, tmp_path):
    _, gm = captured(name)
    plan = sk.plan(gm, Stages(3, seconds=1))
    plan.save(tmp_path / "plan.json")
    example = build(name, **SIZES[name])
    again = sk.capture(example.model, *example.args, **example.kwargs)
    loaded = sk.Plan.load(tmp_path / "plan.json", again.graph)
    assert loaded.to_dict() == plan.to_dict()
    sk.compare(example.model, sk.split(again, loaded), *example.args, **example.kwargs).raise_if_different()


@pytest.mark.parametrize("name", NAMES)
def test_no_op_of_a_real_model_is_unknown(name):
    _, gm = captured(name)
    flow = sk.analyze(gm)
    assert [n.name for n, e in flow.effects.items() if not e.known] == []


def test_stages_of_gpt2_cut_where_little_is_alive():
    _, gm = captured("gpt2")
    report = sk.report(gm, sk.plan(gm, Stages(2)))
    hidden = 2 * 12 * 32 * 4
    assert report.parts[1].bytes_in <= 5 * hidden
    assert sum(p.share for p in report.parts) == pytest.approx(1)
    assert report.total.parameters == sum(p.numel() for p in captured("gpt2")[0].model.parameters())
