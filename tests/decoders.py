"""Small decoders of transformers' families, each captured once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
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


@cache
def decoder(family: str) -> nn.Module:
    """Return a random causal language model; its tokens differ, for all weights are drawn large."""
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **_OWN[family]})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@cache
def captured(family: str) -> fx.GraphModule:
    """Return the graph of one step."""
    return sk.capture_decoder(decoder(family))


class _Decoders(Mapping[str, tuple[nn.Module, fx.GraphModule]]):
    """Family -> its model and its graph, made when they are asked for."""

    def __getitem__(self, family: str) -> tuple[nn.Module, fx.GraphModule]:
        return decoder(family), captured(family)

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
