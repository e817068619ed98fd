"""Find the loop of a generated kernel: over the elements of its result, or over rows or columns that it reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from splitkit._torch import OpOverload
from splitkit.graph.byte_sizes import elements
from splitkit.graph.fake_calls import hints, op_name
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops without `torch.Tag.pointwise` that Inductor's lowerings nevertheless compute element by element.
_POINTWISE = _words(
    "_to_copy to type_as reshape flatten clone contiguous copy copy_ native_dropout dropout bernoulli rand randn "
    "rand_like randn_like rand_philox inductor_random embedding index _unsafe_index gather index_select take cat "
    "stack full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full empty_like scalar_tensor "
    "arange iota eye tril triu constant_pad_nd pad slice_scatter select_scatter slice_backward select_backward "
    "diagonal_scatter hardtanh_backward hardswish_backward elu_backward leaky_relu_backward log_sigmoid_backward "
    "repeat roll flip convert_element_type upsample_nearest2d upsample_bilinear2d max_pool2d_with_indices "
    "avg_pool2d max_pool2d_with_indices_backward avg_pool2d_backward relu relu6 gelu silu mish softplus hardtanh "
    "hardswish elu leaky_relu sigmoid tanh lift_fresh_copy one_hot fill floor_divide nll_loss_backward fma where "
    "inductor_lookup_seed masked_fill subtract multiply divide true_divide rsub absolute negative __and__ __or__ "
    "prelu _prelu_kernel glu glu_backward softplus_backward mish_backward outer"
)
# Ops that reduce rows and read the rows again -> position of the argument that gives the dimension.
_NORMS = {
    "_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1, "softmax": 1, "log_softmax": 1,
    "_softmax_backward_data": 2, "_log_softmax_backward_data": 2, "cumsum": 1, "logcumsumexp": 1,
}  # fmt: skip
_LAYER_NORMS = {"native_layer_norm": 1, "layer_norm": 1, "rms_norm": 1, "native_layer_norm_backward": 2}
_BATCH_NORMS = _words(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update cudnn_batch_norm batch_norm"
)
_BATCH_NORMS_BACKWARD = _words("native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward")
_GROUP_NORMS = _words("native_group_norm group_norm")
# Ops that add values to zeros at indices -> position of the argument with the values.
_SUMS_AT_INDICES = {"embedding_dense_backward": 0, "_unsafe_masked_index_put_accumulate": 3}
_LOSSES = _words("nll_loss_forward nll_loss mse_loss")


@dataclass(frozen=True)
class Loop:
    """The elements that a kernel loops over.

    Attributes:
        size: number of elements.
        row: number of elements that are reduced to one; ``None`` if nothing is reduced.
        across: whether the reduced elements are columns, far apart in memory, as in the gradient of a bias. Other ops
            go through memory in order and cannot share such a loop.
    """

    size: int
    row: int | None = None
    across: bool = False

    def joined(self, other: Loop) -> Loop | None:
        """Return the loop of a kernel that does both; ``None`` if one kernel cannot."""
        if self.row is not None and other.row is not None:
            return self if self == other else None
        rows, flat = (self, other) if self.row is not None else (other, self)
        if flat.size == rows.size and not rows.across:
            return rows
        return rows if flat.size * (rows.row or 0) == rows.size else None


def loop_of(node: Node) -> Loop | None:
    """Return the loop of a node's kernel; ``None`` if the node runs alone, as all ops outside ATen do."""
    target, name = node.target, op_name(node.target)
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    made, operand = next(tensors(value_of(node)), None), _operand(node)
    if made is None:
        return None
    shape = () if operand is None else hints(operand.shape)
    if name in _NORMS:
        along = node.args[_NORMS[name]] if len(node.args) > _NORMS[name] else -1
        return _rows(shape, shape[along] if shape and isinstance(along, int) else None)
    if name in _LAYER_NORMS:
        return _rows(shape, _normalized(node))
    if name in _BATCH_NORMS:
        return _rows(shape, prod(shape) // max(1, shape[1]))
    if name in _BATCH_NORMS_BACKWARD:
        return Loop(prod(shape))
    if name in _SUMS_AT_INDICES:
        return Loop(sum(map(elements, tensors(value_of(node.args[_SUMS_AT_INDICES[name]])))))  # type: ignore[arg-type]
    if name in _GROUP_NORMS:
        groups = node.args[6] if name == "native_group_norm" else node.args[1]
        return _rows(shape, prod(shape[1:]) // groups if isinstance(groups, int) else None)
    if torch.Tag.reduction in target.tags or name in _LOSSES:
        return Loop(
            prod(shape), prod(shape) // max(1, elements(made)), operand is not None and _is_across(node, operand)
        )
    if torch.Tag.pointwise in target.tags or name in _POINTWISE:
        return Loop(elements(made))
    return None


def second_loop(node: Node) -> Loop | None:
    """Return the loop of the second kernel of a node that needs two; both read the same inputs."""
    name, operand = op_name(node.target), _operand(node)
    size = 0 if operand is None else elements(operand)
    if name == "native_layer_norm_backward" and any(node.args[-1][1:]):  # type: ignore[index, arg-type]
        return Loop(size, size // max(1, _normalized(node)), across=True)  # gradients of weight and bias
    if name in _BATCH_NORMS_BACKWARD and operand is not None:
        return Loop(size, size // max(1, hints(operand.shape)[1]), across=True)  # sums of gradients
    if name in _SUMS_AT_INDICES:
        return Loop(sum(map(elements, tensors(value_of(node)))))  # the zeros
    return None


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _operand(node: Node) -> torch.Tensor | None:
    return next((t for n in node.all_input_nodes for t in tensors(value_of(n))), None)


def _normalized(node: Node) -> int:
    """Return the number of elements in a row of a layer norm."""
    return prod(hints(node.args[_LAYER_NORMS[op_name(node.target)]]))  # type: ignore[arg-type]


def _is_across(node: Node, operand: torch.Tensor) -> bool:
    """Whether a reduction keeps the dimension whose elements are adjacent in memory."""
    sizes, strides = hints(operand.shape), hints(operand.stride())
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(dims, Sequence) or not dims:
        return False
    near = min((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: strides[d], default=None)
    return near is not None and near not in [d % len(sizes) for d in dims if isinstance(d, int)]


def _rows(shape: tuple[int, ...], row: int | None) -> Loop | None:
    return None if row is None else Loop(prod(shape), row)
