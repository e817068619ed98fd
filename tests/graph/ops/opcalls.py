"""Calls whose arguments leave an op with nothing to do, switch it off, or make its schema lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

CALLS = """
torch.einsum("ij->ji", x)
torch.einsum("ij->ij", [x])
torch.einsum("ii->i", x)
torch.einsum("i,->i", v, torch.tensor(1.0))
torch.einsum("ij,ij->ij", x, x)
torch.einsum("ij,jk->ki", [x, x])
torch.einsum("ij,i->ji", x, v)
torch.einsum(x, [0, 1], [1, 0])
torch.cartesian_prod(v)
torch.chain_matmul(x)
torch.linalg.multi_dot([x, x])
torch.atleast_1d(x)
torch.atleast_2d(x, v)
torch.atleast_3d([x, v])
torch.broadcast_tensors(x, x)
torch.meshgrid(v, v, indexing="ij")
torch.meshgrid([v, v], indexing="xy")
torch.histogramdd(torch.randn(4, 2), [v.sort()[0], v.sort()[0]])
torch.unsafe_chunk(x, 2)
torch.unsafe_split(x, 2)
torch.unsafe_split_with_sizes(x, [2, 2])
x.chunk(2)
x.split(2)
x.split([1, 3])
torch.tensor_split(x, 2)
x.unbind()
torch.ops.aten._unsafe_view(x, (4, 4))
torch.ops.aten.lift(x)
torch.ops.aten.lift_fresh(x)
torch.ops.aten._to_cpu([x])
torch.ops.aten.data(x)
torch.ops.aten.cpu(x)
torch.ops.aten._reshape_from_tensor(x, torch.tensor([4, 4]))
torch.ops.aten.flatten_dense_tensors([x])
torch.ops.aten.unflatten_dense_tensors(v, [v])
torch.ops.prims.device_put(x, "cpu")
torch.ops.prims.convert_element_type(x, torch.float32)
torch.sparse_coo_tensor(i, i[0].float(), (2, 2))
torch.sparse_coo_tensor(i, i[0].float())
torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), i[0].float())
torch.sparse.sum(sparse)
torch._sparse_sum(sparse, [])
torch._cast_Float(x)
x.data
x.shape
x.type_as(x)
x.expand_as(x)
x.sum_to_size(4, 4)
x.reshape_as(x)
x.repeat(1, 1)
x.tile(1)
x.roll(0)
x.to(torch.float32)
x.to(torch.float64)
x.sum(())
x[None].sum(0)
x[None].amax(0)
torch.cat([x])
torch.stack([x])
torch.hstack([x])
torch.block_diag(x)
torch.concat([x, torch.empty(0)])
torch.float_power(x.double(), 1)
torch.linalg.matrix_power(x, 1)
torch.constant_pad_nd(img, (0, 0))
F.pad(img, (-1, 0))
F.pad(img, ())
F.embedding(i, torch.randn(3, 4) * 9, max_norm=1.0)
F.embedding(i, torch.randn(3, 4))
F.embedding_bag(i, torch.randn(3, 4) * 9, max_norm=1.0)
torch.embedding_bag(torch.randn(3, 4), i[0], torch.tensor([0]))
F.pixel_shuffle(img, 1)
F.pixel_unshuffle(img, 1)
F.channel_shuffle(img, 1)
F.native_channel_shuffle(img, 1)
F.gumbel_softmax(x)
F.fractional_max_pool2d(img, 2, output_size=2)
F.fractional_max_pool2d(img, 2, output_size=2, return_indices=True)
F.max_pool2d(img, 1)
F.max_pool2d(img, 2, return_indices=True)
F.adaptive_avg_pool2d(img, 6)
F.lp_pool2d(img, 2, 1)
F.unfold(img, 1)
torch.unique(v)
torch.unique(v, return_counts=True)
torch.nonzero(x, as_tuple=True)
torch.where(x > 0)
x.size()
x.size(0)
torch.max(x, 1)
torch.max(x, x)
torch.max(x)
x.max(dim=1)
torch.std_mean(x)
torch.topk(x, 2)
torch.rot90(x, 0)
torch.diff(v, n=0)
torch.combinations(v, 1)
torch.norm(x)
torch.repeat_interleave(v, 1)
x.clone().__iadd__(0)
x.clone().requires_grad_()
x.clone().__setitem__(0, 1.0)
x[...]
x[i]
torch.as_tensor(x)
torch.asarray(x)
x.new_tensor([1.0])
torch.batch_norm_update_stats(img, torch.zeros(4), torch.ones(4), 0.1)
torch.ops.aten._batch_norm_with_update(img, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5)
torch.ops.aten._batch_norm_no_update(img, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5)
torch.native_dropout(img, 0.5, None)
"""
NULLARY = (
    "float double half bool int cpu contiguous t numpy tolist resolve_conj resolve_neg conj conj_physical positive "
    "flatten ravel squeeze detach clone trunc round floor abs coalesce to_dense to_sparse chalf adjoint real imag "
    "pinverse to_sparse_csr values indices relu"
)
SWITCHED = """
F.batch_norm(img, torch.zeros(4), torch.ones(4), training=on)
F.instance_norm(img, torch.zeros(4), torch.ones(4), use_input_stats=on)
torch.batch_norm(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5, False)
torch.native_batch_norm(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5)
torch._batch_norm_impl_index(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5, False)
torch.ops.aten._native_batch_norm_legit(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5)
F.rrelu(img.clone(), training=on)
F.rrelu(img.clone(), training=on, inplace=True)
torch.native_dropout(img, p, on)
torch.dropout(img, p, on)
torch.dropout_(img.clone(), p, on)
torch.alpha_dropout(img, p, on)
torch.alpha_dropout_(img.clone(), p, on)
torch.feature_dropout(img, p, on)
torch.feature_dropout_(img.clone(), p, on)
torch.feature_alpha_dropout(img, p, on)
torch.feature_alpha_dropout_(img.clone(), p, on)
F.scaled_dot_product_attention(q, q, q, dropout_p=p)
torch.lstm(q[0], [q[0, :, :1].transpose(0, 1)] * 2, lstm, False, 1, p, on, False, True)
"""


def by_hand() -> Iterator[Callable[[], Any]]:
    """Calls whose arguments leave an op with nothing to do, switch it off, or make its schema lie."""
    index = torch.tensor([[0, 1], [1, 0]])
    space: dict[str, Any] = {"torch": torch, "F": F, "x": torch.randn(4, 4), "v": torch.randn(4), "i": index}
    space |= {"img": torch.randn(2, 4, 6, 6), "q": torch.randn(1, 2, 3, 4)}
    space |= {"lstm": [torch.randn(16, 4), torch.randn(16, 4)], "c": torch.randn(4, 4, dtype=torch.complex64)}
    space["sparse"] = torch.sparse_coo_tensor(index, torch.randn(2), (2, 2)).coalesce()

    def line(text: str, **more: Any) -> Callable[[], Any]:
        return functools.partial(eval, text, {**space, **more})

    for text in CALLS.strip().splitlines():
        yield line(text)
    for name in NULLARY.split():
        for owner in ("x", "c", "x.long()", "sparse"):
            yield line(f"{owner}.{name}()")
            yield line(f"torch.ops.aten.{name}({owner})")
    for p in (0.0, 0.5, 1.0):
        for on in (True, False):
            for text in SWITCHED.strip().splitlines():
                yield line(text, p=p, on=on)
            for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
                for image in ("img.clone()", "img[0].clone()"):
                    yield line(f"F.{name}({image}, p, on, False)", p=p, on=on)
                    yield line(f"F.{name}({image}, p=p, training=on, inplace=True)", p=p, on=on)
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield line("F.pad(img, (0, 0, 0, 0), mode)", mode=mode)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        yield line("F.interpolate(img, scale_factor=1, mode=mode)", mode=mode)
        yield line("F.interpolate(img, size=(6, 6), mode=mode)", mode=mode)
