"""T5, BART, Whisper and LLaVA give the tokens of ``generate`` on ranks: an encoder, or images, run whole on rank 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoders import IMAGE, decoder
from launch import launch

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime import open_stages, save_stages
from splitkit.runtime.generation.before_stages import BeforeStages, BehindEmbeddings, BehindEncoder, ModelTokens
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.generation_request import Request, RequestLimits
from splitkit.runtime.generation.generator import _Line, before_stages

pytest.importorskip("transformers")

CPU = torch.device("cpu")
FAMILIES = ("t5", "bart", "whisper", "llava")
ALWAYS = ("t5", "llava")
REASONS = {
    "t5": [
        "the model reads no further input 'pixel_values'",
        "prompt 0 has the token 96, and the model knows tokens from 0 to 95",
        "decoder_input_ids are 2 rows of [1] tokens, for 1 sequences",
        "the cache would come to 210 tokens, and there is memory for 200",
        "a request has no prompt",
        "the model reads no further input 'attention_mask'",
    ],
    "whisper": [
        "the encoder reads input_features, and no tokens",
        "the model cannot read input_features: ValueError: Whisper expects the mel input features to be of length 40, "
        "but found 12. Make sure to pad the input mel features to 40.",
        "the encoder reads input_features, and no tokens",
        "2 tokens and 39 new ones are 41 positions, and the model has 40",
    ],
    "llava": [
        f"a prompt has the token {IMAGE}, in whose place an image is read, and there is none",
        "the model cannot read pixel_values: ValueError: Input image size (8*8) doesn't match model (16*16).",
        "the model cannot read pixel_values: ValueError: Image features and image tokens do not match, tokens: 4, "
        "features: 256",
        "the model reads no further input 'pixel_value'",
        "pixel_values is no tensor: expected sequence of length 2 at dim 1 (got 1)",
        "prompt 0 has the token 96, and the model knows tokens from 0 to 95",
    ],
}


def check(lines: list[dict[str, Any]], family: str) -> None:
    """All requests have the tokens of ``generate``, and only the requests that cannot be answered have failed."""
    for line in lines:
        assert line["said"] == "" and line["left"] == [0, 0] and line["sent"] == [0, 0], line
    assert sum(line["most"][0] for line in lines) > 0
    (first,) = [line for line in lines if not line["rank"]]
    lengths = [len(row) for tokens in first["expected"] for row in tokens]
    assert len(set(lengths)) > 3, "all sequences end alike"
    for made in first["made"]:
        assert [result["tokens"] for result in made if result["error"] is None] == first["expected"]
    errors = [result["error"] for result in first["made"][0] if result["error"]]
    assert [error["reason"] for error in errors] == REASONS["t5" if family == "bart" else family]
    assert {error["code"] for error in errors} == {"SK802"}


@pytest.fixture(scope="module")
def said() -> dict[str, list[dict[str, Any]]]:
    """What two ranks said; one process captures for all."""
    return ranks_said(2, (*ALWAYS, "facts"))


@pytest.fixture(scope="module")
def facts(said) -> dict[str, Any]:
    (first,) = [line for line in said["facts"] if not line["rank"]]
    return first


def ranks_said(ranks: int, families: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {family: [] for family in families}
    for line in launch("runtime/generating_whole.py", ranks, *" -- ".join(families).split()):
        if "next" not in line:
            found[line["family"]].append(line)
    return found


@pytest.mark.parametrize("family", ALWAYS)
def test_tokens_are_those_of_generate(said, family):
    """Prompts and images of several sizes, batches, requests that end early, sampling; and from a folder, in chunks."""
    check(said[family], family)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_families_give_the_tokens_of_generate(ranks):
    """Stages(4) of two layers also cuts within a layer."""
    for family, lines in ranks_said(ranks, FAMILIES).items():
        check(lines, family)


def test_each_stage_computes_the_keys_and_values_of_its_own_layers_only(facts):
    assert facts["layers"] == {"2": [[["0"], ["1"]], True], "4": [[["0"], ["1"]], True]}


def test_the_output_of_an_encoder_crosses_once_and_as_far_as_it_is_read(facts):
    assert facts["entering"] == {"t5": [1, 1, 0, 0], "llava": [0, 0, 0, 0]}


def test_a_model_that_cannot_run_before_the_stages_is_refused(facts):
    refused = [
        "SK801: the decoder reads an encoder's output, computed by what is in no stage, and the first rank has no mod",
        "SK801: the decoder reads embeddings with images among them, computed by what is in no stage",
        "SK801: LlavaForConditionalGeneration is not the model that was captured",
        "SK802: the model is in training mode",
        "SK807: encoder.",
        "SK804: encoder.",
        "SK804: model.vision_tower.",
    ]
    for error, start in zip(facts["refused"], refused, strict=True):
        assert error.startswith(start)


def test_a_border_refuses_another_dtype_than_that_of_the_capture(facts):
    assert len(facts["unlike"]) == 3
    for error in facts["unlike"]:
        assert error.startswith("SK803: ") and "was captured as" in error


def test_the_positions_of_an_encoder_count_as_tokens_of_the_cache():
    before = BehindEncoder(decoder("t5"), ModelTokens.of(decoder("t5")), CPU)
    request = before.checked(Request.from_data({"input_ids": [[5, 6, 7], [8]], "max_new_tokens": 4}))
    assert request.decoder_input_ids == ((0,), (0,)) and before.encoded_positions(request) == 3
    RequestLimits(96, None, 2 * (4 + 3)).require(request, 3)
    with pytest.raises(PipelineError, match="come to 14 tokens"):
        RequestLimits(96, None, 13).require(request, 3)
    # a third one has no room beside two, which it would have if only the decoder's tokens counted
    asked = [{"input_ids": [5, 6, 7], "max_new_tokens": 4}] * 3
    line = _Line(RequestLimits(96, None, 20), 4, asked, before, ModelTokens.of(decoder("t5")))
    assert line.admit() == ([], [0, 1])
    line.leave(0, None)
    assert line.admit() == ([], [2])
    speech = BehindEncoder(decoder("whisper"), ModelTokens.of(decoder("whisper")), CPU)
    assert speech.encoded_positions(Request(inputs={"input_features": torch.zeros(1, 8, 40)})) == 20


def test_what_a_model_says_of_its_tokens():
    assert ModelTokens.of(decoder("bart")).forced_eos_token_id == (2,)
    known = ModelTokens.of(decoder("whisper"))
    assert known.decoder_start == (3, 90) and known.positions == 40 and known.begin_suppress_tokens == (220, 50256)
    # the first language of speech is not known before it is heard
    several = copy.deepcopy(decoder("whisper"))
    several.generation_config.lang_to_id = {"<|en|>": 80}
    known = ModelTokens.of(several)
    assert known.decoder_start == ()
    before = BehindEncoder(several, known, CPU)
    with pytest.raises(PipelineError, match="SK802: the model does not say with which tokens its decoder starts"):
        before.checked(Request(inputs={"input_features": torch.zeros(1, 8, 40)}))
    given = Request(inputs={"input_features": torch.zeros(2, 8, 40)}, decoder_input_ids=((3, 80, 90),))
    assert before.checked(given).decoded == ((3, 80, 90),) * 2
    with pytest.raises(PipelineError, match="SK801: Linear is not a model of transformers"):
        ModelTokens.of(torch.nn.Linear(1, 1))
    assert ModelTokens.of(decoder("llava")).or_given(7, None, 9) == ModelTokens((7,), 0, 9)


def test_inputs_are_not_sent_to_other_ranks():
    import json

    request = Request.from_data({"inputs": {"pixel_values": torch.ones(1)}, "input_ids": [1], "seed": 3})
    assert set(request.inputs) == {"pixel_values"}
    sent = json.loads(request.to_json())
    assert "inputs" not in sent and Request.from_data(sent) == request
    for data, says in (({"inputs": [1]}, "inputs is .1."), ({"cats": 3, "prompts": [1]}, "no field 'cats'")):
        with pytest.raises(PipelineError, match=f"SK802: .*{says}"):
            Request.from_data(data)
    with pytest.raises(PipelineError, match="SK802: the model reads no further input 'cats'"):
        BeforeStages(ModelTokens(), CPU).checked(Request.from_data({"cats": [3], "prompts": [1]}))


@pytest.mark.parametrize("family", ["whisper", "llava"])
def test_stages_that_were_captured_on_meta_compute_what_the_model_computes(family, tmp_path):
    """As for a configuration above 1 GiB: no checkpoint has position_ids and constants of caches."""
    config = copy.deepcopy(decoder(family).config)
    if family == "whisper":
        config.encoder_layers = config.decoder_layers = config.num_hidden_layers = 1
    real = type(decoder(family))(config).eval()
    with torch.device("meta"):
        model = type(real)(copy.deepcopy(real.config)).eval()
    save_stages(sk.split(sk.capture_decoder(model), sk.policies.Stages(2)), tmp_path / "stages")
    real.save_pretrained(tmp_path / "weights")
    stages = open_stages(tmp_path / "stages", weights=tmp_path / "weights")
    stages.load(range(2))
    before = before_stages(model, stages, DecoderChain.of(stages.chain).inputs, ModelTokens.of(real), CPU)
    assert isinstance(before, BehindEmbeddings if family == "llava" else BehindEncoder)
    if family == "llava":
        pixels = torch.randn(1, 3, 16, 16)
        towers = (one.model.vision_tower(pixels).last_hidden_state for one in (model, real))
        assert torch.equal(*towers)
        return
    held = {name: t for one in stages.encoder_caches.values() for name, t in one.named_parameters()}
    assert held and all(torch.equal(t, real.get_parameter(name)) for name, t in held.items())
    given = torch.randn(1, 8, 40)
    assert torch.equal(*(one.get_encoder()(given).last_hidden_state for one in (model, real)))
