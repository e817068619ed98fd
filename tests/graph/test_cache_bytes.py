"""The bytes of cache per token that are read off a graph, next to what transformers' own cache holds."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import splitkit as sk
from splitkit.extend import cache_bytes

LLAMA = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("heads", "dtype"),
    these_first([(2, torch.float32), (1, torch.bfloat16)], [(4, torch.float32), (2, torch.bfloat16)]),
)
def test_keys_and_values_count_as_a_cache_holds_them(heads, dtype):
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=heads)).eval().to(dtype)
    ids = torch.zeros(2, 6, dtype=torch.long)
    found = cache_bytes(sk.capture(model, input_ids=ids, use_cache=False))
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert list(found.values()) == [nbytes // ids.numel() for nbytes in held]


def test_keys_without_a_batch_have_heads_before_their_tokens():
    class Heads(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    gm = sk.capture(Heads(), *(torch.ones(4, 6, 8) for _ in range(3)))
    assert list(cache_bytes(gm).values()) == [2 * 4 * 8 * 4]


def test_gpt2_and_a_model_without_attention():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50)).eval()
    gm = sk.capture(model, input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False)
    assert list(cache_bytes(gm).values()) == [2 * 32 * 4] * 2
    assert not cache_bytes(sk.capture(torch.nn.Linear(3, 3), torch.ones(1, 3)))
