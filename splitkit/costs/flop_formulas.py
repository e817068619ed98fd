"""FLOP formulas for the matmul-like ops that torch's own counter does not cover.

Checked against the registries of torch 2.11, 2.13 and 2.15. A multiplication with an addition is two operations, as in
torch's formulas; ``FlopCounterMode(custom_mapping=FORMULAS)`` then counts a real run as splitkit counts a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload, written_arguments
from splitkit.costs.base import GraphCosts
from splitkit.graph import node_values
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.node_values import (
    CallMemo,
    body_calls,
    changes_state,
    elements,
    hints,
    op_name,
    require_values,
    stand_in,
    value_in,
)
from splitkit.graph.storages import storage_key, tensors, value_of
from splitkit.short_repr import brief
from splitkit.units import TFLOP


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


def _mv(matrix: Shape, vector: Shape, *args: Any, **kwargs: Any) -> int:
    """``[m, k] @ [k]``, or ``[k] @ [k]``."""
    return 2 * prod(matrix)


def _addbmm(added: Shape, a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(a) * b[-1]


def _grouped(a: Shape, b: Shape, *args: Any, **kwargs: Any) -> int:
    """Count for groups over a batch, the rows, the contracted size, or the columns (``[g, m, k] @ [k, n]``)."""
    rows = a[-2:] if len(b) == 2 else a
    return 2 * prod(rows) * b[-1]


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


def _added(formula: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of an op that first takes what is added to the product."""
    return lambda added, *args, **kwargs: formula(*args, **kwargs)


def _twice(formula: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a backward, which has two products for each of forward."""
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


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
    "addmv": _added(_mv),
    "addbmm": _addbmm,
    "_int_mm": _mm,
    "_scaled_mm_v2": _mm,
    "_addmm_activation": _added(_mm),
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
    "mkldnn_rnn_layer_backward": _twice(_recurrent),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _twice(_recurrent),
    "miopen_rnn": _recurrent,
    "miopen_rnn_backward": _twice(_recurrent),
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
    "transformers::grouped_mm_fallback_backward": _twice(_grouped),
    "torch_attn::_varlen_attn": _varlen,
    "splitkit::selective_scan": _selective_scan,
    "splitkit::chunked_scan": _chunked_scan,
}


def formulas_for(target: object) -> dict[Any, Callable[..., int]]:
    """Return `FORMULAS`, with the formula of ``target`` if it is a custom op, whose package may be imported late."""
    own = _CUSTOM.get(_torch.schema_of(target).name) if isinstance(target, OpOverload) else None
    return {**FORMULAS, target.overloadpacket: own} if own and isinstance(target, OpOverload) else FORMULAS


# Count the FLOPs of a node with torch's own counter, in a run of the node's target on fake tensors.
#
# Composite ops (``linear``, ``einsum``, attention, ``lstm``) decompose under the counter, so that the sum over a graph
# is what the counter reports for a real run. An op without a formula counts as one FLOP per element of its result, and
# a view as 0.


NOMINAL = 1e12  # FLOPs in the unit of prices: any value works, as only ratios of prices matter to a policy

Shape = tuple[int, ...]


def flops(gm: fx.GraphModule | Dataflow) -> Flops:
    """Return costs by FLOPs. Each node is counted when its price is first asked for.

    Args:
        gm: the graph, or facts about it; all costs that are made from the same facts share their counts.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph, SK102 if nodes have no ``meta["val"]``.
    """
    require_values(root_of(gm).graph)
    return counter_of(gm)


def counter_of(gm: fx.GraphModule | Dataflow) -> Flops:
    """Return the FLOP counter of a graph, whose nodes need not have ``meta["val"]``."""
    return gm.fact(_counter) if isinstance(gm, Dataflow) else Flops(gm)


def _counter(flow: Dataflow) -> Flops:
    return Flops(flow.root)


@dataclass(frozen=True)
class Count:
    """The counts of one node.

    Attributes:
        counted: FLOPs by formula.
        written: elements of the result, 0 for views and allocations.
        fresh: for each tensor of the result whether the node writes it; ``None`` if the node could not be run.
    """

    counted: int
    written: int
    fresh: tuple[bool, ...] | None = None

    @property
    def flops(self) -> int:
        """FLOPs by formula, or one per element of the result if there is no formula."""
        return self.counted or self.written


@dataclass(frozen=True)
class Flops(GraphCosts):
    """The costs of `flops`, whose prices are TFLOPs rather than seconds."""

    gm: fx.GraphModule
    unit: ClassVar[str] = TFLOP
    _calls: CallMemo[Count] = field(default_factory=CallMemo, repr=False, compare=False)
    _of: dict[Node, Count] = field(default_factory=dict, repr=False, compare=False)

    __repr__ = brief

    @property
    def counter(self) -> Flops:
        """The counter of FLOPs: these costs themselves, as other costs name theirs."""
        return self

    def seconds(self, node: Node) -> float:
        """TFLOPs, which are seconds on a nominal device of 1e12 FLOP/s."""
        return self.flops(node) / NOMINAL

    def flops(self, node: Node) -> float:
        """FLOPs by formula; without a formula the number of elements of the result, 0 for a view."""
        return float(self.count(node).flops)

    def counted(self, node: Node) -> int:
        """FLOPs by formula only: their sum over a graph is what ``FlopCounterMode`` reports."""
        return self.count(node).counted

    def count(self, node: Node) -> Count:
        """Return all counts of ``node``."""
        if node not in self._of:
            self._of[node] = self._counted_in(self.gm, node)
        return self._of[node]

    def of_graph(self, body: fx.GraphModule) -> float:
        """Return the price of another graph as one node: its FLOPs by formula, if there are any."""
        return self._of_graph(body).flops / NOMINAL

    def on(self, body: fx.GraphModule) -> Flops:
        """Return the counter of another graph, which knows all calls that this one knows."""
        return Flops(body, self._calls)

    def _counted_in(self, root: nn.Module, node: Node) -> Count:
        if node.op not in ("call_function", "call_method", "call_module") or node.target is operator.getitem:
            return NOTHING
        if changes_state(root, node):
            return NOTHING
        if isinstance(node.target, HigherOrderOperator):
            return self._of_higher_order(root, node)
        call, written = stand_in(root, node), partial(_elements, node)
        return self._calls.ask(call, _Counting(call.target, written), lambda: Count(0, written()))

    def _of_higher_order(self, root: nn.Module, node: Node) -> Count:
        """Count the graphs that a higher-order op calls, as often as it calls them; for ``cond`` the dearer branch."""
        if formula := _WHOLE.get(str(node.target)):
            # [query, key, value] of the forward pass; the sparsity of a block mask is data, and unknown
            count = formula([hints(value_in(root, n).shape) for n in node.args[:3] if isinstance(n, Node)])
            return Count(count, 0)
        counts = [self._of_graph(body) for body in counted_bodies(root, node)]
        if not counts:  # it calls a function or kernel of its own
            return Count(0, sum(elements(t) for t in tensors(node.meta.get("val"))))
        if node.target is torch.ops.higher_order.cond:
            return max(counts, key=lambda c: c.flops)
        times = body_calls(node)
        return Count(times * sum(c.counted for c in counts), times * sum(c.written for c in counts))

    def _of_graph(self, body: fx.GraphModule) -> Count:
        counts = [self._counted_in(body, node) for node in body.graph.nodes]
        # `written` holds the FLOPs of all nodes, so that a body without any formula has a price as well
        return Count(sum(c.counted for c in counts), sum(c.flops for c in counts))


NOTHING = Count(0, 0, fresh=())

_WHOLE: dict[str, Callable[[list[Shape]], int]] = {
    "flex_attention": lambda shapes: attention_flops(*shapes),
    "flex_attention_backward": lambda shapes: attention_backward_flops(shapes[0], *shapes),
}
"""Name -> formula of higher-order ops that do more than their bodies."""


class CountedCosts(GraphCosts):
    """Base class of costs in seconds, whose FLOPs a counter gives."""

    counter: Flops

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self.counter.flops(node)


def counted_bodies(root: nn.Module, node: Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op calls; none for an op that is counted as a whole, such as attention."""
    return [] if str(node.target) in _WHOLE else node_values.body_graphs(root, node)


@dataclass(frozen=True)
class _Counting:
    """Runs a call of a target under the counter; ``written`` gives the elements of its result if it raises."""

    target: Any
    written: Callable[[], int]

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Count:
        counter = FlopCounterMode(display=False, custom_mapping=formulas_for(self.target))
        try:
            with counter:
                made = list(tensors(call(*args, **kwargs)))
        except Exception:  # keep the FLOPs that were counted before the error
            return Count(counter.get_total_flops(), self.written())
        fresh = _fresh(self.target, made, (args, kwargs))
        written = sum(elements(t) for t, own in zip(made, fresh, strict=True) if own)
        written += sum(map(elements, tensors(only_written(self.target, args, kwargs))))
        return Count(counter.get_total_flops(), written, fresh)


def _elements(node: Node) -> int:
    return sum(map(elements, tensors(value_of(node))))


def _fresh(target: Any, made: list[torch.Tensor], inputs: Any) -> tuple[bool, ...]:
    """Return for each result whether it was written: no view of an input and no uninitialized memory."""
    if op_name(target).removeprefix("new_").startswith("empty"):
        return (False,) * len(made)
    if _writes(target):
        return (True,) * len(made)
    held = {storage_key(t) for t in tensors(inputs)}
    return tuple(storage_key(t) not in held for t in made)


def only_written(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an op without results writes, as ``_foreach_add_`` and fused optimizers do."""
    schema = getattr(target, "_schema", None)  # OpOverload._schema, .returns: 2.11, 2.13, 2.15
    return [] if schema is None or schema.returns else written_arguments(target, args, kwargs)


def _writes(target: Any) -> bool:
    """Whether ``target`` changes an argument: ``add_``, ``copy_``, an op with ``out=``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = op_name(target)
    return name.endswith("_") and not name.endswith("__")
