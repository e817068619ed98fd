"""Texts of other tools as plans, and the ways in which they do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from decodermodels import Decoder, captured, ids

import splitkit as sk
from splitkit.errors import FileError


@pytest.fixture(scope="module")
def gm():
    return captured(Decoder(4), ids())[0]


def names(gm, text, **options):
    """The last layer of each stage but the last."""
    from splitkit.costs import default
    from splitkit.exports.carried_plan import layer_sequence
    from splitkit.graph.dataflow import analyze

    plan, flow = sk.import_plan(gm, text, **options), analyze(gm)
    sequence = layer_sequence(flow, default(gm), "layers")
    cuts = sequence.cuts_of(plan, range(len(plan.parts)))
    return [sequence.layers[cut - 1].names[0] for cut in cuts]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("Ettt|tL", ["layers.2"]),
        ("'E,t*3|t,L'", ["layers.2"]),
        ("E|(t|)*4L", ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"]),
        ('--foo 1 --pipeline-model-parallel-layout "Et|tttL" --bar', ["layers.0"]),
        ('VLLM_PP_LAYER_PARTITION="1,3" vllm serve', ["layers.0"]),
        ("export SGLANG_PP_LAYER_PARTITION=3,1", ["layers.2"]),
        ('{"": 0, "layers.2": 1, "layers.3": 1, "norm": 1, "lm_head": 1}', ["layers.1"]),
        ("device_map = {'tok_embeddings': 'cpu', 'layers': 0, 'norm': 0, 'lm_head': 0}", ["tok_embeddings"]),
        ('{"layers.3": {"x": 1}, "split": {"layers.3": SplitPoint.BEGINNING}}', ["layers.2"]),
        ('{"layers.1": SplitPoint.END}', ["layers.1"]),
        ('[["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "lm_head"]]', ["layers.0"]),
        ("self.parts = [0, 4, 7]", ["layers.2"]),
        ('{"pp_deg": 2, "pp_division": "2,2"}', ["layers.1"]),
        ("pipeline_pivots: layers.2\npipeline_nstages: 2", ["layers.1"]),
    ],
)
def test_texts_as_people_write_them(gm, text, last):
    assert names(gm, text) == last


def test_the_form_can_be_named(gm):
    assert names(gm, "1,3", form="vllm") == ["layers.0"]
    assert names(gm, "0,2,7", form="deepspeed") == ["layers.0"]


@pytest.mark.parametrize(
    ("text", "form", "code", "reason"),
    [
        ("hello", None, "SK521", "of no format"),
        ("", None, "SK521", "of no format"),
        ("1,3", "vlm", "SK521", "Did you mean vllm"),
        ("Ettx|tL", "megatron", "SK524", "letter 'x'"),
        ("Ett||ttL", "megatron", "SK524", "stage is empty"),
        ("Ett|tm|L", "megatron", "SK524", "multi-token"),
        ("tt|ttL", "megatron", "SK524", "one E"),
        ("(t)*99999999", "megatron", "SK524", "letters"),
        ("Et|ttL", "megatron", "SK525", "5 layers, and the model has 6"),
        ("a,b", "vllm", "SK524", "numbers of layers"),
        ("0,4", "vllm", "SK524", "no layer"),
        ("1,2", "vllm", "SK525", "1 \\+ 2 = 3 layers, and the model has 4"),
        ("[1, 2", "accelerate", "SK524", "not a dictionary"),
        ("{}", "accelerate", "SK524", "not a dictionary"),
        ('{"layers.9": 0}', "accelerate", "SK525", "no module 'layers.9'"),
        ('{"layers": 0, "lm_head": 1}', "accelerate", "SK525", "tok_embeddings no stage"),
        ('{"": 0, "layers.1.up": 1, "layers.1.down": 1}', "accelerate", "SK525", "all layers are on cuda:0"),
        ('{"tok_embeddings": 0, "layers.0.up": 1}', "accelerate", "SK525", "divides layers.0"),
        ('{"": "here", "lm_head": "there"}', "accelerate", "SK525", "not a device"),
        ("[]", "torchtitan", "SK524", "list of module names"),
        ("[['tok_embeddings'], []]", "torchtitan", "SK524", "list of module names"),
        ("[['tok_embeddings'], ['layers.0']]", "torchtitan", "SK525", "gives layers.1 no stage"),
        ("x = 3", "torch", "SK524", "no dictionary of split points"),
        ("x = (", "torch", "SK524", "not Python"),
        ("{'layers.7': SplitPoint.BEGINNING}", "torch", "SK525", "runs nowhere"),
        ("{'lm_head': SplitPoint.END}", "torch", "SK525", "without layers"),
        ("{'layers.1': SplitPoint.BEGINNING, 'layers.0': SplitPoint.END}", "torch", "SK525", "same place"),
        ("parts = [0, 5, 3]", "deepspeed", "SK524", "increasing"),
        ("parts = [0, 2, 9]", "deepspeed", "SK525", "9 layers"),
        ('{"pp_deg": 3, "pp_division": "2,2"}', "galvatron", "SK524", "pp_deg numbers"),
        ('{"pp_deg": 2, "pp_division": "2,2", "checkpoint": "1"}', "galvatron", "SK524", "one number for each"),
        ('{"pp_deg": 2, "pp_division": "2,2", "checkpoint": "1,0,0,0"}', "galvatron", "SK525", "some of its layers"),
        ("pipeline_pivots: ''", "nnscaler", "SK524", "no pipeline_pivots"),
        ('{"pipeline_pivots": "layers.1,layers.2", "pipeline_nstages": 2}', "nnscaler", "SK524", "leave the choice"),
        ("{}", "onnx", "SK524", "pipeline_stage for each node"),
        ("stage 0", "onnx", "SK524", "not JSON with a pipeline_stage"),
        ('{"pipeline_stage": {"nobody": 0}}', "onnx", "SK525", "no node 'nobody'"),
        ('{"pipeline_stage": {"embedding": 0}}', "onnx", "SK525", "has no stage"),
        (3, None, "SK524", "int"),
    ],
)
def test_what_does_not_fit_is_refused(gm, text, form, code, reason):
    with pytest.raises(FileError, match=f"(?s){code}.*{reason}"):
        sk.import_plan(gm, text, form=form)


def test_stages_in_another_order_are_refused(gm):
    text = '[["layers.0", "layers.1", "layers.2", "layers.3"], ["tok_embeddings", "norm", "lm_head"]]'
    with pytest.raises(FileError, match="SK525.*runs after a module of a later stage"):
        sk.import_plan(gm, text)


def test_an_imported_plan_has_prices_and_runs(gm):
    costs = sk.costs.roofline(gm, "h100")
    plan = sk.import_plan(gm, "Ettt|tL", costs=costs)
    assert plan.prices.kind == "roofline" and plan.claim is None and "Megatron" in plan.note
    assert sk.split(gm, plan)(ids()).equal(gm(ids()))


@pytest.mark.campaign
def test_the_page_of_the_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(block, {})
    said = capsys.readouterr().out
    assert '"Ett|ttL"' in said and "slowest stage" in said
