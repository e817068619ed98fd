"""Merge common subexpressions of a joint graph, separately within forward and within backward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from splitkit._torch import FakeTensor, HigherOrderOperator, pytree
from splitkit.graph.storages import storage_key, storages_shown, tensors, value_of
from splitkit.training.flow import JointFlow, save_all_plan

# Entries of `meta` that tell two equal ops apart: checkpoint tags, streams, and the half that AOTAutograd wants for
# a node (torch 2.11, 2.13, 2.15).
_MARKS = ("recompute", "ac_graph_id", "has_backward_hook", "saved_tensor_with_no_vc_check", "custom", "partitioner_tag")
_PLAIN = (torch.Tensor, FakeTensor, torch.nn.Parameter)


def deduplicate(flow: JointFlow) -> fx.GraphModule:
    """Return a copy of the graph in which equal ops on equal inputs of one half are merged.

    Examples are a causal mask that each layer builds, a constant, or two equal views of a tensor. The algorithm is
    value numbering, in linear time. Ops merge within forward and within backward, never across: eager autograd
    recomputes cheap values in backward, and that choice belongs to the policy. A value that a policy may save then
    counts once.

    These nodes are not merged: random ops and effects, which may run only once; nodes that touch memory which the
    graph writes; nodes that share memory with an output, since the caller may write to one of two equal outputs; inputs
    and results of higher-order ops; nodes with different checkpoint tags. A merged node has the name and value of the
    first; a view of a node that was merged away gets a value that is a view of the first. Constants are compared by
    type and bits: ``1``, ``1.0``, ``-0.0`` and ``nan`` are all different.

    The model is torch's ``fx_graph_cse`` (torch/_functorch/compile_utils.py), which merges across the halves.
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
    """Return a mapping from each redundant node to the first node that computes the same value."""
    apart, home = _memory_apart(flow), save_all_plan(flow)
    first: dict[Hashable, Node] = {}
    found: dict[Node, Node] = {}
    for node in flow.scope:
        if not _may_merge(flow, node, apart):
            continue
        marks = [node.meta.get(mark) for mark in _MARKS]
        where = home.get(flow.producer(node))
        try:
            key = _key((node.target, node.args, dict(node.kwargs), marks, where, flow.scope[node]), found)
        except TypeError:  # an argument cannot be hashed
            continue
        # Equal keys are not enough: a view of the merged node must be possible as a view of the earlier one.
        earlier = first.setdefault(key, node)
        if earlier is not node and _alike(value_of(earlier), value_of(node)):
            found[node] = earlier
    return found


def _memory_apart(flow: JointFlow) -> set[Hashable]:
    """Return the storages that are written, returned, or passed to higher-order ops."""
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
        return False  # FakeTensor memoizes the symbol of nonzero, item ...: Inductor would see two ops bind one symbol
    values = [t for n in (node, *node.all_input_nodes) for t in tensors(value_of(n))]
    return all(type(t) in _PLAIN and storage_key(t) not in apart for t in values)


def _key(value: Any, found: Mapping[Node, Node]) -> Hashable:
    """Return a key that is equal for arguments of the same type and bits; a merged node counts as its replacement.

    Raises:
        TypeError: if part of the value cannot be hashed.
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
        return type(value), repr(value)  # distinguishes -0.0 from 0.0 and makes nan equal to itself
    hash(value)
    return type(value), value


def _alike(one: Any, other: Any) -> bool:
    """Whether two values have the same layout, so that a view of one can be a view of the other."""
    mine, theirs = list(tensors(one)), list(tensors(other))
    if not mine or len(mine) != len(theirs):
        return one is not None and not free_unbacked_symbols(other) and not mine and not theirs
    return all(_layout(a) == _layout(b) for a, b in zip(mine, theirs, strict=True))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return tuple(map(_expression, sizes)), tensor.dtype, tensor.device


def _expression(size: int | torch.SymInt) -> Any:
    """Return the expression of a size. Comparing SymInts would add guards, and raises for data-dependent sizes."""
    return size.node.expr if isinstance(size, torch.SymInt) else size  # 2.11, 2.13, 2.15


def _values_of_views(flow: JointFlow, replaced: Mapping[Node, Node]) -> dict[Node, Any]:
    """Return new values for kept nodes that are views of merged nodes: views of their replacements."""
    instead: dict[Hashable, torch.Tensor] = {}
    for node, first in replaced.items():
        for gone, kept in zip(tensors(value_of(node)), tensors(value_of(first)), strict=True):
            kept = instead.get(storage_key(kept), kept)  # it may itself be a view of a merged node
            if storage_key(gone) != storage_key(kept):
                instead.setdefault(storage_key(gone), kept)
    found: dict[Node, Any] = {}
    for node in flow.scope:
        if node not in replaced and any(storage_key(t) in instead for t in tensors(value_of(node))):
            found[node] = pytree.tree_map_only(torch.Tensor, lambda t: _moved(t, instead), value_of(node))
    return found


def _moved(tensor: torch.Tensor, instead: Mapping[Hashable, torch.Tensor]) -> torch.Tensor:
    """Return the tensor in the storage that replaces its own, if there is one."""
    storage_of = instead.get(storage_key(tensor))
    if storage_of is None:
        return tensor
    with storage_of.fake_mode if isinstance(storage_of, FakeTensor) else nullcontext():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(storage_of.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
