"""Make the inputs of one step of a decoder that reads what an encoder has computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splitkit.frontends.decoder.example_caches import cache_like, fill, model_device, not_a_decoder
from splitkit.frontends.decoder.generate_calls import QUERY, GenerateCalls, in_order


def example_with_encoder(model: nn.Module, batch: int, tokens: int, filled: bool) -> dict[str, Any]:
    """Return keyword inputs: ``QUERY`` tokens, caches of the positions before them, and the output of an encoder.

    Args:
        model: an encoder and decoder, such as T5.
        batch: sequences.
        tokens: positions in the caches and of the step together, and those of the encoder, if it may have any number.
        filled: whether the keys and values of the encoder's output are in the cache, and not to be computed.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    config: Any = model.config
    device, width = model_device(model), _encoder_width(model)
    dtype = getattr(model, "dtype", torch.float32)
    length = getattr(config, "max_source_positions", tokens)

    def encoded(sequences: int, positions: int) -> Any:
        return BaseModelOutput(torch.zeros(sequences, positions, width, dtype=dtype, device=device))

    own, crossed = DynamicCache(), DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    first = {"decoder_input_ids": one, "encoder_outputs": encoded(1, 1)}
    kept, cross = fill(model, {**first, "past_key_values": EncoderDecoderCache(own, crossed)}, own, crossed)
    past = tokens - QUERY
    given = cache_like(cross, batch, length, device) if filled else DynamicCache()
    known = {
        "decoder_input_ids": torch.zeros(batch, QUERY, dtype=torch.long, device=device),
        "encoder_outputs": encoded(batch, length),
        "attention_mask": torch.ones(batch, length, dtype=torch.long, device=device),
        "decoder_attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "decoder_position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "logits_to_keep": 1,
        "past_key_values": EncoderDecoderCache(cache_like(kept, batch, past, device), given),
        "use_cache": True,
    }

    def cache_of(sequences: int, positions: int) -> Any:
        meta = torch.device("meta")
        return EncoderDecoderCache(
            cache_like(kept, sequences, positions, meta), cache_like(cross, sequences, length, meta)
        )

    calls = GenerateCalls(model, "past_key_values", lambda sequences: encoded(sequences, length))
    return in_order(model, known, calls.step(batch, tokens, cache_of))


def _encoder_width(model: Any) -> int:
    own = getattr(model.get_encoder(), "config", model.config)
    for config in (own, own.get_text_config(), model.config):
        for name in ("d_model", "hidden_size"):
            if isinstance(width := getattr(config, name, None), int):
                return width
    raise not_a_decoder(model, "its configuration does not say how wide the output of its encoder is")
