"""Recurrent states that are captured for every number of tokens: mixers go on from the state that they are given.

The mixers of transformers have a branch for a single token, which writes the states in place, and one for prompts,
which in Mamba begins with an empty state. In a capture they take the second one, with a scan that reads the state::

    state = cache.get_recurrent_state(layer)      y, state' = selective_scan(x, .., state)      cache.update(state')
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from splitkit.graph.ops.state_scans import CHUNKED_SCAN, LIMITED_STEPS, SELECTIVE_SCAN
from splitkit.graph.symbols import symbols_of

_NO_LIMIT = (0.0, float("inf"))


class _LastState:
    """The recurrent state that a mixer has read, until its scan takes it.

    Attributes:
        refused: why a mixer cannot be captured; empty if all can.
        before: the tokens in the cache before the step, a number or a symbol; ``None`` if the cache does not say.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._cache: Any = None
        self._scans, self.refused = 0, ""
        self.before: int | torch.SymInt | None = None

    def read(self, cache: Any, state: torch.Tensor | None) -> torch.Tensor | None:
        """Note the state that a mixer reads."""
        if cache is not self._cache:
            # the first mixer of a run, before which the last attention has not run
            self._cache, self.before = cache, _positions(cache)
        self._state, self._scans = state, 0
        return state

    def take(self, dims: int) -> torch.Tensor | None:
        """Return the state for a scan; of Zamba, each head has a scan of its own."""
        state, self._scans = self._state, self._scans + 1
        return state if state is None or state.dim() == dims else state[:, self._scans - 1]

    def written(self) -> None:
        """Note that a mixer writes its state."""
        if not self._scans:
            self.refused = "it computes a state from token to token in a way that is neither Mamba's nor Mamba-2's"
        self._state, self._scans = None, 0


@contextmanager
def continued_states(model: nn.Module) -> Iterator[_LastState]:
    """Let the mixers of a model go on from the states in the cache, whatever the number of tokens.

    Yields:
        An object whose ``refused`` says afterwards why the model has mixers that cannot be captured.
    """
    from transformers.cache_utils import Cache, LinearAttentionLayer

    last = _LastState()
    read = Cache.get_recurrent_state

    def get(self: Any, layer_idx: int, state_idx: int = 0) -> Any:
        return last.read(self, read(self, layer_idx, state_idx))

    def update(self: Any, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        last.written()
        return _set_recurrent_state(self, recurrent_states, state_idx)

    changed: list[tuple[Any, str, Any]] = [
        (Cache, "get_recurrent_state", get),
        (LinearAttentionLayer, "update_recurrent_state", update),
        (LinearAttentionLayer, "update_conv_state", _update_conv_state),
    ]
    own = {"mamba_selective_scan": _selective(last), "mamba2_chunk_scan": _chunked(last)}
    own["apply_mask_to_padding_states"] = _without_padding
    for file in {type(module).__module__ for module in model.modules()}:
        source = sys.modules[file]
        changed += [(source, name, function) for name, function in own.items() if name in vars(source)]
    before = [(where, name, vars(where)[name]) for where, name, _ in changed]
    try:
        for where, name, function in changed:
            setattr(where, name, function)
        yield last
    finally:
        for where, name, function in before:
            setattr(where, name, function)


def _positions(cache: Any) -> int | torch.SymInt | None:
    """Return the positions of the last layer with keys; ``None`` without one, or if it holds those of this step."""
    layer = next((layer for layer in reversed(cache.layers) if hasattr(layer, "get_seq_length")), None)
    if layer is None:
        return None
    count: Any = layer.keys.shape[2] if isinstance(layer.keys, torch.Tensor) and layer.keys.dim() == 4 else 0
    return count if isinstance(count, int) or len(symbols_of(count)) == 1 else None


def _set_recurrent_state(layer: Any, state: torch.Tensor, i: int) -> torch.Tensor:
    before = layer.recurrent_states[i]
    layer.dtype, layer.device = layer.dtype or state.dtype, layer.device or state.device
    same = before is None or before.dtype == state.dtype
    layer.recurrent_states[i] = state if same else state.to(before.dtype)
    layer.is_recurrent_states_initialized[i] = True
    return state


def _update_conv_state(
    layer: Any, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
) -> torch.Tensor:
    """Do what a layer of transformers does, but make a new state instead of writing the old one."""
    before = layer.conv_states[state_idx]
    width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
    if before is not None and layer.has_previous_state[state_idx]:
        whole = torch.cat([before, conv_states], dim=-1)
    else:
        whole = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
    layer.dtype, layer.device = layer.dtype or conv_states.dtype, layer.device or conv_states.device
    layer.conv_states[state_idx] = whole[..., -width:].to(whole.dtype if before is None else before.dtype, copy=True)
    layer.conv_kernel_size[state_idx] = width
    layer.is_conv_states_initialized[state_idx] = layer.has_previous_state[state_idx] = True
    return whole


def _without_padding(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Set padding to zero, by the last columns of a mask for all positions."""
    if attention_mask is None:
        return hidden_states
    mask = attention_mask[:, -hidden_states.shape[1] :, None]
    return (hidden_states * mask).to(hidden_states.dtype)


def _selective(last: _LastState) -> Callable[..., Any]:
    """Return what replaces transformers' ``mamba_selective_scan``; sizes as there."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        state = last.take(3)
        if state is None:
            state = hidden_states.new_zeros((*hidden_states.shape[:2], A.shape[-1]), dtype=torch.float)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = nn.functional.softplus(dt) if delta_softplus else dt
        out, state = SELECTIVE_SCAN(hidden_states, dt, A, B.transpose(1, 2), C.transpose(1, 2), state)
        out = out if D is None else out + hidden_states * D[None, :, None]
        out = out if z is None else out * nn.functional.silu(z)
        return (out, state) if return_last_state else out

    return scan


def _chunked(last: _LastState) -> Callable[..., Any]:
    """Return what replaces transformers' ``mamba2_chunk_scan``; sizes as there."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        state = last.take(4)
        if state is None:
            shape = (hidden_states.shape[0], *hidden_states.shape[2:], B.shape[-1])
            state = hidden_states.new_zeros(shape, dtype=torch.float)
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        if tuple(dt_limit) != _NO_LIMIT:
            if last.before is None:
                last.refused = f"transformers applies its time_step_limit, {tuple(dt_limit)}, to prompts only"
            else:
                dt = LIMITED_STEPS(dt, *dt_limit, last.before)
        out, state = CHUNKED_SCAN(hidden_states, dt, A, B, C, state, chunk_size)
        out = out if D is None else out + D[..., None] * hidden_states.float()
        return (out, state) if return_final_states else out

    return scan
