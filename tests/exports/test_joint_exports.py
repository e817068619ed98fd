"""Plans of training steps in stages: what formats with recompute per layer can carry of them."""

from __future__ import annotations

import json

import pytest
import torch
from decodermodels import Decoder, ids
from torch import nn

import splitkit as sk
from splitkit.errors import PlanError
from splitkit.graph.dataflow import module_path
from splitkit.policies import Pipeline, RecomputeAll, Remat, SaveAll
from splitkit.training.stage_plan import stage_plan


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Decoder(4)

    def forward(self, x):
        return self.body(x).square().mean()


@pytest.fixture(scope="module")
def joint():
    return sk.capture_joint(Trained(), ids())


def planned(joint, ends, policy=None):
    """Stages with these blocks: ``ends`` are the numbers of blocks before each cut."""
    base = (policy or SaveAll()).assign(joint.flow, sk.costs.unit(joint.flow))
    last, stages = 0, {}
    for node in joint.flow.nodes:
        path = module_path(node).split(".")
        if path[:2] == ["body", "layers"]:
            last = sum(int(path[2]) >= end for end in ends)
        elif path[:2] in (["body", "norm"], ["body", "lm_head"]):
            last = len(ends)
        stages[node] = last
    return stage_plan(joint.flow, {n: s for n, s in stages.items() if "forward" in base[n]}, base)


def test_blocks_of_stages(joint):
    found = sk.export(planned(joint, [3]), to="megatron")
    assert '"Et*3|tL"' in found.text and found.rounding is None and "recompute" not in found.text
    data = json.loads(sk.export(planned(joint, [1, 2]), to="galvatron", schedule="1f1b", microbatches=6).text)
    assert (data["pp_division"], data["checkpoint"], data["chunks"]) == ("1,1,2", "0,0,0,0", 6)


def test_recompute_of_all_layers(joint):
    """It goes on across the layers of a stage, which saves its input alone: one unit of as many layers."""
    plan = planned(joint, [2], RecomputeAll())
    text = sk.export(plan, to="megatron").text
    assert "--recompute-method uniform" in text and "--recompute-num-layers 2" in text
    with pytest.raises(PlanError, match=r"SK523.*the stages have \[1, 3\]"):
        sk.export(planned(joint, [1], RecomputeAll()), to="megatron")
    assert json.loads(sk.export(plan, to="galvatron").text)["checkpoint"] == "1,1,1,1"


def test_recompute_of_each_layer_from_its_own_input(joint):
    """The results of layers are saved: each layer is a unit of its own, in stages of any size."""
    for ends in ([2], [1]):
        text = sk.export(planned(joint, ends, Remat(keep=["aten.add"])), to="megatron").text
        assert "--recompute-method uniform" in text and "--recompute-num-layers 1\n" in text


def test_layers_that_are_recomputed_in_part(joint):
    plan = planned(joint, [2], Remat(["aten.relu"]))
    for to in ("megatron", "galvatron"):
        with pytest.raises(PlanError, match="SK523.*body.layers.0 is recomputed in part"):
            sk.export(plan, to=to)


def test_a_cut_inside_a_block(joint):
    plan = Pipeline(3).assign(joint.flow, sk.costs.roofline(joint.graph_module, "h100"))
    with pytest.raises(PlanError, match="SK523.*cut falls inside body.layers"):
        sk.export(plan, to="megatron")


@pytest.mark.parametrize("to", ["torch", "torchtitan", "deepspeed", "accelerate", "nnscaler", "onnx", "vllm"])
def test_formats_that_name_modules_or_serve(joint, to):
    with pytest.raises(PlanError, match="SK523"):
        sk.export(planned(joint, [2]), to=to)


def test_a_plan_without_stages(joint):
    with pytest.raises(PlanError, match="SK523.*no stages"):
        sk.export(SaveAll().assign(joint.flow, sk.costs.unit(joint.flow)), to="megatron")


def test_a_split_step(joint):
    step = joint.split(planned(joint, [2]))
    assert '"Ett|ttL"' in sk.export(step, to="megatron").text
    assert torch.is_grad_enabled()
