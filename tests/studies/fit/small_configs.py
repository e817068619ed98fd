"""Small configurations of the families that `splitkit.fit` is checked on."""

from __future__ import annotations

from typing import Any

import transformers

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 256,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def _made(kind: str, **fields: Any) -> Any:
    return getattr(transformers, kind)(**fields)


def config_of(family: str) -> Any:
    """Return the configuration of a family."""
    makers = {
        "llama": lambda: _made("LlamaConfig", **_GROUPED),
        "mistral": lambda: _made("MistralConfig", **_GROUPED, sliding_window=16),
        "gemma2": lambda: _made("Gemma2Config", **_GROUPED, head_dim=16, sliding_window=16),
        "gemma3": lambda: _made("Gemma3TextConfig", **_GROUPED, head_dim=16, sliding_window=16),
        "mixtral": lambda: _made("MixtralConfig", **_GROUPED, num_local_experts=4),
        "deepseek": lambda: _made(
            "DeepseekV3Config", **_TEXT, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=8, n_group=2,
            topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=32,
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        ),
        "gpt2": lambda: _made("GPT2Config", n_layer=3, n_embd=64, n_head=4, vocab_size=160, n_positions=256),
        "t5": lambda: _made(
            "T5Config", d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, vocab_size=160,
            decoder_start_token_id=0,
        ),
        "whisper": lambda: _made(
            "WhisperConfig", d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=20, vocab_size=160,
            max_source_positions=50, max_target_positions=64, pad_token_id=0, bos_token_id=0, eos_token_id=0,
            decoder_start_token_id=1,
        ),
    }  # fmt: skip
    return makers[family]()


DECODERS = ("llama", "mistral", "gemma2", "gemma3", "mixtral", "deepseek", "gpt2")
ENCODER_DECODERS = ("t5", "whisper")
