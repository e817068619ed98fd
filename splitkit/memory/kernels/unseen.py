"""Ops whose kernels allocate memory that the dispatcher does not see: their simulated memory is a lower bound.

``convolution`` on a CPU copies its input into the layout of the library that computes it, ``sort`` of one dimension
has a buffer as large as its result, ``logsumexp`` holds all exponentials. How much depends on the device, the build and
the sizes, so it is not guessed; `simulate_memory` takes it from ``workspace=``, and says "at least" without.
"""

from __future__ import annotations

from splitkit._torch import OpOverload

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
    return isinstance(target, OpOverload) and target.namespace == "aten" and target.__name__.split(".")[0] in _OPS


def name_of(op: object) -> str:
    """Return the name of an op: ``convolution`` for ``aten.convolution.default``."""
    return str(getattr(op, "__name__", op)).split(".")[0]
