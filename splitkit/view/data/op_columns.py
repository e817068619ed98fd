"""Turns the nodes of a graph into columns of plain data, in which equal texts are stored once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Node

from splitkit import _torch
from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.prices import Costs


def ops_data(flow: Dataflow, nodes: Sequence[Node], row: Callable[[Node], int], costs: Costs) -> dict[str, Any]:
    """Return columns of equal length, with one entry per node.

    ``module`` and ``sort`` are indices into ``modules`` and ``sorts``; a sort is ``[op, value, bytes, seconds]``, which
    equal layers share. ``reads`` has, for each value that a node reads, how many entries further up the value is.

    Args:
        flow: facts about the graph.
        nodes: the nodes in topological order.
        row: node -> its row.
        costs: the prices of the nodes.
    """
    place = {node: i for i, node in enumerate(nodes)}
    modules, module = _numbered(module_path(node) for node in nodes)
    sorts, sort = _numbered(
        (_torch.target_name(node), type_text(node), costs.nbytes(node), rounded(costs.seconds(node))) for node in nodes
    )
    return {
        "name": [node.name for node in nodes],
        "row": [row(node) for node in nodes],
        "modules": modules,
        "module": module,
        "sorts": sorts,
        "sort": sort,
        "reads": [[place[node] - place[n] for n in flow.inputs(node) if n in place] for node in nodes],
    }


def row_kind(nodes: Iterable[Node]) -> int:
    """Return a hash of the ops and types in a row; rows of equal layers have the same, and pictures fold them."""
    shape = "|".join(f"{_torch.target_name(node)} {type_text(node)}" for node in nodes)
    return zlib.crc32(shape.encode())


def type_text(node: Node) -> str:
    """Return the type of a node's value: ``float32[2, 16, 64]``."""
    texts = (
        f"{str(t.dtype).removeprefix('torch.')}{[*map(str, t.shape)]}".replace("'", "") for t in tensors(value_of(node))
    )
    return ", ".join(texts)


def rounded(number: float) -> float | int:
    """Return a number with seven digits; pictures show fewer."""
    return number if isinstance(number, int) else float(f"{number:.7g}")


def _numbered(words: Iterable[Any]) -> tuple[list[Any], list[int]]:
    numbers: dict[Any, int] = {}
    which = [numbers.setdefault(word, len(numbers)) for word in words]
    return list(numbers), which
