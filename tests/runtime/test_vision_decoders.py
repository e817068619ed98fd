"""Models whose language model reads more than embeddings generate the tokens of the unsplit model."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from campaigns import these_first

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.ranks.stage_chain import chain_of

transformers = pytest.importorskip("transformers")

CPUS = ["cpu:0", "cpu:1"]
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
_TEXT = {
    **_SIZES, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_ROWS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 16,
}  # fmt: skip
_QWEN_IDS = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 60, "vision_end_token_id": 63}
_SIGLIP = {"model_type": "siglip_vision_model", **_SIZES, "image_size": 28, "patch_size": 7}


def _config(family):
    hf = transformers
    if family == "qwen2_vl":  # positions in four rows
        tower = {**_TOWER, "embed_dim": 16, "mlp_ratio": 2}
        return hf.Qwen2VLConfig(vision_config=tower, text_config={**_TEXT, **_ROWS}, **_QWEN_IDS)
    if family == "qwen3_vl":  # and features of images in the first layer
        tower = {**_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        return hf.Qwen3VLConfig(vision_config=tower, text_config={**_TEXT, **_ROWS}, **_QWEN_IDS)
    if family == "gemma3":  # a mask for each kind of layer
        text = {**_TEXT, "sliding_window": 6, "tie_word_embeddings": False}
        return hf.Gemma3Config(vision_config=_SIGLIP, text_config=text, image_token_index=61, mm_tokens_per_image=4)
    # a mask that is left out where a prompt has no padding, without which attention is not causal
    return hf.PaliGemmaConfig(
        vision_config={**_SIGLIP, "projection_dim": 16}, text_config=_TEXT, image_token_index=61, projection_dim=16
    )


@cache
def model_of(family):
    torch.manual_seed(3)
    config = _config(family)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@cache
def split_of(family):
    return sk.split(sk.capture_decoder(model_of(family)), sk.policies.Stages(2))


def prompts(padded):
    torch.manual_seed(5)
    ids, mask = torch.randint(3, 60, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, : 3 * padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_image():
    ids = prompts(False)["input_ids"][:1]
    ids[:, 0], ids[:, 1:5], ids[:, 5] = 60, 61, 63
    seen = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return {"input_ids": ids, "mm_token_type_ids": (ids == 61).long(), **seen}


def tokens(model, given):
    return model.generate(**given, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize("family", these_first(("qwen3_vl", "paligemma"), ["qwen2_vl", "gemma3"]))
def test_the_tokens_are_the_models(family):
    given = [prompts(False), prompts(True), *([with_image()] if family.startswith("qwen") else [])]
    want = [tokens(copy.deepcopy(model_of(family)), one) for one in given]
    assert len({token for one in want for row in one for token in row[7:]}) > 2
    split = split_of(family)
    generator = sk.generator(copy.deepcopy(model_of(family)), split, CPUS)
    assert [tokens(generator, one) for one in given] == want


@pytest.mark.parametrize("family", these_first(("qwen3_vl",), ["qwen2_vl", "gemma3", "paligemma"]))
def test_ranks_refuse_inputs_that_they_cannot_make(family):
    with pytest.raises(PipelineError, match=r"SK801: stage 0 reads the input \w+, which ranks cannot make"):
        DecoderChain.of(chain_of(split_of(family)))
