"""Exports of every format and how they round plans, whole, as they are stored."""

from __future__ import annotations

import pytest
from campaigns import these_first
from decodermodels import Decoder, captured, ids, stages
from storedtexts import assert_stored

import splitkit as sk
from splitkit import costs
from splitkit.errors import SplitError
from splitkit.exports.import_plan import FORMATS
from splitkit.graph.dataflow import module_path
from splitkit.plans.record import checkpointed
from splitkit.policies import Budget, Pipeline, RecomputeAll, SaveAll, Stages
from splitkit.training.stage_plan import stage_plan


@pytest.fixture(scope="module")
def plans():
    """Prices and plans: cut inside of layers, between them, with recompute, made by policies."""
    gm, _ = captured(Decoder(4), ids())
    prices = costs.roofline(gm, "h100")
    inside = stages(gm, "layers.1.down", "layers.3")
    return prices, {
        "inside": inside,
        "between": stages(gm, "layers.2"),
        "recomputed": checkpointed(inside),
        "planned": sk.plan(gm, Stages(3, links="nvlink4"), prices),
        "memory": sk.plan(gm, Stages(2, memory="8KiB", links="nvlink4"), prices),
        "four": sk.plan(gm, Stages(4), prices),
    }


def told(plan, to, **options):
    """The text, how it was rounded, and the plan that it stands for; the refusal where there is none."""
    try:
        found = sk.export(plan, to=to, **options)
    except SplitError as error:
        return f"{error}\n"
    rounding = f"{found.rounding}\n{found.rounding.ratio:.6g}" if found.rounding else "not rounded"
    return f"{found.text}\n{rounding}\n{found.plan.note}\n"


ROUNDED = {
    "megatron": [("inside", {}), ("planned", {"schedule": "1f1b", "microbatches": 4})],
    "torchtitan": [("four", {"schedule": "Interleaved1F1B", "microbatches": 4})],
    "deepspeed": [("memory", {})],
}
"""Format -> plans that are rounded for it, which takes a third of a second each, and how they are to run."""


SOME = ["accelerate", "onnx"]


@pytest.mark.parametrize("to", these_first(SOME, [to for to in FORMATS if to not in SOME]))
def test_the_text_of_a_format(plans, to):
    prices, made = plans
    asked = [("between", {}), ("recomputed", {}), *ROUNDED.get(to, [])]
    texts = [f"{name}:\n{told(made[name], to, costs=prices, **options)}" for name, options in asked]
    assert_stored(f"exports/{to}.txt", "\n".join(texts))


def test_the_text_of_a_training_step():
    class Trained(Decoder):
        def forward(self, ids):
            return super().forward(ids).square().mean()

    joint = sk.capture_joint(Trained(3), ids())
    prices = costs.roofline(joint.graph_module, "h100")
    plans = {"pipeline": Pipeline(2, "1f1b", microbatches=4).assign(joint.flow, prices)}
    for name, policy in {"again": RecomputeAll(), "half": Budget(0.5, "saved"), "all": SaveAll()}.items():
        base, last, stage = policy.assign(joint.flow, prices), 0, {}
        for node in joint.flow.nodes:
            last = max(last, int(module_path(node).startswith(("layers.2", "norm", "lm_head"))))
            stage[node] = last
        plans[name] = stage_plan(joint.flow, {n: s for n, s in stage.items() if "forward" in base[n]}, base)
    formats = ("megatron", "torchtitan", "galvatron", "torch")
    texts = [f"{name} to {to}:\n{told(plan, to)}" for name, plan in plans.items() for to in formats]
    assert_stored("exports/joint.txt", "\n".join(texts))
