"""One graph of a step of Mamba, or of a model with Mamba's layers, runs prompts, chunks and single tokens."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from campaigns import these_first
from decoders import STATES, captured, decoder

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.frontends.generate_calls import _set_recurrent_state
from splitkit.graph.caches import caches_of
from splitkit.graph.storages import symbols_of
from splitkit.runtime.generation.local_generator import DecoderOnDevices, put_into, taken_from

transformers = pytest.importorskip("transformers")

FIRST = ("mamba", "falcon_h1")
"""Each scan, with states only, and with keys in the same layer."""


@pytest.mark.parametrize("family", these_first(FIRST, sorted({*STATES} - {*FIRST})))
def test_prompts_in_pieces_and_single_tokens_give_the_logits_of_the_whole(family):
    """transformers goes on from a state with single tokens only: in Mamba a chunk would begin anew."""
    model = decoder(family)
    parts = DecoderOnDevices(sk.split(captured(family), sk.policies.Stages(2)), ["cpu:0", "cpu:1"])
    ids, mask = torch.randint(3, 96, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    # the second prompt is shorter than the others
    mask[1, :2] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        cache = transformers.DynamicCache()
        for start, end in ((0, 1), (1, 4), (4, 8), (8, 9), (9, 11)):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
            step = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": positions}
            logits, tensors = parts.step(step, taken_from(cache, parts, 3, list))
            put_into(cache, parts.caches, tensors)
            torch.testing.assert_close(logits[:, 0], want[:, end - 1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FIRST)
def test_states_have_a_constant_size_and_the_models_dtypes(family):
    model, gm = decoder(family), captured(family)
    with torch.no_grad():
        out = model(torch.ones(2, 5, dtype=torch.long), use_cache=True)
    theirs = getattr(out, "cache_params", None) or out.past_key_values
    states = [c for c in caches_of(gm) if "states" in c.given.name]
    assert len(states) == 4 and len(caches_of(gm)) == (4 if family == "mamba" else 8)
    for given, updated in states:
        layer, kind = int(given.name.split("layers_")[1][0]), "conv" if "conv" in given.name else "recurrent"
        like = getattr(theirs.layers[layer], f"{kind}_states")[0]
        for node in (given, updated):
            value = node.meta["val"]
            assert not any(map(symbols_of, value.shape[1:])) and value.shape[1:] == like.shape[1:]
            assert value.dtype == like.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_kept_and_returned_as_by_transformers(dtype):
    """A cache keeps the dtype that its first state had."""
    from transformers.cache_utils import LinearAttentionLayer

    first, second = torch.randn(2, 3).to(dtype), torch.randn(2, 3)
    theirs, ours = LinearAttentionLayer(), LinearAttentionLayer()
    for state in (first, second):
        given, returned = state.clone(), theirs.update_recurrent_state(state)
        assert torch.equal(_set_recurrent_state(ours, given, 0), returned) and returned.dtype == dtype
        assert torch.equal(ours.recurrent_states[0], theirs.recurrent_states[0])
        assert torch.equal(given, state), "what is given is not written"
    assert (ours.dtype, ours.device) == (dtype, torch.device("cpu"))
    assert ours.is_recurrent_states_initialized == theirs.is_recurrent_states_initialized


def test_transformers_is_as_it_was_after_a_capture():
    from transformers.cache_utils import Cache, LinearAttentionLayer

    source = sys.modules[type(decoder("mamba")).__module__]
    names = ("mamba_selective_scan", "apply_mask_to_padding_states")
    places = [*((source, name) for name in names), (Cache, "get_recurrent_state")]
    places += [(LinearAttentionLayer, name) for name in ("update_conv_state", "update_recurrent_state")]
    before = [vars(where)[name] for where, name in places]
    config = copy.deepcopy(decoder("mamba").config)
    config.num_hidden_layers = 1
    sk.capture_decoder(type(decoder("mamba"))(config).eval())
    with pytest.raises(CaptureError):
        sk.capture_decoder(transformers.RecurrentGemmaForCausalLM(_griffin()).eval())
    assert [vars(where)[name] for where, name in places] == before


def _griffin():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "lru_width": 16}
    return transformers.RecurrentGemmaConfig(**sizes, intermediate_size=32, head_dim=8, attention_window_size=8)


def test_other_states_are_refused_by_name():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = ["linear_attention", "full_attention"]
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config = transformers.Qwen3NextConfig(
        **sizes, **heads, **experts, linear_value_head_dim=8, shared_expert_intermediate_size=8, vocab_size=8,
        layer_types=layers, head_dim=8,
    )  # fmt: skip
    with pytest.raises(CaptureError, match=r"SK401: Qwen3NextForCausalLM .* neither Mamba's nor Mamba-2's"):
        sk.capture_decoder(transformers.Qwen3NextForCausalLM(config).eval())
    limited = transformers.Mamba2Config(
        hidden_size=16, num_hidden_layers=1, vocab_size=8, state_size=4, num_heads=4, head_dim=8, n_groups=1,
        time_step_limit=(0.01, 1.0),
    )  # fmt: skip
    with pytest.raises(CaptureError, match=r"Mamba2ForCausalLM .* time_step_limit, \(0.01, 1.0\), to prompts only"):
        sk.capture_decoder(transformers.Mamba2ForCausalLM(limited).eval())


@pytest.mark.campaign
def test_time_steps_are_limited_as_in_transformers():
    """Zamba-2 limits the time steps of prompts, of one token too, and not those of the tokens after them."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Zamba2Config(
        **sizes, vocab_size=96, mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=2, chunk_size=4, num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"], adapter_rank=4, attention_head_dim=16, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Zamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-9.0)  # time steps of about 0.0001, below the limit
            elif parameter.ndim > 1:
                parameter.normal_(std=0.3)
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
    ids = torch.randint(3, 96, (2, 6))
    whole = [model.generate(ids[:, :n], max_new_tokens=12, do_sample=False, pad_token_id=0) for n in (6, 1)]
    generator = sk.generator(model, split, ["cpu:0", "cpu:1"])
    for n, want in zip((6, 1), whole, strict=True):
        assert torch.equal(generator.generate(ids[:, :n], max_new_tokens=12, do_sample=False, pad_token_id=0), want)
