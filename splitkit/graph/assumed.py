"""Inputs of which nothing says that they are tensors, and that the analysis takes for tensors all the same.

By far most often, ``x.add(y)`` of an input without ``meta["val"]`` and annotation is the method of a tensor. That of an
object may change the object, so that its order, its copies and whether it runs at all matter. Where a split relies on
tensors, `splitkit.engine.inputkinds` looks at what each call gives.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.ops import tables
from splitkit.graph.ops.kinds import ValueKind, kind_of, read_from
from splitkit.graph.ops.names import is_python

Path = tuple[tuple[bool, object], ...]
"""How a value is read from an input: for each step, whether it is an attribute or an item, and which."""


@dataclass(frozen=True)
class Assumed:
    """A value that is taken for a tensor.

    Attributes:
        path: how it is read from the input; empty for the input itself.
        by: the nodes that would do something else with an object.
        no_array: whether one of them would do something else with an array of numpy.
    """

    path: Path
    by: tuple[Node, ...]
    no_array: bool


def assumed_tensors(flow: Dataflow) -> Mapping[Node, tuple[Assumed, ...]]:
    """Placeholder -> the values read from it that are taken for tensors, in time linear in nodes and edges."""
    known: dict[Node, ValueKind] = {}
    found: dict[Node, dict[Path, list[Node]]] = {}
    for node, effect in flow.effects.items():
        for value in _operands(node) if effect.known else ():
            if kind_of(value, flow.root, known) is ValueKind.OPEN:
                source, reads = read_from(value)
                if source.op == "placeholder":
                    path = tuple((r.target is getattr, r.args[1]) for r in reads)
                    found.setdefault(source, {}).setdefault(path, []).append(node)
    return {
        source: tuple(Assumed(path, tuple(by), any(map(_is_other_in_arrays, by))) for path, by in paths.items())
        for source, paths in found.items()
    }


def _operands(node: Node) -> tuple[Node, ...]:
    """The arguments whose class decides what a node does."""
    if node.op == "call_method" or node.target is operator.getitem:
        return tuple(a for a in node.args[:1] if isinstance(a, Node))
    return tuple(node.all_input_nodes) if is_python(node) and node.target is not getattr else ()


def _is_other_in_arrays(node: Node) -> bool:
    return node.op == "call_method" and node.target in tables.IN_PLACE_ELSEWHERE
