"""Small decoders of transformers' families, each captured once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from capturedmodels import stored
from torch import fx, nn

import splitkit as sk
from splitkit.graph.caches import caches_of

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    # with tied weights they would repeat one token
    "gemma2": {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
FAMILIES = tuple(_OWN)
_MAMBA2 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
_WITH_STATES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    # in jamba every other layer has attention, in falcon_h1 each has both
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "falcon_h1": {**_MAMBA2, "mamba_chunk_size": 4},
}
STATES = tuple(_WITH_STATES)
"""Families with states of constant size."""


_BOTH = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **{"d_model": 32, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 3, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGE = 95
"""The token in whose place LLaVA reads a part of an image, of which there are four."""


def _made(family: str) -> nn.Module:
    import transformers as hf

    model: Any
    if family == "t5":
        model = hf.T5ForConditionalGeneration(hf.T5Config(**_T5, decoder_start_token_id=0))
    elif family in ("bart", "whisper"):
        model = hf.AutoModelForSeq2SeqLM if family == "bart" else hf.AutoModelForSpeechSeq2Seq
        model = model.from_config(hf.AutoConfig.for_model(family, **_BOTH))
    elif family == "llava":
        vision = hf.CLIPVisionConfig(**_IMAGES, image_size=16, patch_size=8, projection_dim=32)
        text = hf.LlamaConfig(**_SIZES)
        model = hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4)
        )
    else:
        config = hf.AutoConfig.for_model(family, **{**_SIZES, **{**_OWN, **_WITH_STATES}[family]})
        model = hf.AutoModelForCausalLM.from_config(config)
    if family == "whisper":
        model.generation_config.no_timestamps_token_id = 90
        model.generation_config.is_multilingual = False
        model.generation_config.max_length = 40
    return model


@cache
def _model_and_step(family: str) -> tuple[nn.Module, fx.GraphModule]:
    def make() -> tuple[nn.Module, fx.GraphModule]:
        torch.manual_seed(7)
        model = _made(family).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.3)
        return model, sk.capture_decoder(model)

    return make() if family == "llava" else stored(f"decoder {family}", make)  # its hooks cannot be stored


def decoder(family: str) -> nn.Module:
    """Return a random model that generates; its tokens differ, for all weights are drawn large."""
    return _model_and_step(family)[0]


def captured(family: str) -> fx.GraphModule:
    """Return the graph of one step."""
    return _model_and_step(family)[1]


class _Decoders(Mapping[str, tuple[nn.Module, fx.GraphModule]]):
    """Family -> its model and its graph, made when they are asked for."""

    def __getitem__(self, family: str) -> tuple[nn.Module, fx.GraphModule]:
        return _model_and_step(family)

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


DECODERS = _Decoders()


def empty_cache(gm: fx.GraphModule, sequences: int) -> Any:
    """Return a cache without positions, as the graph takes it."""
    import transformers

    made, given = transformers.DynamicCache(), [cache.given.meta["val"] for cache in caches_of(gm)]
    for layer, (keys, values) in enumerate(zip(given[::2], given[1::2], strict=True)):
        shapes = [(sequences, int(x.shape[1]), 0, int(x.shape[3])) for x in (keys, values)]
        made.update(*(torch.zeros(shape) for shape in shapes), layer)
    return made


def tokenizer(folder: Path, tokens: int) -> str:
    """Write a tokenizer whose words are the ids of its tokens, and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder / "words")
    return str(folder / "words")
