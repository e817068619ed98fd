"""Finds the caches of a decoder: the inputs of a graph that it returns updated.

::

    logits, keys', values' = decoder(tokens, mask, positions, keys, values)      keys -> keys', values -> values'
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch

ARGUMENTS = ("past_key_values", "cache_params")
"""The arguments of transformers' models that are caches; their outputs have the same names."""

DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
"""The arguments of language models for features of images that are added in several layers; text has none."""

ENCODER_CACHES = "encoder_caches"
"""The key in the ``meta`` of a decoder's graph of the graph that computes keys and values of an encoder's output."""


class CacheTensor(NamedTuple):
    """One tensor of a cache, such as the keys or the state of a layer.

    Attributes:
        given: the input of the graph.
        updated: the node that computes what the tensor is after the call.
    """

    given: Node
    updated: Node


def caches_of(gm: fx.GraphModule) -> tuple[CacheTensor, ...]:
    """Return the tensors of caches among the inputs of a captured graph, in the order of the inputs.

    They are found by the names of arguments and outputs (``past_key_values``), so a graph without the call signature
    of an export has none. A tensor that the graph returns as it is, such as the keys of an encoder's output, is its own
    update.
    """
    given, updated = given_caches(gm), updated_caches(gm)
    return tuple(map(CacheTensor, given, updated)) if len(given) == len(updated) else ()


def given_caches(gm: fx.GraphModule) -> list[Node]:
    """Return the inputs of a graph that are tensors of caches."""
    info = _signature(gm)
    if info is None:
        return []
    inputs = gm.graph.find_nodes(op="placeholder")[info.in_spec.child(0).num_leaves :]
    return [node for name in ARGUMENTS for i in _leaves(info.in_spec.child(1), name) if _is_tensor(node := inputs[i])]


def updated_caches(gm: fx.GraphModule) -> list[Node]:
    """Return the outputs of a graph that are tensors of caches."""
    info = _signature(gm)
    if info is None:
        return []
    outputs = _outputs(gm.graph)
    return [node for name in ARGUMENTS for i in _leaves(info.out_spec, name) if _is_tensor(node := outputs[i])]


def constant_caches(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the caches that a graph returns as they are: keys and values of an encoder's output."""
    return tuple(cache.given.name for cache in caches_of(gm) if cache.given is cache.updated)


def runs_outside(gm: fx.GraphModule) -> bool:
    """Whether an encoder, or what images need, computes inputs of a decoder's graph; its weights are in no part."""
    embedded = gm.graph.find_nodes(op="placeholder", target="inputs_embeds")
    return ENCODER_CACHES in gm.meta or bool(embedded and caches_of(gm))


def _signature(gm: fx.GraphModule) -> Any:
    info = getattr(_torch.codegen_of(gm.graph), "pytree_info", None)
    return None if info is None or info.out_spec is None else info


def cache_forms(graph: fx.Graph, cache: CacheTensor) -> tuple[set[Node], list[Node]]:
    """Return the tensors that hold nothing but a cache, such as its keys repeated for each head, and all their readers.

    The update of a cache, which reads new keys too, counts as a form of it and as a reader, also where other nodes are
    between them, as a cut to the size of a state.
    """
    forms, readers = {cache.given, cache.updated}, list[Node]()
    writer = cache.updated
    while writer.target is operator.getitem:
        writer = writer.all_input_nodes[0]
    for node in graph.nodes:
        read = [n for n in node.all_input_nodes if _is_tensor(n) and n.op != "get_attr"]
        if node.op != "output" and (not forms.isdisjoint(read) or (node is writer and node.op != "placeholder")):
            readers.append(node)
            if forms.issuperset(read) and _is_tensor(node):
                forms.add(node)
    return forms, readers


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    value = graph.output_node().args[0]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _leaves(spec: Any, name: str) -> Iterator[int]:
    """Yield the numbers of the leaves under a key of a dict or of a dict-like class."""
    names, at = spec.context, 0
    if not isinstance(names, list):
        return
    for i, key in enumerate(names[: spec.num_children]):
        count = spec.child(i).num_leaves
        if key == name:
            yield from range(at, at + count)
        at += count
