"""Describe the nodes of a graph by what pickle can save.

Pickle saves functions and classes by their names, but no ops: they are named here, and looked up when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node
from torch.fx.node import map_aggregate

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from splitkit.engine.codegen.writer import LeanGraph, Writer
from splitkit.engine.serialization.function_names import function_of, name_of_function
from splitkit.errors import FileError, GraphError


class GraphData(NamedTuple):
    """A graph for pickle.

    Attributes:
        nodes: op, target, arguments, keyword arguments, name and type of each node.
        codegen: the generator of its code, with the signature.
    """

    nodes: list[tuple[Any, ...]]
    codegen: Any


@dataclass(frozen=True)
class _Read:
    """Stands for a node among arguments."""

    name: str


@dataclass(frozen=True)
class _Op:
    """Stands for an op, and is loaded as that op."""

    name: str

    def __reduce__(self) -> Any:
        return _op_of, (self.name,)


def graph_as_data(graph: fx.Graph) -> GraphData:
    """Return a graph as data for pickle; the meta of nodes, which has fake tensors, is left out.

    Raises:
        GraphError: SK107 for an op that cannot be found by its name.
    """
    nodes = []
    for node in graph.nodes:
        told = map_aggregate((node.target, node.args, dict(node.kwargs)), lambda value: _told(node, value))  # noqa: B023
        nodes.append((node.op, *told, node.name, node.type))
    return GraphData(nodes, _torch.codegen_of(graph))


def graph_of_data(data: GraphData) -> fx.Graph:
    """Return the graph that `graph_as_data` has described."""
    graph, found = LeanGraph(), dict[str, Node]()
    writer = Writer(graph)
    for op, target, args, kwargs, name, kind in data.nodes:
        args, kwargs = map_aggregate((args, kwargs), lambda value: _read(value, found))
        found[name] = writer.node(op, target, args, dict(kwargs), name)
        found[name].type = kind
    graph.set_codegen(data.codegen)
    return graph


def _read(value: Any, found: Mapping[str, Node]) -> Any:
    return found[value.name] if isinstance(value, _Read) else value


def _told(node: Node, value: Any) -> Any:
    if isinstance(value, Node):
        return _Read(value.name)
    if isinstance(value, OpOverloadPacket):
        return _Op(f"packet.{value}")
    if not isinstance(value, (OpOverload, HigherOrderOperator)):
        return value
    if (name := name_of_function(value)) is None:
        raise GraphError(
            "SK107",
            f"{node.name} calls {value}, which cannot be found by its name when the pickle is loaded",
            "Save the plan (plan.save) and the weights (module.state_dict), and split again; or copy with "
            "copy.deepcopy.",
            [node],
        )
    return _Op(name)


def _op_of(name: str) -> Any:
    kind, _, rest = name.partition(".")
    space, _, packet = rest.partition(".")
    found = getattr(getattr(torch.ops, space), packet, None) if kind == "packet" else function_of(name)
    if found is None:
        raise FileError(
            "SK508",
            f"the pickled graph calls {rest}, which this process does not know",
            "Import the package that defines it before the pickle is loaded.",
        )
    return found
