"""Which nodes a fusing compiler runs in one kernel, as Inductor would: a greedy estimate, in graph order.

Pointwise ops, and reductions of the same rows, join the kernel of what they read; views belong to no kernel; products,
convolutions, attention, sorts and what is unknown run alone::

    mm ──> add ──> gelu ──> mm          kernels: mm | add gelu | mm
    x ──> sum ──> sub (x - sum)         one kernel: the row is at hand
    add ──> mm ──> add_1 (add + mm)     two kernels for the sums: the second waits for the product
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import OpOverload
from splitkit.costs.counting import name_of
from splitkit.costs.sizes import elements, tensors
from splitkit.standins import hints
from splitkit.symbols import value_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What `torch.Tag.pointwise` leaves out, and Inductor's lowerings compute element by element.
_POINTWISE = _words(
    "_to_copy to type_as reshape flatten clone contiguous copy copy_ native_dropout dropout bernoulli rand randn "
    "rand_like randn_like rand_philox inductor_random embedding index _unsafe_index gather index_select take cat "
    "stack full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full empty_like scalar_tensor "
    "arange iota eye tril triu constant_pad_nd pad slice_scatter select_scatter slice_backward select_backward "
    "diagonal_scatter hardtanh_backward hardswish_backward elu_backward leaky_relu_backward log_sigmoid_backward "
    "repeat roll flip convert_element_type upsample_nearest2d upsample_bilinear2d max_pool2d_with_indices "
    "avg_pool2d max_pool2d_with_indices_backward avg_pool2d_backward relu relu6 gelu silu mish softplus hardtanh "
    "hardswish elu leaky_relu sigmoid tanh lift_fresh_copy one_hot fill floor_divide"
)
# Ops that reduce rows and use the rows again, with where they say which dimension: its position among the arguments.
_NORMS = {
    "_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1, "softmax": 1, "log_softmax": 1,
    "_softmax_backward_data": 2, "_log_softmax_backward_data": 2, "cumsum": 1, "logcumsumexp": 1,
}  # fmt: skip
_LAYER_NORMS = {"native_layer_norm": 1, "layer_norm": 1, "rms_norm": 1, "native_layer_norm_backward": 2}
_BATCH_NORMS = _words(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update cudnn_batch_norm batch_norm "
    "native_batch_norm_backward"
)
_GROUP_NORMS = _words("native_group_norm group_norm")
_LOSSES = _words("nll_loss_forward nll_loss mse_loss")


@dataclass(frozen=True)
class Loop:
    """What a kernel runs over: ``size`` elements, in rows of ``row`` if it reduces; ``None`` if not."""

    size: int
    row: int | None = None

    def joined(self, other: Loop) -> Loop | None:
        """The loop of a kernel that does both; ``None`` if there is none."""
        if self.row is not None and other.row is not None:
            return self if self == other else None
        rows, flat = (self, other) if self.row is not None else (other, self)
        return rows if flat.size == rows.size or flat.size * (rows.row or 0) == rows.size else None


@dataclass(eq=False)
class Kernel:
    """Nodes that run together.

    Attributes:
        depth: how many kernels run before it, one for the other.
        loop: what it runs over; ``None`` if it runs alone.
        nodes: its members, in graph order; no views.
    """

    depth: int
    loop: Loop | None
    nodes: list[Node] = field(default_factory=list)


class Fusion:
    """The kernels of a graph.

    Args:
        graph: the graph, with ``meta["val"]``.
        is_view: whether a node starts no kernel, even if it runs alone.

    Attributes:
        kernels: in the order of their first nodes; nodes that run alone have one of their own.
        kernel: node -> its kernel. Views, members of tuples and inputs have none, nor what is computed of nothing
            (``arange``, ``full``): every reader computes that itself.
        reads: node with a kernel -> the inputs and nodes with kernels that it reads, views looked through.
    """

    def __init__(self, graph: fx.Graph, is_view: Callable[[Node], bool]) -> None:
        self._is_view = is_view
        self._behind: dict[Node, tuple[Node, ...]] = {}  # what a view is a view of
        self._beside: dict[tuple[int, Node | Kernel], list[Kernel]] = {}
        self._joined: dict[Kernel, Kernel] = {}
        self._of: dict[Node, Kernel] = {}
        self.reads: dict[Node, tuple[Node, ...]] = {}
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                self._place(node)
        self._sink()
        self.kernel = {node: self._current(kernel) for node, kernel in self._of.items()}
        for node, kernel in self.kernel.items():
            kernel.nodes.append(node)
        self.kernels = list(dict.fromkeys(self.kernel.values()))

    @property
    def generated(self) -> list[Kernel]:
        """The kernels that a compiler would generate; the others are calls of a library."""
        return [kernel for kernel in self.kernels if kernel.loop is not None]

    def readers(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Who reads ``node``, views looked through, and as what: itself, or the member of its tuple."""
        stack = [(user, node) for user in node.users]
        while stack:
            user, read = stack.pop()
            if user in self._behind:
                stack += [(later, user if user.target is operator.getitem else read) for later in user.users]
            else:
                yield user, read

    def _place(self, node: Node) -> None:
        """Find the kernel of a node, given those of what it reads."""
        reads = tuple(dict.fromkeys(r for n in node.all_input_nodes for r in self._behind.get(n, (n,))))
        if node.target is operator.getitem or self._is_view(node):
            self._behind[node] = reads
            return
        loop = _loop(node)
        if loop is not None and loop.row is None and not reads and not _is_random(node):
            self._behind[node] = ()
            return
        self.reads[node] = reads
        depth = max((self._depth(read) for read in reads), default=0)
        latest = [read for read in reads if self._depth(read) == depth]
        self._of[node] = kernel = self._before(latest, loop) or self._next_to(latest, depth + 1, loop)
        if loop is not None:
            for read in reads:
                self._beside.setdefault((kernel.depth, self._anchor(read)), []).append(kernel)

    def _before(self, latest: Iterable[Node], loop: Loop | None) -> Kernel | None:
        """The kernel, all of them joined, of what a node reads last, if it may run there as well."""
        kernels = dict.fromkeys(self._current(self._of[r]) if r in self._of else None for r in latest)
        for kernel in kernels:
            loop = loop and kernel.loop.joined(loop) if kernel and kernel.loop else None
            if loop is None:
                return None
        found = [kernel for kernel in kernels if kernel]
        if not found:
            return None
        found[0].loop = loop
        self._joined |= dict.fromkeys(found[1:], found[0])
        return found[0]

    def _next_to(self, latest: Iterable[Node], depth: int, loop: Loop | None) -> Kernel:
        """A kernel that runs at the same time over the same elements and reads the same, or a new one."""
        for read in latest if loop else ():
            for kernel in map(self._current, self._beside.get((depth, self._anchor(read)), ())):
                both = loop and kernel.loop and kernel.loop.joined(loop)
                if both and kernel.loop and loop and kernel.loop.size == loop.size:
                    kernel.loop = both
                    return kernel
        return Kernel(depth, loop)

    def _sink(self) -> None:
        """Join each kernel that a single one reads to that one: it could run as late."""
        outside: dict[Kernel, set[Kernel | None]] = {}
        for node in reversed(self._of):
            kernel = self._current(self._of[node])
            found = outside.setdefault(kernel, set())
            found |= {self._of.get(user) for user, _ in self.readers(node)}
        for kernel, readers in outside.items():
            others = {r and self._current(r) for r in readers} - {self._current(kernel)}
            only = others.pop() if len(others) == 1 else None
            both = only and only.loop and kernel.loop and only.loop.joined(kernel.loop)
            if only and both:
                only.loop = both
                self._joined[kernel] = only

    def _anchor(self, read: Node) -> Node | Kernel:
        return self._current(self._of[read]) if read in self._of else read

    def _depth(self, node: Node) -> int:
        return self._of[node].depth if node in self._of else 0

    def _current(self, kernel: Kernel) -> Kernel:
        while kernel in self._joined:
            kernel = self._joined[kernel]
        return kernel


def _loop(node: Node) -> Loop | None:
    """What the kernel of a node runs over; ``None`` if it runs alone, as what is no op of ATen does."""
    target, name = node.target, name_of(node.target)
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    made = next(tensors(value_of(node)), None)
    operands = [t for n in node.all_input_nodes for t in tensors(value_of(n))]
    if made is None:
        return None
    shape = hints(operands[0].shape) if operands else ()
    if name in _NORMS:
        along = node.args[_NORMS[name]] if len(node.args) > _NORMS[name] else -1
        return _rows(shape, shape[along] if shape and isinstance(along, int) else None)
    if name in _LAYER_NORMS:
        return _rows(shape, prod(hints(node.args[_LAYER_NORMS[name]])))  # type: ignore[arg-type]
    if name in _BATCH_NORMS:
        return _rows(shape, prod(shape) // max(1, shape[1]))
    if name in _GROUP_NORMS:
        groups = node.args[6] if name == "native_group_norm" else node.args[1]
        return _rows(shape, prod(shape[1:]) // groups if isinstance(groups, int) else None)
    if torch.Tag.reduction in target.tags or name in _LOSSES:
        return _rows(shape, prod(shape) // max(1, elements(made)))
    if torch.Tag.pointwise in target.tags or name in _POINTWISE:
        return Loop(elements(made))
    return None


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _rows(shape: tuple[int, ...], row: int | None) -> Loop | None:
    return None if row is None else Loop(prod(shape), row)
