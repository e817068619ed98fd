"""Make example inputs of one step of a transformers decoder, for its capture."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from splitkit.frontends.decoder.example_caches import cache_like, empty_cache, fill, model_device
from splitkit.frontends.decoder.generate_calls import QUERY, GenerateCalls, in_order
from splitkit.graph.caches import ARGUMENTS


def example_step(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Return keyword inputs of a causal language model: ``QUERY`` tokens, and caches of the positions before them.

    Args:
        model: the model.
        batch: sequences.
        tokens: positions in the caches and of the step together.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    device, cache, parameters = model_device(model), empty_cache(model), inspect.signature(model.forward).parameters
    kept = next((argument for argument in ARGUMENTS if argument in parameters), ARGUMENTS[0])
    # with images, the tokens are embedded before the step
    embedded = model.config.get_text_config(decoder=True) is not model.config
    calls = GenerateCalls(model, kept, embedded=embedded)
    (layers,) = fill(model, {**calls.prompt(), kept: cache}, cache)
    past = tokens - QUERY
    further = calls.step(batch, tokens, functools.partial(cache_like, layers, device=torch.device("meta")))
    known = {
        "input_ids": torch.zeros(batch, QUERY, dtype=torch.long, device=device),
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
    }
    shared = {kept: cache_like(layers, batch, past, device), "use_cache": True}
    shared |= {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    if not embedded:
        return in_order(model, {**known, **shared}, further)
    if (positions := further.get("position_ids")) is not None and positions.shape == (1, QUERY):
        # the same for all sequences
        further["position_ids"] = positions.expand(batch, QUERY).contiguous()
    return {**further, **shared}
