"""One graph of a decoder's step runs prompts, chunks and single tokens, with caches of any length."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import these_first
from decoders import DECODERS, FAMILIES, decoder, empty_cache
from torch._subclasses.fake_tensor import FakeTensor

import splitkit as sk
from splitkit.frontends.capture_decoder import drop_unread
from splitkit.graph.caches import caches_of

transformers = pytest.importorskip("transformers")

FIRST = ("gpt2",)
"""What runs always; `test_local_generator.py` generates with a sliding window and grouped heads too."""

STEPS = [(2, 11, 7), (1, 11, 1), (2, 11, 1), (3, 0, 5), (1, 0, 1), (1, 1, 1), (3, 3, 3)]
"""Sequences, positions in the caches, and tokens; 0 and 1 are sizes that export would make constants of."""


@pytest.mark.parametrize("family", these_first(FIRST, sorted({*FAMILIES} - {*FIRST})))
def test_a_step_of_any_size_gives_what_the_model_gives(family):
    model, gm = DECODERS[family]
    for sequences, past, query in STEPS:
        ids = torch.randint(3, 96, (sequences, past + query))
        mask = torch.ones(sequences, past + query, dtype=torch.long)
        # the second prompt is shorter than the others
        mask[1:2, : min(past, 2)] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        theirs = transformers.DynamicCache()
        with torch.no_grad():
            if past:
                model(ids[:, :past], attention_mask=mask[:, :past], past_key_values=theirs)
            ours = copy.deepcopy(theirs) if past else empty_cache(gm, sequences)
            step = {
                "input_ids": ids[:, past:], "attention_mask": mask, "position_ids": positions[:, past:],
                "use_cache": True, "logits_to_keep": 1,
            }  # fmt: skip
            want, got = model(**step, past_key_values=theirs), gm(**step, past_key_values=ours)
        torch.testing.assert_close(got.logits, want.logits[:, -1:], atol=2e-5, rtol=1e-4)
        assert got.past_key_values.get_seq_length() == past + query
        # the graph returns a new cache
        assert ours.get_seq_length() == past


def test_the_caches_of_a_graph_are_its_inputs_and_outputs_in_order():
    _, gm = DECODERS["llama"]
    caches = caches_of(gm)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert [cache.given.name for cache in caches] == [name for name in names if name.startswith("past_key_values")]
    assert [cache.updated for cache in caches] == list(gm.graph.output_node().all_input_nodes)[1:]
    assert all(cache.given in cache.updated.all_input_nodes for cache in caches)


def test_no_size_is_read_from_the_cache_of_a_later_layer():
    """A stage would otherwise have to wait for it, or be given that cache."""
    _, gm = DECODERS["llama"]
    sizes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert sizes and not [node for node in sizes if "layers_1" in node.args[0].name]


def one_layer():
    config = copy.deepcopy(decoder("llama").config)
    config.num_hidden_layers = 1
    return type(decoder("llama"))(config).eval()


def test_the_example_has_the_sequences_and_positions_that_were_asked_for():
    gm = sk.capture_decoder(one_layer(), batch=3, tokens=17)
    assert [int(size) for size in caches_of(gm)[0].updated.meta["val"].shape] == [3, 2, 17, 8]


def test_a_graph_without_a_cache_among_its_inputs_has_no_caches():
    model, _ = DECODERS["gpt2"]
    assert caches_of(sk.capture(model, torch.zeros(1, 4, dtype=torch.long), use_cache=True)) == ()
    assert caches_of(torch.fx.symbolic_trace(torch.nn.Linear(2, 2))) == ()


def test_a_model_on_meta_is_captured_without_memory():
    with torch.device("meta"):
        model = one_layer()
    gm = sk.capture_decoder(model)
    assert all(parameter.is_meta for parameter in gm.parameters()) and len(caches_of(gm)) == 2


def test_attention_is_the_models_own_after_a_capture():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    sk.capture_decoder(DECODERS["gpt2"][0])
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_capture_takes_a_cache_among_its_inputs():
    model, _ = DECODERS["gpt2"]
    with torch.no_grad():
        cache = model(torch.randint(96, (2, 5)), use_cache=True).past_key_values
        want = model(torch.ones(2, 1, dtype=torch.long), past_key_values=copy.deepcopy(cache))
        gm = sk.capture(model, torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
        got = sk.split(gm, sk.policies.Stages(2))(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    torch.testing.assert_close(got.logits, want.logits)
    with pytest.raises((RuntimeError, ValueError)):
        gm(torch.ones(2, 1, dtype=torch.long), past_key_values=got.past_key_values)


def test_what_is_no_decoder_is_refused():
    with pytest.raises(sk.errors.CaptureError, match=r"SK401: Linear .* not a model of transformers"):
        sk.capture_decoder(torch.nn.Linear(2, 2).eval())
    with pytest.raises(sk.errors.CaptureError, match="training mode"):
        sk.capture_decoder(DECODERS["gpt2"][0].train())
    DECODERS["gpt2"][0].eval()
    with pytest.raises(sk.errors.CaptureError, match="tokens is 2"):
        sk.capture_decoder(DECODERS["gpt2"][0], tokens=2)
    encoder = transformers.BertModel(
        transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(sk.errors.CaptureError, match="SK401: BertModel cannot be captured as a decoder"):
        sk.capture_decoder(encoder.eval())


_LAYER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
_SIZES = {**_LAYER, "vocab_size": 32}


def dynamic_rope():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, rope_parameters=rope))


def mpt():
    config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32)
    return transformers.MptForCausalLM(config)


def blip2():
    text = {"model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = {"vision_config": _LAYER, "qformer_config": _SIZES, "text_config": {**text, "word_embed_proj_dim": 16}}
    return transformers.Blip2ForConditionalGeneration(transformers.Blip2Config(**config))


def speech_to_text():
    """An encoder that returns a quarter of the positions that it reads, whose mask generate may be given."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "conv_channels": 16}
    config = transformers.Speech2TextConfig(**sizes, **heads, input_feat_per_channel=8, max_source_positions=40)
    return transformers.Speech2TextForConditionalGeneration(config)


def two_ways():
    """A mask that is not causal in a prompt without padding, where generate gives none."""
    config = transformers.GemmaConfig(**_SIZES, num_key_value_heads=1, head_dim=8)
    config.use_bidirectional_attention = True
    return transformers.GemmaForCausalLM(config)


REFUSED = {
    dynamic_rope: "branches on a value that depends on the data",
    blip2: "its generate, given a prompt of text, fails",
    two_ways: "GemmaAttention is not causal without a mask",
    mpt: "could not be captured by export",
    speech_to_text: "its attention_mask is of what its encoder reads, which is longer than its output",
}


@pytest.mark.parametrize("make", these_first(list(REFUSED)[:3], list(REFUSED)[3:]))
def test_a_family_whose_step_cannot_be_captured_is_refused_with_the_reason(make):
    with pytest.raises(sk.errors.CaptureError, match="SK401") as refused:
        sk.capture_decoder(make().eval())
    assert REFUSED[make] in str(refused.value)
    assert "model.generate" in refused.value.remedy


def moonshine():
    """An encoder that returns a mask of its own positions, of which there are fewer than it reads."""
    config = transformers.MoonshineConfig(**_SIZES, pad_token_id=0)
    sound, mask = torch.randn(2, 2000), torch.ones(2, 2000, dtype=torch.long)
    mask[0, 1200:] = 0
    return transformers.MoonshineForConditionalGeneration(config), {"input_values": sound, "attention_mask": mask}


def nllb_moe():
    """An encoder that may return logits of its routers; without sparse layers, whose steps depend on their data."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "num_experts": 2}
    config = transformers.NllbMoeConfig(**sizes, **heads, encoder_sparse_step=0, decoder_sparse_step=0)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 1, 1]])
    given = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    return transformers.NllbMoeForConditionalGeneration(config), given


@pytest.mark.parametrize("make", [moonshine, nllb_moe])
@pytest.mark.parametrize("padded", [True, False])
def test_what_an_encoder_returns_besides_hidden_states_is_given_to_the_step(make, padded):
    torch.manual_seed(0)
    model, given = make()
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id, model.generation_config.decoder_start_token_id = None, 3
    given = given if padded else {name: x for name, x in given.items() if name != "attention_mask"}
    given |= {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(**given)
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(1))
    assert torch.equal(sk.generator(model, split, ["cpu:0"]).generate(**given), want)


class Vmapped(torch.nn.Module):
    def forward(self, x):
        unread = x.view(-1).exp()  # noqa: F841
        return torch.vmap(lambda row: row * torch.arange(3))(x)


def test_ops_that_nothing_reads_leave_a_graph_and_levels_of_vmap_stay():
    gm = sk.capture(Vmapped(), x := torch.randn(2, 3))
    drop_unread(gm)
    assert torch.equal(gm(x), Vmapped()(x))
    assert not [n for n in gm.graph.nodes if "exp" in n.name or "view" in n.name]


def test_a_model_without_a_head_for_tokens_is_refused():
    with pytest.raises(sk.errors.CaptureError, match="such as LlamaForCausalLM in place of LlamaModel"):
        sk.capture_decoder(transformers.LlamaModel(transformers.LlamaConfig(**_SIZES)).eval())


class FirstStepDiffers(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args, is_first_iteration=False, **kwargs):
        given = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        return given if is_first_iteration else {**given, "position_ids": given["position_ids"][None]}


def test_a_model_whose_steps_are_given_different_inputs_is_refused():
    model = FirstStepDiffers(transformers.LlamaConfig(**_SIZES)).eval()
    with pytest.raises(
        sk.errors.CaptureError, match=r"position_ids as torch.int64 of 2 dimensions and then as torch.int64 of 3"
    ):
        sk.capture_decoder(model)


class AllTokens(transformers.LlamaForCausalLM):
    """As CPM-Ant: each step reads all tokens, and leaves out itself what the caches hold."""

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length=None, **kwargs)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True, **kwargs):
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        return super().forward(input_ids[:, past:], attention_mask, past_key_values=past_key_values)


def test_a_model_whose_steps_read_all_tokens_is_refused():
    with pytest.raises(sk.errors.CaptureError, match="gives it all tokens in each step, also those in the caches"):
        sk.capture_decoder(AllTokens(transformers.LlamaConfig(**_SIZES)).eval())


def test_what_a_model_returns_in_front_of_its_caches_is_left_out():
    config = transformers.MoshiConfig(**_LAYER, vocab_size=32, ffn_dim=48, num_key_value_heads=2, head_dim=8)
    model = transformers.MoshiForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    given = {"input_ids": torch.randint(3, 30, (2, 5)), "max_new_tokens": 3, "do_sample": False}
    want = model.generate(**given)
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(1))
    assert list(model(given["input_ids"]))[:3] == ["logits", "last_hidden_state", "past_key_values"]
    assert torch.equal(sk.generator(model, split, ["cpu:0"]).generate(**given), want)


def test_what_a_model_keeps_of_a_call_is_not_left_fake():
    """The frequencies that longrope keeps: as fake tensors they failed captures, and a copy of them memory itself."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Phi3Config(
        **sizes, vocab_size=96, max_position_embeddings=64, original_max_position_embeddings=12, pad_token_id=0,
        eos_token_id=None, rope_parameters={**rope, "original_max_position_embeddings": 12},
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(1))
    held = [value for module in model.modules() for value in vars(module).values()]
    assert not any(isinstance(value, FakeTensor) for value in held)
    for length in (5, 10, 14):  # the second prompt becomes longer than the short factors reach
        options = {"max_new_tokens": 4, "do_sample": False}
        ids = torch.arange(3, 3 + length)[None]
        ours = sk.generator(model, split, "cpu").generate(ids, **options)
        assert torch.equal(ours, model.generate(ids, **options))
