"""Values whose strides after a real kernel differ from those of the graph's fake tensors, and what follows from them.

BatchNorm on the CPU returns a contiguous tensor whatever it is given; its fake keeps the strides of the input. Whether
``contiguous`` or ``reshape`` copies is decided by the strides that are really there::

    y = batch_norm(x.transpose(1, 2))     kernel: contiguous        fake: as x
    z = y.contiguous()                    kernel: y itself          fake: a copy
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.node_values import StandIn, changes_state, hints, stand_in
from splitkit.graph.storages import tensors, value_of

StrideFixes = Mapping[Node, Any]
"""Node -> a stand-in for its value, for nodes whose strides differ from those of ``meta["val"]``."""


def kernel_strides(gm: fx.GraphModule, sizes: Mapping[str, int]) -> StrideFixes:
    """Return the values of a graph whose strides differ between kernels and fakes, and values derived from them.

    Args:
        gm: a graph with ``meta["val"]``.
        sizes: symbol -> size, where it differs from the one seen at capture.
    """
    found: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if "call" not in node.op or (node.target not in _CONTIGUOUS and found.keys().isdisjoint(node.all_input_nodes)):
            continue
        relaid = node.target in _CONTIGUOUS
        value = _relaid(node, sizes, found) if relaid else _again(gm, node, sizes, found)
        if _strides(value, sizes) != _strides(value_of(node), sizes):
            found[node] = value
    return found


def _relaid(node: Node, sizes: Mapping[str, int], found: StrideFixes) -> Any:
    """Return the value with its first tensor strided as by the kernel: contiguous, or channels-last as its input."""
    value, first = value_of(node), node.all_input_nodes[0] if node.all_input_nodes else node
    given = found.get(first, value_of(first))
    if not isinstance(given, torch.Tensor) or given.device.type != "cpu":
        return value
    several = isinstance(value, tuple | list)
    shown = value[0] if several else value
    made = StandIn(_laid_out, (given, shown, node.target in _KEEP_ORDER), {}, sizes, ()).run(operator.call)
    return (made, *value[1:]) if several else made


def _laid_out(given: torch.Tensor, shown: torch.Tensor, keeps_order: bool) -> torch.Tensor:
    made = torch.empty(shown.shape, dtype=shown.dtype, device=shown.device)
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.ndim)
    kept = keeps_order and order is not None and not given.is_contiguous() and given.is_contiguous(memory_format=order)
    return made.contiguous(memory_format=order) if kept and order is not None else made


def _again(gm: fx.GraphModule, node: Node, sizes: Mapping[str, int], found: StrideFixes) -> Any:
    """Return a node's result on these values; the graph's value if it cannot run on fake tensors."""
    try:
        return value_of(node) if changes_state(gm, node) else stand_in(gm, node, sizes, given=found).run(operator.call)
    except Exception:  # a custom op without a fake, a size that only the data decides, a view that cannot be
        return value_of(node)


def _strides(value: Any, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    return [hints(t.stride(), sizes) for t in tensors(value) if t.layout is torch.strided]


def _overloads(names: Iterable[str]) -> frozenset[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(op for packet in packets if packet is not None for op in _torch.spellings(packet))


# Ops whose kernels on the CPU return a contiguous tensor, found by running all ops that torch has samples of. BatchNorm
# keeps channels-last.
_KEEP_ORDER = _overloads(
    (
        "batch_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
        "_batch_norm_no_update",
    )
)
_CONTIGUOUS = (
    _KEEP_ORDER
    | _overloads(("log_sigmoid", "log_sigmoid_forward", "rrelu", "rrelu_with_noise", "rrelu_with_noise_functional"))
    | _overloads(("upsample_nearest1d", "_upsample_nearest_exact1d"))
    | {torch.ops.aten.pow.Scalar}
)
