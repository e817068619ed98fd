"""Architectures of ``transformers``, from tiny configurations: a line each, by how they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Row

Inputs = Callable[[Any, bool], dict[str, Any]]
"""From the configuration, and whether to train, to what the model is called with."""

SIZES: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCDEC: Mapping[str, Any] = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
TEXT: Mapping[str, Any] = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}


def ids(words: int, *shape: int) -> Tensor:
    """Tokens, none of them special."""
    return torch.randint(5, words, shape or (2, 16))


def causal(config: Any, training: bool) -> dict[str, Any]:
    """``labels`` is the very same tensor, as most people write it."""
    tokens = ids(config.vocab_size)
    return {"input_ids": tokens, "labels": tokens} if training else {"input_ids": tokens}


def masked(config: Any, training: bool) -> dict[str, Any]:
    """As a tokenizer gives it: with a mask, here of a shorter second sentence."""
    tokens = ids(config.vocab_size)
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    found = {"input_ids": tokens, "attention_mask": mask}
    return found | {"labels": tokens} if training else found


def classes(config: Any, training: bool) -> dict[str, Any]:
    """A label a sentence."""
    found = masked(config, False)
    return found | {"labels": torch.tensor([0, 1])} if training else found


def span(config: Any, training: bool) -> dict[str, Any]:
    """Where the answer starts and ends."""
    found = masked(config, False)
    answer = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}
    return found | answer if training else found


def boxes(config: Any, training: bool) -> dict[str, Any]:
    """Words and where they stand on the page."""
    box = torch.tensor([10, 10, 50, 60]).expand(2, 16, 4).contiguous()
    found = masked(config, False) | {"bbox": box}
    return found | {"labels": torch.randint(0, 2, (2, 16))} if training else found


def seq2seq(config: Any, training: bool) -> dict[str, Any]:
    """The decoder's inputs are made of the labels, or given."""
    found = masked(config, False)
    target = ids(config.vocab_size, 2, 8)
    return found | ({"labels": target} if training else {"decoder_input_ids": target})


def hf(
    family: str, name: str, inputs: Inputs, base: Mapping[str, Any] | None = SIZES, make: Any = None, **sizes: Any
) -> Row:
    """A row of the class ``name``: ``make`` takes transformers and gives the configuration, if sizes do not do."""

    def build(training: bool) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        kind = getattr(transformers, name)
        config = make(transformers) if make else kind.config_class(**{**(base or {}), **sizes})
        model = kind(config)
        return model, inputs(config, training)

    return Row(name, family, "transformers", build)


def decoders(family: str, *names: str | tuple[str, Mapping[str, Any]]) -> list[Row]:
    """Causal language models."""
    pairs = [(name, {}) if isinstance(name, str) else name for name in names]
    return [hf(family, f"{name}ForCausalLM", causal, **sizes) for name, sizes in pairs]


MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

# fmt: off
ROWS: list[Row] = [
    *decoders(
        "decoder", "GPTNeoX", "GPTBigCode", "Bloom", "Falcon", "Phi", "Phi3", "Mistral", "Qwen2", "Qwen3",
        "StableLm", "Starcoder2", "Olmo", "Olmo2", "Cohere", "Cohere2", "Granite", "Persimmon", "BioGpt",
        "Nemotron", "SmolLM3", "Arcee", "Apertus", "SeedOss", "BitNet", "Exaone4", "DiffLlama",
        ("GPTJ", {"rotary_dim": 4}), ("CodeGen", {"rotary_dim": 4}),
        ("GPTNeo", {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("Mpt", {"base": None, "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 64}),
        ("XGLM", {"base": None, "vocab_size": 96, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
        ("Gemma", {"head_dim": 8}), ("Gemma2", {"head_dim": 8}), ("Gemma3", {"head_dim": 8}),
        ("Glm", {"head_dim": 8}), ("Glm4", {"head_dim": 8}), ("Helium", {"head_dim": 8}),
        ("ModernBertDecoder", {"cls_token_id": 1, "sep_token_id": 2}),
    ),
    hf("decoder", "CTRLLMHeadModel", causal, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=64),
    hf("decoder", "OpenAIGPTLMHeadModel", causal, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    *decoders(
        "MoE", ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 32}), ("Qwen3Moe", EXPERTS),
        ("Olmoe", EXPERTS), ("Phimoe", LOCAL), ("GraniteMoe", LOCAL),
        ("JetMoe", LOCAL | {"kv_channels": 8}), ("GptOss", LOCAL | {"head_dim": 8}), ("DeepseekV2", MLA),
        ("DeepseekV3", MLA), ("Glm4Moe", MLA | {"head_dim": 8}), ("FlexOlmo", EXPERTS),
        ("MiniMax", LOCAL | {"head_dim": 8}),
        ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
        ("Jamba", EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
        ("Dbrx", {"base": None, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 96,
                  "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
                  "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}),
    ),
    hf("MoE", "SwitchTransformersForConditionalGeneration", seq2seq, d_model=32, d_kv=8, d_ff=64, num_layers=2,
       num_decoder_layers=2, num_heads=4, num_experts=4, decoder_start_token_id=0, num_sparse_encoder_layers=1,
       num_sparse_decoder_layers=1),
    hf("MoE", "NllbMoeForConditionalGeneration", seq2seq, ENCDEC, num_experts=4, expert_capacity=16, encoder_layers=2,
       decoder_layers=2,
       encoder_sparse_step=2, decoder_sparse_step=2),
    *decoders(
        "state space", ("Mamba", {"state_size": 8}), ("FalconMamba", {"state_size": 8}),
        ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
        ("Rwkv", {"attention_hidden_size": 32}),
        ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8}),
        ("Bamba", {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
                   "mamba_chunk_size": 8, "attn_layer_indices": [1]}),
        ("FalconH1", {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64,
                      "mamba_n_groups": 1, "mamba_chunk_size": 8, "head_dim": 8}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
        ("Qwen3Next", EXPERTS | {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                                 "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                 "layer_types": ["linear_attention", "full_attention"],
                                 "shared_expert_intermediate_size": 32}),
    ),
    *(hf("encoder", f"{name}ForMaskedLM", masked, **sizes) for name, sizes in (
        ("Roberta", {}), ("Electra", {"embedding_size": 32}), ("Albert", {"embedding_size": 16}), ("ModernBert", {}),
        ("DistilBert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}),
        ("Nystromformer", {"num_landmarks": 16, "segment_means_seq_len": 16}),
        ("RoFormer", {"embedding_size": 32}), ("MegatronBert", {}), ("MPNet", {}), ("ConvBert", {"embedding_size": 32}),
        ("SqueezeBert", {"embedding_size": 32}), ("Longformer", {"attention_window": 8}), ("Esm", {"mask_token_id": 4}),
        ("MobileBert", {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
        ("RemBert", {"input_embedding_size": 16, "output_embedding_size": 16}), ("EuroBert", {}), ("NomicBert", {}),
    )),
    *(hf("encoder", f"{name}ForSequenceClassification", classes, **sizes) for name, sizes in (
        ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}),
        ("DebertaV2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
        ("Funnel", {"base": {}, "vocab_size": 96, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
                    "block_sizes": [1, 1], "num_decoder_layers": 1}),
        ("XLNet", {"base": {}, "vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
        ("BigBird", {"block_size": 4, "num_random_blocks": 1}), ("Ernie", {}), ("Canine", {"num_hash_buckets": 32}),
    )),
    hf("encoder", "FNetForMaskedLM", causal),
    hf("encoder", "XLMWithLMHeadModel", masked, n_words=96, emb_dim=32, n_layers=2, n_heads=4),
    hf("encoder", "IBertForQuestionAnswering", span, TEXT),
    hf("encoder", "SplinterForQuestionAnswering", span, TEXT),
    hf("encoder", "LayoutLMForTokenClassification", boxes, TEXT),
    hf("encoder", "LiltForTokenClassification", boxes, TEXT | {"hidden_size": 48}, channel_shrink_ratio=4),
    *(hf("encoder-decoder", f"{name}ForConditionalGeneration", seq2seq, **{"base": ENCDEC} | sizes) for name, sizes in (
        ("Bart", {}), ("MBart", {}), ("Pegasus", {}), ("M2M100", {}), ("BlenderbotSmall", {}), ("PLBart", {}),
        ("LED", {"attention_window": [8], "max_encoder_position_embeddings": 64,
                 "max_decoder_position_embeddings": 64}),
        ("BigBirdPegasus", {"attention_type": "original_full"}),
        ("PegasusX", {"num_global_tokens": 4, "block_size": 8}),
        ("ProphetNet", {"base": {}, "vocab_size": 96, "num_encoder_layers": 1, "num_decoder_layers": 1,
                        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "hidden_size": 32,
                        "ngram": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 0}),
        ("LongT5", {"d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "local_radius": 4,
                    "decoder_start_token_id": 0}),
        ("UMT5", {"d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}),
    )),
    hf("encoder-decoder", "MarianMTModel", seq2seq, ENCDEC),
]
