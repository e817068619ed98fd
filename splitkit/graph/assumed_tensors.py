"""Find the inputs that the analysis assumes to be tensors although nothing says so.

If an input has neither ``meta["val"]`` nor an annotation, ``x.add(y)`` is nearly always the method of a tensor. The
method of another object could change that object; then its order, its copies and whether it runs at all would matter.
So where a split relies on the assumption, `splitkit.engine.object_input_checks` checks the inputs of each call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.functions import is_python
from splitkit.graph.ops.value_kinds import ValueKind, read_from, value_kind

Path = tuple[tuple[bool, object], ...]
"""The reads that lead from an input to a value: for each, whether it reads an attribute (or an item), and its name."""


@dataclass(frozen=True)
class Assumed:
    """A value that is assumed to be a tensor.

    Attributes:
        path: how the value is read from the input; empty for the input itself.
        by: the nodes whose effects would differ for another object.
        no_array: whether the effects of one of these nodes would also differ for a numpy array.
    """

    path: Path
    by: tuple[Node, ...]
    no_array: bool


def assumed_tensors(flow: Dataflow) -> Mapping[Node, tuple[Assumed, ...]]:
    """Return placeholder -> the values read from it that are assumed to be tensors, in time linear in the graph."""
    known: dict[Node, ValueKind] = {}
    found: dict[Node, dict[Path, list[Node]]] = {}
    for node, effect in flow.effects.items():
        for value in _operands(node) if effect.known else ():
            if value_kind(value, flow.root, known) is ValueKind.OPEN:
                source, reads = read_from(value)
                if source.op == "placeholder":
                    path = tuple((r.target is getattr, r.args[1]) for r in reads)
                    found.setdefault(source, {}).setdefault(path, []).append(node)
    return {
        source: tuple(Assumed(path, tuple(by), any(map(_is_other_in_arrays, by))) for path, by in paths.items())
        for source, paths in found.items()
    }


def _operands(node: Node) -> tuple[Node, ...]:
    """Return the arguments whose class decides what a node does."""
    if node.op == "call_method" or node.target is operator.getitem:
        return tuple(a for a in node.args[:1] if isinstance(a, Node))
    return tuple(node.all_input_nodes) if is_python(node) and node.target is not getattr else ()


def _is_other_in_arrays(node: Node) -> bool:
    return node.op == "call_method" and node.target in op_tables.IN_PLACE_ELSEWHERE
