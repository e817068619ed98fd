"""Common subexpressions of a joint graph: what a half would compute twice, it computes once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from splitkit._torch import FakeTensor, HigherOrderOperator, pytree
from splitkit.graph.storages import storage_key, storages_shown, tensors
from splitkit.graph.symbols import value_of
from splitkit.training.flow import JointFlow, homes

# What sets two equal ops apart: checkpoint tags, streams, and where AOTAutograd wants them (2.11, 2.13, 2.15).
_MARKS = ("recompute", "ac_graph_id", "has_backward_hook", "saved_tensor_with_no_vc_check", "custom", "partitioner_tag")
_PLAIN = (torch.Tensor, FakeTensor, torch.nn.Parameter)


def deduplicated(flow: JointFlow) -> fx.GraphModule:
    """A copy of the graph in which equal ops on equal inputs of one half are one: value numbering, in linear time.

    A causal mask that each layer makes anew, a constant, two views of one tensor. Ops merge within forward and within
    backward, never across: eager autograd computes again in backward what is cheap, and a policy is to choose. So the
    values that a plan saves, and a policy weighs, are counted once.

    Stay apart: what may run only once (random ops, effects); what touches memory that the graph writes; what shares
    memory with an output, since the caller may write to one of two equal outputs; inputs and results of higher-order
    ops; what checkpoint tags tell apart. Names and values are those of the first one; a view of another one gets a
    value that is a view of the first. Constants are told apart by type and bits: ``1``, ``1.0``, ``-0.0``, ``nan``.

    After ``fx_graph_cse``, which merges across the halves.
    """
    replaced = _replacements(flow)
    again = _values_of_views(flow, replaced)
    graph, env = fx.Graph(), dict[Node, Node]()
    for node in flow.graph.nodes:
        if node in replaced:
            env[node] = env[replaced[node]]
            continue
        env[node] = copied = graph.node_copy(node, env.__getitem__)
        if node in again:
            copied.meta["val"] = again[node]
    return fx.GraphModule(flow.root, graph)


def _replacements(flow: JointFlow) -> dict[Node, Node]:
    """Node -> the earlier one that computes the same."""
    apart, home = _memory_apart(flow), homes(flow)
    first: dict[Hashable, Node] = {}
    found: dict[Node, Node] = {}
    for node in flow.scope:
        if not _may_merge(flow, node, apart):
            continue
        marks = [node.meta.get(mark) for mark in _MARKS]
        where = home.get(flow.producer(node))
        try:
            key = _key((node.target, node.args, dict(node.kwargs), marks, where, flow.scope[node]), found)
        except TypeError:  # an argument without a hash
            continue
        earlier = first.setdefault(key, node)
        if earlier is not node and _alike(value_of(earlier), value_of(node)):
            found[node] = earlier
    return found


def _memory_apart(flow: JointFlow) -> set[Hashable]:
    """The storages that are written, returned, or handed to higher-order ops."""
    nodes = [n for effects in flow.effects.values() for n in effects.writes]
    nodes += flow.graph.output_node().all_input_nodes
    for node in flow.scope:
        if isinstance(node.target, HigherOrderOperator):
            nodes += [node, *node.all_input_nodes]
    return storages_shown(nodes)


def _may_merge(flow: JointFlow, node: Node, apart: set[Hashable]) -> bool:
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator) or not flow.effects[node].known:
        return False
    if node in flow.once or flow.producer(node) in flow.once or flow.after[node]:
        return False
    if any(user.meta.get("unbacked_bindings") for user in node.users):  # 2.11, 2.13, 2.15
        return False  # a fake tensor remembers what it was asked first: two ops would bind one symbol in Inductor
    values = [t for n in (node, *node.all_input_nodes) for t in tensors(value_of(n))]
    return all(type(t) in _PLAIN and storage_key(t) not in apart for t in values)


def _key(value: Any, found: Mapping[Node, Node]) -> Hashable:
    """Equal for values that are the same in type and bits, nodes by what they are replaced by.

    Raises:
        TypeError: when something in it cannot be told apart.
    """
    if isinstance(value, Node):
        return found.get(value, value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(item, found) for item in value)
    if isinstance(value, dict):
        return dict, tuple((name, _key(item, found)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, _key((value.start, value.stop, value.step), found)
    if isinstance(value, float | complex):
        return type(value), repr(value)  # tells -0.0 from 0.0, and nan equals nan
    hash(value)
    return type(value), value


def _alike(one: Any, other: Any) -> bool:
    """Whether two values have one layout, so that a view of one is a view of the other."""
    mine, theirs = list(tensors(one)), list(tensors(other))
    if not mine or len(mine) != len(theirs):
        return one is not None and not free_unbacked_symbols(other) and not mine and not theirs
    return all(_layout(a) == _layout(b) for a, b in zip(mine, theirs, strict=True))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return tuple(map(_expression, sizes)), tensor.dtype, tensor.device


def _expression(size: int | torch.SymInt) -> Any:
    """What a size is made of: to compare symbols themselves would add guards, and fails where the data decides."""
    return size.node.expr if isinstance(size, torch.SymInt) else size  # 2.11, 2.13, 2.15


def _values_of_views(flow: JointFlow, replaced: Mapping[Node, Node]) -> dict[Node, Any]:
    """New values for nodes that stay and are views of what went: views of what it was replaced by."""
    instead: dict[Hashable, torch.Tensor] = {}
    for node, first in replaced.items():
        for gone, kept in zip(tensors(value_of(node)), tensors(value_of(first)), strict=True):
            kept = instead.get(storage_key(kept), kept)  # it may be a view of what went
            if storage_key(gone) != storage_key(kept):
                instead.setdefault(storage_key(gone), kept)
    found: dict[Node, Any] = {}
    for node in flow.scope:
        if node not in replaced and any(storage_key(t) in instead for t in tensors(value_of(node))):
            found[node] = pytree.tree_map_only(torch.Tensor, lambda t: _moved(t, instead), value_of(node))
    return found


def _moved(tensor: torch.Tensor, instead: Mapping[Hashable, torch.Tensor]) -> torch.Tensor:
    """The tensor as it is, but in the storage that took the place of its own."""
    storage_of = instead.get(storage_key(tensor))
    if storage_of is None:
        return tensor
    with storage_of.fake_mode if isinstance(storage_of, FakeTensor) else nullcontext():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(storage_of.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
