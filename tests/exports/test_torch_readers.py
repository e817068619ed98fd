"""What torch, accelerate and transformers make of exports: split models that compute what the whole did."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from decodermodels import Decoder, captured, ids, stages

import splitkit as sk
from splitkit.pipeline.schedules import pipeline_order

SCHEDULES = [("1f1b", 3, 6), ("zbv", 4, 4), ("interleaved-1f1b", 4, 4)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Decoder(4).eval()


@pytest.fixture(scope="module")
def split(model):
    gm, _ = captured(model, ids())
    return sk.split(gm, stages(gm, "layers.1.down", "layers.3"))


def split_spec(text):
    """The dictionary of a text, made by running it."""
    space = {}
    exec(text, space)
    return space["split_spec"]


def test_torch_splits_there_and_computes_the_same(model, split):
    from torch.distributed.pipelining import pipeline

    found = sk.export(split, to="torch")
    pipe = pipeline(copy.deepcopy(model), (ids(),), split_spec=split_spec(found.text))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(ids())[0], model(ids()), rtol=0, atol=0)
    for stage in range(3):
        own = {name for name, _ in pipe.get_stage_module(stage).named_parameters()}
        reads = {a.target for node in found.plan.members(stage) for a in node.all_input_nodes if a.op == "get_attr"}
        assert own == {name for name in reads if name in dict(model.named_parameters())}


@pytest.mark.parametrize(("schedule", "count", "microbatches"), SCHEDULES)
def test_torch_loads_the_schedule(split, model, tmp_path, schedule, count, microbatches):
    """The rows that torch's own reader makes of the cells are the order of actions."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    plan = split if count == 3 else replace(split, plan=stages(split.flow.root, "layers.0", "layers.2", "norm"))
    text = sk.export(plan, to="torch", schedule=schedule, microbatches=microbatches).schedule_csv
    (tmp_path / "order.csv").write_text(text, newline="")
    order = pipeline_order(schedule, count, microbatches)
    reader = _PipelineScheduleRuntime.__new__(_PipelineScheduleRuntime)
    reader.pipeline_order, reader._num_stages, reader.pp_group_size = {}, count, len(order.ranks)
    reader._n_microbatches = microbatches
    reader._validate_and_set_stage_mapping = lambda actions: None
    reader._prepare_schedule_with_comms = lambda actions, format="compute_only": None
    reader._load_csv(str(tmp_path / "order.csv"))
    assert [[str(action) for action in row] for _, row in sorted(reader.pipeline_order.items())] == [
        [str(action) for action in row] for row in order.ranks
    ]


def test_accelerate_dispatches_it(model, split, tmp_path):
    """Stages on the CPU and on disk: devices that exist here, between which accelerate moves weights."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.modeling import check_device_map

    found = json.loads(sk.export(split, to="accelerate").text)
    check_device_map(model, found)
    places = {0: "cpu", 1: "disk", 2: "cpu"}
    own = {name: places[stage] for name, stage in found.items()}
    split_up = accelerate.dispatch_model(copy.deepcopy(model), own, main_device="cpu", offload_dir=str(tmp_path))
    on_disk = [split_up.get_submodule(name) for name, place in own.items() if place == "disk"]
    assert {p.device.type for module in on_disk for p in module.parameters()} == {"meta"}
    torch.testing.assert_close(split_up(ids()), model(ids()), rtol=0, atol=0)


def test_transformers_loads_a_model_by_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=20,
    )
    whole = transformers.LlamaForCausalLM(config).eval()
    whole.save_pretrained(tmp_path / "model")
    gm, _ = captured(whole, ids())
    found = json.loads(sk.export(stages(gm, "model.layers.1"), to="transformers").text)
    own = {name: ("cpu", "disk")[stage] for name, stage in found.items()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=own, offload_folder=str(tmp_path / "off")
    )
    assert loaded.hf_device_map == own and loaded.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids()).logits, whole(ids()).logits, rtol=0, atol=0)
