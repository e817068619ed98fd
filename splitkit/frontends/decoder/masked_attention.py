"""Attention that is captured for every number of tokens: with a mask, and without a branch for a single token.

transformers' ``sdpa`` asks whether there is more than one token before it looks whether there is a mask, and groups
heads in another way for a single token. Export would take the answer for granted in all calls of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from splitkit.graph.symbols import symbols_of


@contextmanager
def masked_attention() -> Iterator[set[str]]:
    """Let transformers' models compute ``sdpa`` attention by `_masked` where that is the same.

    Yields:
        The classes of attention to earlier tokens that without a mask is not causal.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before, not_causal = functions["sdpa"], set[str]()

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if (attention_mask is None and causal) or options.get("softcap") is not None:
            found: tuple[torch.Tensor, None] = before(module, query, key, value, attention_mask, **options)
            return found
        if not causal and attention_mask is not None:
            # an encoder's output has no positions of this step
            own = {*symbols_of(query.shape[2])}.intersection(symbols_of(attention_mask.shape[-1]))
            not_causal.update([type(module).__name__] if own else [])
        return _masked(module, query, key, value, attention_mask, **options), None

    functions["sdpa"] = attend
    try:
        yield not_causal
    finally:
        # the entry of the instance, which hides that of the class
        del functions["sdpa"]
        if functions["sdpa"] is not before:
            functions["sdpa"] = before


def _masked(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the attention, ``[sequences, query, heads, head_dim]``."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if position_bias is not None:
        attention_mask = _with_bias(position_bias, attention_mask, torch.finfo(key.dtype).min)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).contiguous()


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None, lowest: float) -> torch.Tensor:
    if mask is None:
        return bias.contiguous()
    return (torch.where(mask, bias, lowest) if mask.dtype == torch.bool else bias + mask).contiguous()
