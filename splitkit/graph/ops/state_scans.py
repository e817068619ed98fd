"""Ops that run a state space model over the tokens of a step, from the state that the step before it left.

A step has any number of tokens: a prompt, a chunk of one, or a single token. The state has the same size after each::

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]        y[t] = C[t] h[t]

``selective_scan`` is Mamba's (https://arxiv.org/abs/2312.00752), in which A is a matrix; it runs token after token.
``chunked_scan`` is Mamba-2's (https://arxiv.org/abs/2405.21060), in which A is a number for each head; a chunk of
tokens is a few products of matrices. transformers has the same arithmetic, but other code for prompts than for single
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkit._torch import define_op


def _selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out, held = x.new_empty(x.shape), state.clone()
    for i in range(x.shape[2]):
        now = dt[:, :, i, None]
        held = torch.exp(a * now) * held + (now * b[:, None, i].float()) * x[:, :, i, None].float()
        out[:, :, i] = (held.to(x.dtype) @ c[:, i, :, None])[:, :, 0]
    return out, held.to(state.dtype)


def _chunked_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    out, held, groups = x.new_empty(x.shape, dtype=torch.float), state.float(), x.shape[2] // b.shape[2]
    for start in range(0, x.shape[1], chunk):
        part = slice(start, start + chunk)
        decay = (dt[:, part].float() * a).transpose(1, 2)  # [sequences, heads, tokens]
        since = decay.cumsum(-1)
        given = (x[:, part].float() * dt[:, part, :, None].float()).transpose(1, 2)
        keys, queries = (
            value[:, part].float().transpose(1, 2).repeat_interleave(groups, dim=1, output_size=x.shape[2])
            for value in (b, c)
        )
        scores = (queries @ keys.transpose(2, 3)) * torch.exp(_between(decay))
        made = scores @ given + (queries @ held.transpose(2, 3)) * torch.exp(since)[..., None]
        out[:, part] = made.transpose(1, 2)
        left = torch.exp(since[:, :, -1:] - since)[..., None]
        held = held * torch.exp(since[:, :, -1:, None]) + (given * left).transpose(2, 3) @ keys
    return out, held.to(state.dtype, copy=held is state)


def _limited(dt: Tensor, least: float, most: float, before: int) -> Tensor:
    return dt.clamp(least, most) if not before or dt.shape[1] > 1 else dt.clone()


def _between(decay: Tensor) -> Tensor:
    """Return the sums of ``decay[s + 1 .. t]``, ``[.., t, s]``; minus infinity for s after t."""
    count = decay.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=decay.device).tril(-1)
    sums = decay[..., :, None].expand(*decay.shape, count).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(later.T, -torch.inf)


def _like(state: Tensor, x: Tensor) -> Tensor:
    # so that a graph with variable sizes knows that there are as many states as sequences
    torch._check(state.shape[0] == x.shape[0])  # type: ignore[no-untyped-call]
    return torch.empty_like(state)


SELECTIVE_SCAN: Any = define_op(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state) -> (Tensor, Tensor)",
    _selective_scan,
    lambda x, dt, a, b, c, state: (x.new_empty(x.shape), _like(state, x)),
    inference=True,
)
"""``(x, dt, a, b, c, state) -> (y, state)``.

``x``, ``dt`` and ``y`` are ``[sequences, channels, tokens]``, ``a`` is ``[channels, states]``, ``b`` and ``c`` are
``[sequences, tokens, states]``, and ``state`` is ``[sequences, channels, states]``.
"""
CHUNKED_SCAN: Any = define_op(
    "chunked_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, int chunk) -> (Tensor, Tensor)",
    _chunked_scan,
    lambda x, dt, a, b, c, state, chunk: (x.new_empty(x.shape, dtype=torch.float), _like(state, x)),
    inference=True,
)
"""``(x, dt, a, b, c, state, chunk) -> (y, state)``; ``y`` is float32.

``x`` and ``y`` are ``[sequences, tokens, heads, channels]``, ``dt`` is ``[sequences, tokens, heads]``, ``a`` is
``[heads]``, ``b`` and ``c`` are ``[sequences, tokens, groups, states]``, ``state`` is
``[sequences, heads, channels, states]``, and ``chunk`` is the most tokens that are computed together.
"""
LIMITED_STEPS: Any = define_op(
    "limited_steps(Tensor dt, float least, float most, SymInt before) -> Tensor",
    _limited,
    lambda dt, least, most, before: torch.empty_like(dt),
    inference=True,
)
"""``(dt, least, most, before) -> dt``: limits the time steps of a prompt, ``[sequences, tokens, heads]``.

transformers does not limit those of a single token with others ``before`` it.
"""
SCANS: tuple[Any, ...] = (SELECTIVE_SCAN, CHUNKED_SCAN, LIMITED_STEPS)
"""The ops of this file. They write no argument, and their results share no memory with one."""
