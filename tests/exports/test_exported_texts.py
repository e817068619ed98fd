"""Exports of every format: what they write, that they read back as the same stages, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from decodermodels import Decoder, TwoLists, Wrapped, captured, homes, ids, stages
from ownorders import own_order
from torch import nn

import splitkit as sk
from splitkit.errors import CostError, FileError, NoPlanError, PlanError, PolicyError, ScheduleError
from splitkit.exports.carried_plan import CarriedPlan, Layer, LayerSequence
from splitkit.exports.format_list import WRITES
from splitkit.exports.import_plan import FORMATS, format_of
from splitkit.exports.megatron import megatron_layout
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.plans.parts import Part, PlanRequest
from splitkit.plans.record import checkpointed
from splitkit.policies import ByName, Stages
from splitkit.search.plan_figures import StagePricing


def split_of(model, *starts, inputs=None):
    gm, _ = captured(model, ids() if inputs is None else inputs)
    return sk.split(gm, stages(gm, *starts))


@pytest.fixture(scope="module")
def decoder():
    """Stages 1, 2, 1 with the embedding and the head at the ends, and nodes moved off the borders."""
    return split_of(Decoder(4), "layers.1", "layers.3")


def cut(split, *starts):
    """The split with stages that begin at other modules; its facts are known already."""
    return replace(split, plan=stages(split.flow.root, *starts))


@pytest.fixture(scope="module")
def inside(decoder):
    """A plan that cuts inside a layer."""
    return cut(decoder, "layers.1.down", "layers.3")


@pytest.fixture(scope="module")
def tied():
    return split_of(Decoder(3, tied=True), "layers.1")


def test_the_list_for_the_command_line_has_all_formats():
    assert list(WRITES) == list(FORMATS)


@pytest.mark.parametrize("to", list(FORMATS))
def test_a_plan_between_layers_is_written_as_it_is_and_read_back(decoder, to):
    found = sk.export(decoder, to=to)
    assert homes(found.plan, decoder.flow.nodes) == homes(decoder.plan, decoder.flow.nodes)
    assert found.rounding.moved == 0 and found.rounding.ratio == 1.0 and "already" in str(found.rounding)
    assert to == "transformers" or format_of(found.text).name == to
    back = sk.import_plan(decoder.flow.root, found.text, form=to)
    assert homes(back, decoder.flow.nodes) == homes(decoder.plan, decoder.flow.nodes)


@pytest.mark.parametrize("to", list(FORMATS))
def test_a_plan_inside_layers_is_rounded_and_read_back(inside, to):
    found = sk.export(inside, to=to)
    back = sk.import_plan(inside.flow.root, found.text, form=to)
    assert homes(back, inside.flow.nodes) == homes(found.plan, inside.flow.nodes)
    exact = to in ("torch", "onnx")
    assert (found.rounding.moved == 0) is exact
    assert exact or "nodes move" in str(found.rounding)
    assert sk.split(inside.flow.root, found.plan)(ids()).equal(inside.flow.root(ids()))


def test_what_each_format_says(decoder):
    def text(to, **options):
        return sk.export(decoder, to=to, **options).text

    assert '--pipeline-model-parallel-layout "Et|tt|tL"' in text("megatron")
    assert 'VLLM_PP_LAYER_PARTITION="1,2,1"' in text("vllm")
    assert 'SGLANG_PP_LAYER_PARTITION="1,2,1"' in text("sglang")
    assert "self.parts = [0, 2, 4, 7]" in text("deepspeed")
    assert '["layers.1", "layers.2", "rotary"],' in text("torchtitan")
    assert "'layers.3': SplitPoint.BEGINNING" in text("torch")
    assert json.loads(text("accelerate"))["layers.2"] == 1 and json.loads(text("accelerate"))["rotary"] == 0
    assert json.loads(text("galvatron"))["pp_division"] == "1,2,1"
    assert json.loads(text("nnscaler"))["pipeline_pivots"] == "layers.1,layers.3"
    assert {*json.loads(text("onnx"))["pipeline_stage"].values()} == {0, 1, 2}


def test_the_configuration_of_torchtitan(decoder):
    """All of it: with a schedule, the file of its order; with recompute, another policy of the memory."""
    stages = """    module_fqns_per_model_part=[
        ["tok_embeddings", "layers.0", "rotary"],
        ["layers.1", "layers.2", "rotary"],
        ["layers.3", "norm", "lm_head", "rotary"],
    ],
)
"""
    head = "from torchtitan.config import ParallelismConfig\n\nparallelism = ParallelismConfig(\n"
    head += '    pipeline_parallel_degree=3,\n    pipeline_parallel_schedule="1F1B",\n'
    order = '    pipeline_parallel_schedule_csv="order.csv",  # the file of --order\n'
    tail = "# command line: --compile.memory_policy "
    found = sk.export(decoder, to="torchtitan", schedule="1f1b", microbatches=4)
    assert found.text == f"{head}{order}{stages}{tail}default\n"
    assert sk.export(recomputed(decoder), to="torchtitan").text == f"{head}{stages}{tail}full\n"


def test_a_long_layout_repeats_letters():
    blocks = [Layer((f"layers.{i}",), (), ("layers", i)) for i in range(7)]
    sequence = LayerSequence(None, (Layer(("embed",), ()), *blocks, Layer(("head",), ())), (), "ends")
    assert megatron_layout(CarriedPlan(sequence, (5,), None, (0, 1))) == "Et*4|t*3L"
    assert megatron_layout(CarriedPlan(sequence, (1, 8), None, (0, 1, 2))) == "E|t*7|L"


def test_models_of_transformers_get_the_names_of_torchtitan():
    found = sk.export(split_of(Wrapped(2), "model.layers.1"), to="torchtitan")
    assert '["tok_embeddings", "layers.0", "rotary_emb"]' in found.text
    assert '["layers.1", "norm", "lm_head", "rotary_emb"]' in found.text


def test_names_with_odd_characters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleDict(
                {"é-x": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), "a,b": nn.Linear(4, 4)}
            )

        def forward(self, x):
            for layer in self.body["é-x"]:
                x = layer(x)
            return self.body["a,b"](x)

    inputs = torch.randn(2, 4)
    gm, flow = captured(Odd(), inputs)
    name = "body.é-x.1"
    plan = stages(gm, name)
    for to in ("torch", "accelerate", "nnscaler", "onnx"):
        back = sk.import_plan(gm, sk.export(plan, to=to).text, form=to)
        assert homes(back, flow.nodes) == homes(plan, flow.nodes), to
    with pytest.raises(PlanError, match="SK523.*has a comma"):
        sk.export(stages(gm, "body.a,b"), to="nnscaler")


def test_devices_of_parts_go_into_a_device_map(decoder):
    places = [torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 0)]
    placed = replace(decoder, plan=replace(decoder.plan, parts={i: Part(i, p) for i, p in enumerate(places)}))
    found = json.loads(sk.export(placed, to="accelerate").text)
    assert (found["layers.0"], found["layers.1"], found["lm_head"]) == (1, "cpu", 0)
    back = sk.import_plan(decoder.flow.root, json.dumps(found))
    assert [part.device for part in back.parts.values()] == places


def test_a_rotary_table_is_where_it_is_first_read(decoder):
    found = json.loads(sk.export(cut(decoder, "layers.0"), to="accelerate").text)
    assert found["tok_embeddings"] == 0 and found["rotary"] == 1


def test_weights_that_run_in_no_layer_are_on_a_device_too():
    class Spare(Decoder):
        def __init__(self):
            super().__init__(2)
            self.unused = nn.Linear(3, 3)
            self.layers[1].extra = nn.Linear(2, 2)
            self.alone = nn.Parameter(torch.ones(2))

    found = json.loads(sk.export(split_of(Spare(), "layers.1"), to="accelerate").text)
    assert found["unused"] == 0 and found["alone"] == 0 and "layers.1.extra" not in found


class TestSchedules:
    def test_csv_for_tools_that_read_one(self, decoder):
        found = sk.export(decoder, to="torchtitan", schedule="gpipe", microbatches=4)
        assert found.schedule_csv.splitlines()[0].startswith("0F0,0F1,0F2,0F3")
        assert 'pipeline_parallel_schedule="GPipe"' in found.text and "order.csv" in found.text
        assert sk.export(decoder, to="torch").schedule_csv == ""

    def test_two_stages_on_each_rank(self, decoder):
        split = cut(decoder, "layers.0", "layers.2", "norm")
        v = sk.export(split, to="torchtitan", schedule="zbv", microbatches=4)
        assert "pipeline_parallel_degree=2" in v.text and '"ZBVZeroBubble"' in v.text
        loop = sk.export(split, to="megatron", schedule="interleaved-1f1b", microbatches=4)
        assert "--pipeline-model-parallel-size 2" in loop.text and '"E|tt|tt|L"' in loop.text
        with pytest.raises(PlanError, match="SK523.*not ZBVZeroBubble"):
            sk.export(split, to="megatron", schedule="zbv", microbatches=4)

    def test_a_text_has_the_schedule_that_the_plan_was_made_for(self, decoder):
        asked = PlanRequest("training", "sgd", "1f1b", 6, links="pcie4")
        plan = replace(decoder.plan, request=asked)
        data = json.loads(sk.export(plan, to="galvatron").text)
        assert (data["chunks"], data["global_bsz"]) == (6, 6 * 2)
        found, loop = sk.export(plan, to="torch"), replace(asked, schedule="interleaved-1f1b", microbatches=4)
        figures = StagePricing.of(decoder.flow, plan, costs_of_plan(plan, decoder.flow)).figures(plan)
        assert found.schedule_csv and (found.rounding.before.step, found.rounding.before.peak) == (
            figures.step,
            max(figures.peaks),
        )
        four = replace(stages(decoder.flow.root, "layers.0", "layers.2", "norm"), request=loop)
        assert "--pipeline-model-parallel-size 2" in sk.export(four, to="megatron").text
        ranks = json.loads(sk.export(four, to="accelerate").text)
        assert [ranks[name] for name in ("tok_embeddings", "layers.0", "layers.2", "norm")] == [0, 1, 0, 1]

    def test_uneven_stages_on_ranks(self, decoder):
        uneven = own_order(["0F0 1F0 1B0 0B0", "2F0 2B0"])
        assert sk.export(decoder, to="torch", schedule=uneven).schedule_csv.startswith("0F0,1F0")
        with pytest.raises(PlanError, match="SK523.*3 stages are on 2 ranks"):
            sk.export(decoder, to="torchtitan", schedule=uneven)
        with pytest.raises(PlanError, match="SK523.*schedules by name"):
            sk.export(decoder, to="megatron", schedule=uneven)

    def test_placements_that_no_schedule_of_torchtitan_has(self, decoder):
        split = cut(decoder, "layers.0", "layers.2", "norm")
        order = own_order(["0F0 1F0 1B0 0B0", "2F0 3F0 3B0 2B0"])
        with pytest.raises(PlanError, match="SK523.*in a loop or a V there, and here on the ranks 0, 0, 1, 1"):
            sk.export(split, to="torchtitan", schedule=order)

    @pytest.mark.parametrize("to", ["accelerate", "vllm", "onnx"])
    def test_formats_without_a_schedule(self, decoder, to):
        with pytest.raises(PlanError, match="SK523.*has no schedule"):
            sk.export(decoder, to=to, schedule="1f1b")

    def test_schedules_that_do_not_fit(self, decoder):
        with pytest.raises(ScheduleError, match="SK330"):
            sk.export(decoder, to="torch", schedule="zbv")
        with pytest.raises(PlanError, match="SK523.*has 1 stages, but the plan has 3"):
            sk.export(decoder, to="torch", schedule=own_order(["0F0 0B0"]))
        for to in ("deepspeed", "galvatron", "nnscaler"):
            with pytest.raises(PlanError, match="SK523.*but not Eager1F1B"):
                sk.export(decoder, to=to, schedule="eager-1f1b", microbatches=4)

    def test_the_schedule_that_the_plan_was_made_for(self, decoder):
        def asked(to, schedule=None):
            request = replace(decoder.plan.request, schedule="gpipe", microbatches=5)
            return sk.export(replace(decoder, plan=replace(decoder.plan, request=request)), to=to, schedule=schedule)

        for to in ("nnscaler", "megatron"):
            with pytest.raises(PlanError, match="SK523.*but not GPipe"):
                asked(to)
            assert asked(to, "1f1b").text == sk.export(decoder, to=to, schedule="1f1b", microbatches=5).text
        data = json.loads(asked("galvatron").text)
        assert (data["pipeline_type"], data["chunks"]) == ("gpipe", 5)
        titan = asked("torchtitan")
        assert titan.schedule_csv and 'schedule="GPipe"' in titan.text and asked("vllm").text

    def test_nnscaler_takes_1f1b_with_any_bubbles(self, decoder):
        for schedule in ("gpipe", "eager-1f1b"):
            with pytest.raises(PlanError, match="SK523.*policy runs 1F1B.*\n.*--schedule 1f1b"):
                sk.export(decoder, to="nnscaler", schedule=schedule, microbatches=6)
        for microbatches in (3, 8):
            data = json.loads(sk.export(decoder, to="nnscaler", schedule="1f1b", microbatches=microbatches).text)
            # as nnscaler.policies.pas_autodist and nnscaler.autodist.pipeline_solver check them
            assert (
                data["pipeline_scheduler"] == "1f1b" and data["update_freq"] == data["pipeline_nmicros"] == microbatches
            )
            bubbles = data["max_pipeline_bubble_ratio"]
            assert math.floor(bubbles / (1 - bubbles) * data["update_freq"] + 1) >= data["pipeline_nstages"] == 3
            assert 0 < data["max_pipeline_unbalance_ratio"] <= 0.01


class TestRecompute:
    def test_all_stages(self, decoder):
        again = recomputed(decoder)
        assert "memory_policy full" in sk.export(again, to="torchtitan").text
        assert json.loads(sk.export(again, to="galvatron").text)["checkpoint"] == "1,1,1,1"
        assert "recompute_modules" in json.loads(sk.export(again, to="nnscaler").text)
        back = sk.import_plan(decoder.flow.root, sk.export(again, to="galvatron").text)
        assert [part.call for part in back.parts.values()] == ["checkpoint"] * 3

    def test_megatron_recomputes_as_many_layers_in_each_stage(self, decoder):
        with pytest.raises(PlanError, match=r"SK523.*the stages have \[1, 2, 1\]"):
            sk.export(recomputed(decoder), to="megatron")
        even = recomputed(cut(decoder, "layers.2"))
        text = sk.export(even, to="megatron").text
        assert "--recompute-method uniform" in text and "--recompute-num-layers 2" in text

    def test_some_stages(self, decoder):
        parts = {**decoder.plan.parts, 0: Part(0, call="checkpoint")}
        some = replace(decoder, plan=replace(decoder.plan, parts=parts))
        assert json.loads(sk.export(some, to="galvatron").text)["checkpoint"] == "1,0,0,0"
        for to in ("torchtitan", "megatron"):
            with pytest.raises(PlanError, match="SK523"):
                sk.export(some, to=to)

    @pytest.mark.parametrize("to", ["torch", "deepspeed", "accelerate", "onnx", "vllm"])
    def test_formats_without_it(self, decoder, to):
        with pytest.raises(PlanError, match="SK523"):
            sk.export(recomputed(decoder), to=to)


class TestTies:
    def test_embedding_and_head(self, tied):
        """They are in both stages."""
        for to in ("megatron", "deepspeed", "accelerate", "vllm", "galvatron", "torch", "onnx"):
            assert sk.export(tied, to=to).text
        for to in ("torchtitan", "nnscaler"):
            with pytest.raises(PlanError, match="SK523.*embeddings.weight is in the stages 0, 1"):
                sk.export(tied, to=to)

    def test_a_schedule_means_training(self, tied):
        with pytest.raises(PlanError, match="SK523.*does not keep copies equal"):
            sk.export(tied, to="torch", schedule="1f1b")
        assert sk.export(tied, to="megatron", schedule="1f1b").text

    def test_weights_of_the_middle(self):
        model = Decoder(3)
        model.layers[1].down.bias = model.layers[0].down.bias
        split = split_of(model, "layers.1", "norm")
        with pytest.raises(PlanError, match="SK523.*down.bias is in the stages 0, 1, and the tool keeps only"):
            sk.export(split, to="megatron")

    def test_a_block_that_runs_twice(self):
        class Loops(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

            def forward(self, x):
                for i in (0, 1, 0, 2, 3):
                    x = self.layers[i](x)
                return x

        split = split_of(Loops(), "layers.3", inputs=torch.randn(2, 4))
        with pytest.raises(PlanError, match="SK522.*layers.0 runs more than once"):
            sk.export(split, to="vllm")
        assert json.loads(sk.export(split, to="accelerate").text)["layers.3"] == 1


class TestRefusals:
    def test_encoders_in_megatron_and_the_partitions(self):
        split = split_of(TwoLists(), "decoder.1", inputs=torch.randn(2, 8))
        for to in ("megatron", "vllm", "sglang", "torchtitan"):
            with pytest.raises(PlanError, match="SK523.*lists of blocks encoder, decoder"):
                sk.export(split, to=to)
        assert sk.export(split, to="torch").text and sk.export(split, to="accelerate").text

    def test_a_body_without_embedding_and_head(self):
        class Body(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        split = split_of(Body(), "layers.1", inputs=torch.randn(2, 4))
        with pytest.raises(PlanError, match="SK523.*no embedding"):
            sk.export(split, to="megatron")
        assert 'PARTITION="1,2"' in sk.export(split, to="vllm").text

    def test_images_are_no_tokens(self):
        class Images(Wrapped):
            def __init__(self):
                super().__init__(3)
                self.model.embed_tokens = nn.Linear(5, 8)

        split = split_of(Images(), "model.layers.1", inputs=torch.randn(2, 3, 5))
        for to in ("megatron", "torchtitan"):
            with pytest.raises(PlanError, match="SK523"):
                sk.export(split, to=to)

    def test_plans_that_are_no_pipeline(self, decoder):
        gm = decoder.flow.root
        with pytest.raises(PlanError, match="SK523.*one part"):
            sk.export(replace(decoder, plan=sk.plan(gm, Stages(1))), to="torch")
        many = replace(decoder, plan=replace(decoder.plan, parts={**decoder.plan.parts, 1: Part(1, replicas=2)}))
        with pytest.raises(PlanError, match="SK523.*replicas"):
            sk.export(many, to="torch")
        some = sk.plan(gm, ByName({"layers.[01]": "a", "layers.[23]": "b"}))
        with pytest.raises(PlanError, match="SK523.*embedding is in the parent"):
            sk.export(some, to="torch")
        with pytest.raises(PolicyError, match="SK301"):
            sk.export("plan.json", to="torch")

    def test_bad_arguments(self, decoder):
        with pytest.raises(FileError, match="(?s)SK521.*Did you mean megatron"):
            sk.export(decoder, to="megatorn")
        for wrong in (None, 3):
            with pytest.raises(FileError, match="SK521"):
                sk.export(decoder, to=wrong)
        for memory in ("much", -1, 2.5, True):
            with pytest.raises(PolicyError, match="SK302"):
                sk.export(decoder, to="torch", memory=memory)
        with pytest.raises(CostError, match="SK322"):
            sk.export(decoder, to="torch", links="ropes")
        with pytest.raises(PolicyError, match="SK302"):
            sk.export(decoder, to="torch", optimizer="magic")

    def test_memory(self, inside):
        with pytest.raises(NoPlanError, match="SK303"):
            sk.export(inside, to="megatron", memory="1kB")


def recomputed(split):
    """The split with all stages run again in backward; its facts are known already."""
    return replace(split, plan=checkpointed(split.plan))


def test_an_export_is_text_and_can_be_saved(decoder, tmp_path):
    found = sk.export(decoder, to="vllm")
    found.save(tmp_path / "env.sh")
    assert (tmp_path / "env.sh").read_text() == str(found) == found.text
    assert "Export" in repr(found)
