"""FLOP formulas for the matmul-like ops that torch's own counter does not cover.

Checked against the registries of torch 2.11, 2.13 and 2.15. A multiplication with an addition is two operations, as in
torch's formulas; ``FlopCounterMode(custom_mapping=FORMULAS)`` then counts a real run as splitkit counts a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_flop_count

from splitkit import _torch
from splitkit._torch import OpOverload

Shape = tuple[int, ...]  # as FlopCounterMode gives them: torch.Size


def attention_flops(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Count two products per head: ``query @ key.T``, and its product with ``value``."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def attention_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Count five products per head, where forward has two: the recomputed scores, and the gradients of the factors."""
    heads, queries, keys = prod(query[:2]), query[-2], key[-2]
    return 2 * heads * queries * keys * (3 * query[-1] + 2 * value[-1])


def _packed_attention(query: Shape, key: Shape, value: Shape, bias: Any, *lengths: Any, **kwargs: Any) -> int:
    """Count as `attention_flops`; concatenated sequences (``[tokens, heads, width]``) all count as the longest one."""
    return attention_flops(query, key, value) if lengths[0] is None else _varlen(query, key, value, *lengths)


def _varlen(query: Shape, key: Shape, value: Shape, *lengths: Any, **kwargs: Any) -> int:
    """Count for ``[tokens, heads, width]``; ``lengths`` are the starts of sequences and the greatest lengths."""
    (starts, *_), _, longest_query, longest_key, *_ = lengths
    return int(2 * (int(starts) - 1) * query[-2] * longest_query * longest_key * (query[-1] + value[-1]))


def _mm(a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    """``[m, k] @ [k, n]``."""
    return 2 * a[0] * a[1] * b[1]


def _addmm(added: Shape, a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return _mm(a, b)


def _mv(matrix: Shape, vector: Shape, *args: Any, **kwargs: Any) -> int:
    """``[m, k] @ [k]``, or ``[k] @ [k]``."""
    return 2 * prod(matrix)


def _addmv(added: Shape, matrix: Shape, vector: Shape, *args: Any, **kwargs: Any) -> int:
    return _mv(matrix, vector)


def _addbmm(added: Shape, a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(a) * b[-1]


def _grouped(a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    """Count for groups over a batch, the rows, the contracted size, or the columns (``[g, m, k] @ [k, n]``)."""
    rows = a[-2:] if len(b) == 2 else a
    return 2 * prod(rows) * b[-1]


def _grouped_backward(a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * _grouped(a, b)


def _packed(a: Shape, scaled: Shape, scales: Shape, *args: Any, **kwargs: Any) -> int:
    """``_weight_int8pack_mm``: ``[m, k] @ [n, k].T``."""
    return 2 * prod(a) * scaled[0]


def _convolution(image: Shape, weight: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Each output element takes a window of ``weight[1:]``; ``weight`` is ``[out, in / groups, *kernel]``."""
    return int(2 * prod(out_shape) * prod(weight[1:]))


def _transposed(image: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    """Each input element gives a window; ``weight`` is ``[in, out / groups, *kernel]``."""
    return 2 * prod(image) * prod(weight[1:])


def _recurrent(steps: Shape, *weights: Any, **kwargs: Any) -> int:
    """Count one product with every weight matrix for each step of each sequence; biases cost nothing."""
    found = weights[0] if isinstance(weights[0], list) else weights[:4]
    return 2 * prod(steps[:-1]) * sum(prod(w) for w in found if len(w) == 2)


def _recurrent_backward(steps: Shape, *weights: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(steps, *weights)


def _trilinear(a: Shape, b: Shape, c: Shape, *expand: Any, **kwargs: Any) -> int:
    """Count two products and a sum of three factors that are expanded to a common shape (``nn.Bilinear``)."""
    spread = [_expanded(shape, at) for shape, at in zip((a, b, c), expand, strict=False)]
    return int(3 * prod(max(sizes) for sizes in zip(*spread, strict=True)))


def _expanded(shape: Shape, at: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for dim in at:
        sizes.insert(dim, 1)
    return sizes


def _distances(a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    """Count ``cdist`` as one product, ``[.., n, d + 2] @ [.., d + 2, m]``: points with norms and ones appended."""
    return 2 * prod(a[:-1]) * (a[-1] + 2) * b[-2]


def _multihead(query: Shape, key: Shape, value: Shape, width: int, *args: Any, **kwargs: Any) -> int:
    """Count the input and output projections and attention; ``query`` is ``[batch, length, width]``."""
    batch, length = query[0], query[1]
    return 2 * batch * length * 4 * width * width + 4 * batch * length * key[1] * width


def _encoder_layer(source: Shape, width: int, *args: Any, **kwargs: Any) -> int:
    """Count attention and the two linear layers after it, whose weights are ``args[12]`` and ``args[14]``."""
    return int(_multihead(source, source, source, width) + 2 * prod(source[:-1]) * (prod(args[12]) + prod(args[14])))


def _selective_scan(x: Shape, dt: Shape, a: Shape, b: Shape, c: Shape, state: Shape, **kwargs: Any) -> int:
    """Count for each token what it adds to the state, the decay of the state, and its product with ``c``."""
    return 6 * x[2] * prod(state)


def _chunked_scan(x: Shape, dt: Shape, a: Shape, b: Shape, c: Shape, state: Shape, chunk: int, **kwargs: Any) -> int:
    """Count four products of matrices for each head: the scores, what they select, and the state in and out."""
    tokens, (sequences, heads, channels, states) = x[1], state
    within = min(chunk, tokens)
    return 2 * sequences * heads * tokens * (within * (states + channels) + 2 * states * channels)


_NAMED: dict[str, Callable[..., int]] = {
    # torch 2.15's own counter has the two formulas of the CPU
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "_scaled_dot_product_fused_attention_overrideable": attention_flops,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward_flops,
    "_scaled_dot_product_attention_math_for_mps": attention_flops,
    "_cudnn_attention_forward": _packed_attention,
    "mv": _mv,
    "dot": _mv,
    "vdot": _mv,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "_int_mm": _mm,
    "_scaled_mm_v2": _mm,
    "_addmm_activation": _addmm,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
    "_weight_int8pack_mm": _packed,
    "mkldnn_convolution": _convolution,
    "miopen_convolution": _convolution,
    "miopen_depthwise_convolution": _convolution,
    "cudnn_convolution_relu": _convolution,
    "cudnn_convolution_add_relu": _convolution,
    "_conv_depthwise2d": _convolution,
    "conv_depthwise3d": _convolution,
    "slow_conv3d_forward": _convolution,
    "slow_conv_dilated2d": _convolution,
    "slow_conv_dilated3d": _convolution,
    "cudnn_convolution_transpose": _transposed,
    "miopen_convolution_transpose": _transposed,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "miopen_rnn": _recurrent,
    "miopen_rnn_backward": _recurrent_backward,
    "_trilinear": _trilinear,
    "_euclidean_dist": _distances,
    "_native_multi_head_attention": _multihead,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}

FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): formula for name, formula in _NAMED.items() if hasattr(torch.ops.aten, name)
}
"""Op -> formula; ops that this torch does not have are left out."""

_CUSTOM: dict[str, Callable[..., int]] = {
    "transformers::grouped_mm_fallback": _grouped,  # what export sees of the experts of a mixture
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
    "torch_attn::_varlen_attn": _varlen,
    "splitkit::selective_scan": _selective_scan,
    "splitkit::chunked_scan": _chunked_scan,
}


def formulas_for(target: object) -> dict[Any, Callable[..., int]]:
    """Return `FORMULAS`, with the formula of ``target`` if it is a custom op, whose package may be imported late."""
    own = _CUSTOM.get(_torch.schema_of(target).name) if isinstance(target, OpOverload) else None
    return {**FORMULAS, target.overloadpacket: own} if own and isinstance(target, OpOverload) else FORMULAS
