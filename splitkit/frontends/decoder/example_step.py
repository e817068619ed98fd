"""Make the inputs of one step of a decoder of transformers, with which it is captured."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from splitkit.frontends.decoder.example_caches import cache_like, device_of, fill

QUERY = 3
"""Tokens of the step; more than one, so that no branch for a single token is taken."""


def example_step(model: nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    """Return keyword inputs of a causal language model: ``QUERY`` tokens, and caches of the positions before them.

    Args:
        model: the model.
        batch: sequences.
        tokens: positions in the caches and of the step together.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    from transformers import DynamicCache

    device, cache = device_of(model), DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    (layers,) = fill(model, {"input_ids": one, "past_key_values": cache}, cache)
    past = tokens - QUERY
    known = {
        "input_ids": torch.zeros(batch, QUERY, dtype=torch.long, device=device),
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "logits_to_keep": 1,
    }
    accepted = inspect.signature(model.forward).parameters
    return {
        **{name: value for name, value in known.items() if name in accepted},
        "past_key_values": cache_like(layers, batch, past, device),
        "use_cache": True,
    }
