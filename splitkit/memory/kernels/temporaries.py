"""The temporary memory of composite ops (``linear``, ``dropout``, a loss), besides their results.

In a graph of ``torch.export`` or ``symbolic_trace`` a composite op is one node, but it runs as several ops. It is run
here on fake tensors, which take no memory, and its live bytes are measured as for a real run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import OpOverload
from splitkit.graph.node_values import NO_VALUES, CallMemo, changes_state, op_name, stand_in, storage_bytes
from splitkit.graph.storages import storage_key, tensors, value_of
from splitkit.memory.measurement import measure_memory
from splitkit.memory.storage_watch import FakesOfReals, OpsSeen


@dataclass(frozen=True)
class CallBytes:
    """The bytes that a call takes besides its results.

    Attributes:
        transient: the most bytes until it returns.
        casts: bytes of weights that autocast has cast, and keeps until its region ends.
        aliases: for each tensor of the result, the index of the argument tensor whose memory it shares, or ``None``;
            ``None`` for all if the call was not run.
        beyond: bytes of results beyond what their values show (`splitkit.memory.kernels.kernel_results`).
        unseen: names of the ops inside whose kernels take more than that.
    """

    transient: int
    casts: int
    aliases: tuple[int | None, ...] | None = None
    beyond: int = 0
    unseen: frozenset[str] = frozenset()


NOTHING = CallBytes(0, 0)


@dataclass
class Temporaries:
    """Measures each distinct call once.

    Attributes:
        sizes: symbol -> size, where it differs from the one seen at capture.
    """

    sizes: Mapping[str, int]
    _calls: CallMemo[CallBytes] = field(default_factory=CallMemo)

    def __call__(
        self, gm: fx.GraphModule, node: Node, autocast: Sequence[Node], given: Mapping[Node, Any] = NO_VALUES
    ) -> CallBytes:
        """Return the bytes that ``node`` takes; `NOTHING` if it cannot run on fake tensors.

        Args:
            gm: the graph of the node.
            node: the node.
            autocast: the nodes that open the autocast regions around it.
            given: node -> its value, where that differs from the graph's.
        """
        if not (autocast or may_decompose(node.target) or _reads_lazily(node)) or changes_state(gm, node):
            return NOTHING
        call = stand_in(gm, node, self.sizes, autocast, given)
        seen = _inside if isinstance(call.target, _torch.OpOverload | BuiltinFunctionType) else _inside_opaque
        return self._calls.ask(call, seen, lambda: NOTHING)


def _inside_opaque(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """Measure user code, which may reach real tensors besides its arguments."""
    some: Any = torch.empty(0)
    fakes = FakesOfReals(some.fake_mode)

    def closed(*args: Any, **kwargs: Any) -> Any:
        with fakes:
            return call(*args, **kwargs)

    return _inside(closed, *args, **kwargs)


def _inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """Measure a call twice: autocast caches the casts of weights in the first, so the difference is their bytes."""
    first = measure_memory(call, *args, **kwargs)
    second = measure_memory(call, *args, **kwargs)
    results = second.end - second.baseline
    given = {storage_key(t): i for i, t in reversed(list(enumerate(tensors((args, kwargs)))))}
    with OpsSeen() as seen:
        yielded = list(tensors(call(*args, **kwargs)))
    aliases = tuple(given.get(storage_key(t)) for t in yielded)
    made = {storage_key(t): storage_bytes(t) for t, of in zip(yielded, aliases, strict=True) if of is None}
    beyond = max(0, results - sum(made.values()))
    unseen = frozenset(op_name(op) for op in seen.ops if allocates_unseen(op))
    casts = first.end - first.baseline - results
    return CallBytes(first.peak - first.end, casts, aliases, beyond, unseen)


def may_decompose(target: object) -> bool:
    """Return whether the dispatcher may see other ops inside a call of ``target``."""
    if isinstance(target, _torch.OpOverload):
        return _known(target)
    return target is not operator.getitem


def _reads_lazily(node: Node) -> bool:
    """Return whether an argument is a lazy conjugate or negative view, which the op may have to materialize."""
    read = (t for n in node.all_input_nodes for t in tensors(value_of(n)))
    return any(t.is_neg() or (t.is_complex() and t.is_conj()) for t in read)


_known = cache(_torch.is_composite)


# Ops whose kernels allocate memory that the dispatcher does not see: their simulated memory is a lower bound.
#
# ``convolution`` on a CPU copies its input into the layout of the library that computes it, ``sort`` of one dimension
# has a buffer as large as its result, ``logsumexp`` holds all exponentials. How much depends on the device, the build
# and the sizes, so it is not guessed; `simulate_memory` takes it from ``workspace=``, and says "at least" without.


# Found by comparing the allocator of the CPU with what is simulated, for every op that torch has samples of (2.13), and
# for common ones on tensors of megabytes.
# Left out: a few bytes for numbers, and buffers per thread (norms and their backward).
# fmt: off
_OPS = frozenset((
    "_cdist_forward", "_chunk_cat", "_ctc_loss_backward", "_embedding_bag", "_embedding_bag_backward",
    "_embedding_bag_per_sample_weights_backward", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors", "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex",
    "_linalg_svd", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_mm", "_scaled_mm_v2", "_trilinear",
    "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "binary_cross_entropy", "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "convolution", "convolution_backward", "count_nonzero", "cumsum", "dist",
    "geqrf", "histc", "histogram", "huber_loss", "index_reduce", "isin", "isinf", "kthvalue", "linalg_eig",
    "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu",
    "linalg_lu_solve", "linalg_matrix_exp", "linalg_pinv", "linalg_qr", "linalg_solve_triangular",
    "logsumexp", "lu_unpack",
    "masked_scatter_backward", "median", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "mse_loss", "multinomial",
    "mvlgamma", "nanmedian",
    "native_dropout_backward", "ormqr", "renorm", "repeat_interleave", "rrelu_with_noise", "smooth_l1_loss",
    "soft_margin_loss", "soft_margin_loss_backward", "sort", "unfold_backward", "upsample_bicubic2d",
    "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d",
))
# fmt: on
# expm 12 times its matrix, isin 5, a transposed convolution of volumes 3, convolution and its backward 1, upsampling of
# contiguous images 1.2, losses 0.5 to 1, logsumexp, isinf and median 1, sort of one dimension 0.7


def allocates_unseen(target: object) -> bool:
    """Return whether the kernel of an op is known to allocate temporary memory that grows with its tensors."""
    return isinstance(target, OpOverload) and target.namespace == "aten" and op_name(target) in _OPS
