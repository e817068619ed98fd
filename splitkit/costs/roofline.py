"""Estimate seconds by the roofline model: the time of a node's arithmetic or memory traffic, plus a kernel launch.

::

    seconds = max(FLOPs / peak of the dtype, bytes moved / bandwidth) + launch

Source: Williams, Waterman, Patterson: Roofline (CACM 2009). Each node counts as one kernel that reads its inputs and
writes its outputs, even if it is composed of several ops (``linear``, ``layer_norm``, attention). A recurrent layer has
one launch for each of its steps, which wait for each other. The model has no fusion of nodes and no caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil, log2, prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit._torch import HigherOrderOperator, pytree
from splitkit.costs.flop_formulas import Count, CountedCosts, Flops, counted_bodies, counter_of, only_written
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.joint_marks import backward_nodes, forward_owners
from splitkit.graph.node_values import (
    body_calls,
    elements,
    hints,
    op_name,
    require_values,
    storage_bytes,
    target_of,
    tensor_bytes,
    value_in,
)
from splitkit.graph.scope import Scope, region_kind, scopes
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import registered_tensors, storage_key, tensors, value_of
from splitkit.hardware.device_specs import Device, find_device
from splitkit.hardware.link_specs import Link, find_link
from splitkit.prices import Costs, asked_of_costs
from splitkit.short_repr import brief


def roofline(
    gm: fx.GraphModule | Dataflow,
    device: str | Device = "a100",
    *,
    tf32: bool = False,
    mesh: Mapping[str, str | Link] | None = None,
) -> Roofline:
    """Return costs in estimated seconds on a device, by its data sheet, whatever machine this runs on.

    For the times of this machine, measure them with `splitkit.costs.measured`. The device ``"cpu"`` is a generic
    server, which may be ten or more times as fast as the machine at hand.

    Args:
        gm: the graph, or facts about it.
        device: a name of `splitkit.costs.devices` (in any case, with or without hyphens), or a device of your own.
        tf32: whether products of float32 may be rounded, as by ``torch.set_float32_matmul_precision("high")``.
        mesh: for graphs with collectives, dimension of the mesh -> the link between its neighbouring ranks, such as
            ``{"tp": "nvlink4"}``.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph, SK102 if nodes have no ``meta["val"]``.
        CostError: SK321 if no device has that name, SK322 for an unknown link, and later for a collective without one.
    """
    root = root_of(gm)
    require_values(root.graph)
    return Roofline(root, find_device(device), tf32, mesh_links(mesh), counter=counter_of(gm))


@dataclass(frozen=True)
class Roofline(CountedCosts):
    """The costs of `roofline`; ``counter`` counts their FLOPs."""

    gm: fx.GraphModule
    device: Device
    tf32: bool = False
    mesh: Mapping[str, Link] = field(default_factory=dict, compare=False)
    counter: Flops = field(kw_only=True, repr=False, compare=False)
    _found: dict[Node, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _bodies: dict[fx.GraphModule, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    __repr__ = brief

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"roofline of {self.device.name}"

    def seconds(self, node: Node) -> float:
        """Seconds of the node's kernel; 0 for nodes without one: views, allocations, inputs, attributes, state ops.

        Nodes of decomposed attention share the seconds of the kernel that a GPU runs instead of them.
        """
        return self.alone(node) * self._shares.get(node, 1.0)

    def alone(self, node: Node) -> float:
        """Seconds of the node's kernel, also if the device runs another one for it and others together."""
        if node not in self._found:
            self._found[node] = self._of(node)
        return self._found[node]

    @cached_property
    def _scopes(self) -> Mapping[Node, Scope]:
        return scopes(self.gm.graph)[0]

    @cached_property
    def _shares(self) -> Mapping[Node, float]:
        """Node of decomposed attention -> the seconds of the fused kernel per second of the nodes."""
        found: dict[Node, float] = {}
        for nodes, share, moved in decomposed_attention(self.gm.graph) if not self.device.is_cpu else ():
            counts = {node: self.counter.count(node) for node in nodes}
            work = [(node, count) for node, count in counts.items() if count.counted]
            compute = sum(count.counted / self.device.rate(self._dtype(node, count)) for node, count in work)
            seconds = max(share * compute, moved / self.device.bandwidth) + self.device.launch
            if seconds < (decomposed := sum(map(self.alone, nodes))):
                found |= dict.fromkeys(nodes, seconds / decomposed)
        return found

    def _of(self, node: Node) -> float:
        count = self.counter.count(node)
        if isinstance(node.target, HigherOrderOperator):
            inner = [self.of_graph(body) for body in counted_bodies(self.gm, node)]
            if inner:
                return max(inner) if node.target is torch.ops.higher_order.cond else sum(inner) * body_calls(node)
        if (seconds := collective_seconds(node, self.mesh)) is not None:
            return seconds + self.device.launch
        if not count.counted and not written_bytes(self.gm, node, count):
            return 0.0
        compute = count.flops / self.device.rate(self._dtype(node, count))
        launches = self.device.launch * kernels_in_sequence(self.gm, node)
        return max(compute, self.moved(node) / self.device.bandwidth) + launches

    def moved(self, node: Node) -> int:
        """Bytes that the node's kernel reads and writes."""
        return moved_bytes(self.gm, node, self.counter.count(node))

    def of_graph(self, body: fx.GraphModule) -> float:
        """Return the seconds of all nodes of another graph on the same device."""
        if body not in self._bodies:
            inner = Roofline(body, self.device, self.tf32, self.mesh, counter=self.counter.on(body))
            self._bodies[body] = sum(inner.seconds(node) for node in body.graph.nodes)
        return self._bodies[body]

    def _dtype(self, node: Node, count: Count) -> torch.dtype | str:
        """Return the dtype of a node's arithmetic: for products that of the first operand, else float32 or wider."""
        dtypes = [t.dtype for t in (*operands(self.gm, node), *tensors(value_of(node)))]
        if not count.counted:
            wide = [d for d in dtypes if d == torch.float64 or d.is_complex]
            return wide[0] if wide else torch.float32
        first = dtypes[0] if dtypes else torch.float32
        if first.is_floating_point and first != torch.float64:
            first = self._autocast(node) or first
        return "tf32" if self.tf32 and first == torch.float32 else first

    def _autocast(self, node: Node) -> torch.dtype | None:
        """Return the dtype of the innermost autocast region of the node's device, ``None`` if there is none."""
        made: torch.Tensor | None = next(tensors(value_of(node)), None)
        scope = self._scopes.get(node)
        if made is None or scope is None:
            return None
        for enter in reversed(scope.regions):
            if region_kind(enter).name != "autocast" or _argument(enter, 0, "device_type") != made.device.type:
                continue
            if not _argument(enter, 2, "enabled"):
                return None
            return _argument(enter, 1, "dtype") or torch.get_autocast_dtype(made.device.type)
        return None


def _argument(node: Node, at: int, name: str) -> Any:
    return node.args[at] if at < len(node.args) else node.kwargs.get(name)


# The kernels of a node that run one after the other, as the steps of a recurrent layer do.


_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def kernels_in_sequence(root: nn.Module, node: Node) -> int:
    """Return how many kernels a node runs one after the other at least: 1, or for a recurrent layer steps x layers.

    The steps of a layer wait for each other. The directions do not, and count once.

    Args:
        root: the module of the node's graph.
        node: a node that runs at least one kernel.
    """
    target = target_of(root, node)
    name = op_name(target)
    if not isinstance(target, nn.RNNBase) and name not in (*_LAYERS, "mkldnn_rnn_layer"):
        return 1
    given: list[Any] = [value_of(a) if isinstance(a, Node) else a for a in node.args]
    if isinstance(target, nn.RNNBase):
        return max(1, _steps(given[0], target.batch_first) * target.num_layers) if given else 1
    if name == "mkldnn_rnn_layer":
        return max(1, _steps(given[0], False))
    packed = isinstance(given[1], Tensor) and given[1].ndim == 1  # data, batch sizes, states, weights, biased, layers
    layers: int = given[5 if packed else 4]
    return max(1, layers * (int(given[1].shape[0]) if packed else _steps(given[0], bool(given[-1]))))


def _steps(x: Any, batch_first: bool) -> int:
    """Return the steps in the input of a recurrent layer; 0 if it is packed."""
    return int(x.shape[1 if batch_first and x.ndim == 3 else 0]) if isinstance(x, Tensor) else 0


# Find attention that capture decomposed, and what a fused kernel would read, write and compute instead.
#
# AOTAutograd traces the kernels of the machine that captures: a CPU has no fused attention with dropout, and then a
# joint graph has products, softmax and copies of the scores where a GPU runs one kernel forward and one backward::
#
#     q, k, v ── mul, bmm, add, softmax, dropout, bmm ── out        forward reads q, k, v and writes out
#                └────────── saved scores ─────────┐
#     dq, dk, dv ── bmm, softmax backward, ... ── d_out         backward reads q, k, v, out, d_out; writes dq, dk, dv


_RECOMPUTED = 5 / 4
"""Products of a fused backward, which computes the scores again, per product of the decomposed one."""


def decomposed_attention(graph: fx.Graph) -> Iterator[tuple[list[Node], float, int]]:
    """Yield the fused kernels of decomposed attention in a joint graph: of each forward, and of its backward if any.

    Each is told by the nodes that it replaces, its FLOPs per FLOP of these, and the bytes that it reads and writes.
    """
    late, calls = backward_nodes(graph), dict[object, list[Node]]()
    for node in graph.nodes:
        # Dynamo's note of the call that a node comes from: ("scaled_dot_product_attention_1", the function)
        called = None if node in late else next(reversed(node.meta.get("source_fn_stack") or ()), None)
        if called is not None and op_name(called[1]) == "scaled_dot_product_attention":
            calls.setdefault(called[0], []).append(node)
    owner = forward_owners(graph) if calls else {}
    owned = dict[Node, list[Node]]()
    for node, forward in owner.items():
        if node.meta.get("seq_nr") == forward.meta.get("seq_nr"):  # no sum of gradients, which is a kernel of its own
            owned.setdefault(forward, []).append(node)
    for nodes in calls.values():
        if not any("softmax" in op_name(node.target) for node in nodes):
            continue
        moved = _crossing(nodes, lambda node: node not in late)
        yield nodes, 1.0, moved
        if back := [node for forward in nodes for node in owned.get(forward, ())]:
            yield back, _RECOMPUTED, moved + _crossing(back, late.__contains__)


def _crossing(nodes: list[Node], counts: Callable[[Node], bool]) -> int:
    """Return the bytes that nodes exchange with the other nodes of their half, for which ``counts`` holds."""
    inside = set(nodes)
    read = [n for n in dict.fromkeys(r for node in nodes for r in node.all_input_nodes) if n not in inside]
    made = [node for node in nodes if any(user not in inside and counts(user) for user in node.users)]
    return _bytes(n for n in read if counts(n)) + _bytes(made)


def _bytes(nodes: Iterable[Node]) -> int:
    return distinct_bytes(t for node in nodes for t in tensors(value_of(node)))


# Count the bytes that a node's kernel reads and writes, if every byte is moved once.


GATHERS = frozenset(("embedding", "index_select", "gather", "index", "_unsafe_index", "take", "take_along_dim"))
"""Ops that read as many bytes of their table as they yield."""

SCATTERS = frozenset(
    ("index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_")
)
"""Ops that touch as many bytes of their target as their source has."""

OVERWRITES = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))
"""Ops that write their first argument without reading it."""

_SHAPED = ("_like", "_strided")  # zeros_like(x) takes the shape of x


def operands(root: fx.GraphModule, node: Node) -> list[torch.Tensor]:
    """Return the tensors that ``node`` takes: arguments in order, then its module's parameters and buffers."""
    args = fx.map_arg((node.args, node.kwargs), lambda n: value_in(root, n))
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return [*given, *(registered_tensors(target_of(root, node)) if node.op == "call_module" else ())]


def written_bytes(root: fx.GraphModule, node: Node, count: Count) -> int:
    """Return the bytes of written results (no views, no uninitialized memory), or of arguments written instead."""
    made, fresh = list(tensors(value_of(node))), count.fresh
    if not made and count.written:
        written = fx.map_arg(only_written(node.target, node.args, node.kwargs), partial(value_in, root))
        return sum(map(tensor_bytes, tensors(written)))
    if fresh == ():
        return 0
    if fresh is None or len(fresh) != len(made):  # it could not be run: all of it
        return sum(map(tensor_bytes, made))
    return sum(tensor_bytes(t) for t, own in zip(made, fresh, strict=True) if own)


def moved_bytes(root: fx.GraphModule, node: Node, count: Count) -> int:
    """Return the bytes read and written. Memory that arguments share, or that an expanded tensor repeats, counts once.

    A gather reads the rows that it yields, and an in-place scatter touches the rows that it is given.
    """
    written = written_bytes(root, node, count)
    read = operands(root, node)
    name = _name(root, node)
    if not read:
        return written
    if name in SCATTERS:
        return _scattered(read)
    if name in GATHERS or name == "embedding_bag":
        table = _table(node, read)
        others = [t for t in read if t is not table]
        needed = written if name != "embedding_bag" else _rows(table, others)
        return distinct_bytes(others) + min(_touched(table), needed) + written
    if name in OVERWRITES or name.endswith(_SHAPED) or name.startswith("new_"):
        read = read[1:]
    return distinct_bytes(read) + written


def _name(root: fx.GraphModule, node: Node) -> str:
    """Return the name of a node's op, the same for op, function and module: ``"embedding"``."""
    target = target_of(root, node)
    if isinstance(target, nn.Module):
        return {nn.Embedding: "embedding", nn.EmbeddingBag: "embedding_bag"}.get(type(target), "")
    return op_name(target).removeprefix("_") if op_name(target) == "_embedding_bag" else op_name(target)


def _table(node: Node, read: list[torch.Tensor]) -> torch.Tensor:
    """Return the table of a gather: the largest tensor of the result's dtype that it reads."""
    made = next(tensors(value_of(node)), None)
    return max(read, key=lambda t: (made is not None and t.dtype == made.dtype, tensor_bytes(t)))


def _rows(table: torch.Tensor, others: list[torch.Tensor]) -> int:
    """Return the bytes of the table's rows that the indices in ``others[0]`` select."""
    named = elements(others[0]) if others else 0
    return named * (tensor_bytes(table) // max(1, hints(table.shape[:1])[0]))


def _scattered(read: list[torch.Tensor]) -> int:
    changed, *given = read
    source = max((elements(t) for t in given), default=0) * changed.element_size()
    return distinct_bytes(given) + min(tensor_bytes(changed), source)


def distinct_bytes(read: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors cover: equal views count once, overlapping ones at most as their storage."""
    views: dict[Hashable, dict[Hashable, torch.Tensor]] = {}
    for tensor in read:
        place = hints((*tensor.shape, *tensor.stride(), tensor.storage_offset())) if _strided(tensor) else id(tensor)
        views.setdefault(storage_key(tensor), {})[place] = tensor
    return sum(min(sum(map(_touched, same.values())), *map(storage_bytes, same.values())) for same in views.values())


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of distinct memory, as a dimension of stride 0 repeats the same elements."""
    if not _strided(tensor):
        return tensor_bytes(tensor)
    sizes, strides = hints(tensor.shape), hints(tensor.stride())
    return prod(n for n, step in zip(sizes, strides, strict=True) if step or not n) * tensor.element_size()


# Estimate the seconds of collectives, in which the ranks along a dimension of a mesh exchange tensors.
#
# ::
#
#     all_reduce("sum", "tp=4")     of n = 4 ranks, S bytes, over a link of so many bytes and seconds of latency
#     ring                          2 (n - 1) steps, each of S / n bytes
#     recursive halving, doubling   2 log2(n) steps, of 2 S (n - 1) / n bytes altogether
#
# Every algorithm sends the same bytes, so the one with the fewest steps wins where n is a power of two. Source: Thakur,
# Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005), sections 4.1 to 4.5.


_ROUNDS = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
"""Collective -> how often each rank sends its share of the whole: an all-reduce scatters, then gathers."""


def collective_seconds(node: Node, links: Mapping[str, Link]) -> float | None:
    """Return the seconds of a collective; ``None`` for any other node.

    Args:
        node: the node.
        links: dimension of the mesh -> the link between neighbouring ranks of it.

    Raises:
        CostError: SK322 if the dimension has no link.
    """
    group = collective_group(node)
    if group is None:
        return None
    if group.dimension not in links:
        raise CostError(
            "SK322",
            f"{node.name} is a collective over {group.dimension!r}, which has no link",
            f"Name the link of each dimension: roofline(graph, device, mesh={{{group.dimension!r}: 'nvlink4'}}).",
        )
    link, n, kind = links[group.dimension], group.ranks, op_name(node.target)
    rounds = next((count for name, count in _ROUNDS.items() if name in kind), 1)
    values = (value_of(node), *map(value_of, node.all_input_nodes))
    whole = max(sum(map(tensor_bytes, tensors(value))) for value in values)
    steps = n - 1 if "all_to_all" in kind or n & (n - 1) else ceil(log2(n))
    return rounds * (whole * (n - 1) / n / link.bandwidth + steps * link.latency) if n > 1 else 0.0


def mesh_of(costs: Costs) -> Mapping[str, Link]:
    """Return dimension of a mesh -> the link between its ranks, as far as prices know them."""
    found: Mapping[str, Link] = asked_of_costs(costs, "mesh") or {}
    return found


def mesh_links(mesh: Mapping[str, str | Link] | None) -> dict[str, Link]:
    """Return dimension of a mesh -> its link, from names or links; raises SK322 for an unknown one."""
    return {name: find_link(link) for name, link in (mesh or {}).items()}
