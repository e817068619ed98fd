"""The ops of a picture as columns of plain data; what stands often is told once."""

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
    """Columns of equal length, one entry a node.

    ``module`` and ``sort`` are numbers: of ``modules``, and of ``sorts``, each ``[op, value, bytes, seconds]``, since
    the ops of equal layers are equal. ``reads`` says how many places further up each value that is read stands.

    Args:
        flow: facts about the graph.
        nodes: in the order in which they stand; none reads from a later one.
        row: node -> its row.
        costs: prices.
    """
    place = {node: i for i, node in enumerate(nodes)}
    modules, module = _numbered(module_path(node) for node in nodes)
    sorts, sort = _numbered(
        (_torch.target_name(node), text_of(node), costs.nbytes(node), rounded(costs.seconds(node))) for node in nodes
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


def kind_of(nodes: Iterable[Node]) -> int:
    """The same number for rows that compute the same, however the numbers in their names differ."""
    shape = "|".join(f"{_torch.target_name(node)} {text_of(node)}" for node in nodes)
    return zlib.crc32(shape.encode())


def text_of(node: Node) -> str:
    """``float32[2, 16, 64]``."""
    texts = (
        f"{str(t.dtype).removeprefix('torch.')}{[*map(str, t.shape)]}".replace("'", "") for t in tensors(value_of(node))
    )
    return ", ".join(texts)


def rounded(number: float) -> float | int:
    """With seven digits: more than are shown."""
    return number if isinstance(number, int) else float(f"{number:.7g}")


def _numbered(words: Iterable[Any]) -> tuple[list[Any], list[int]]:
    numbers: dict[Any, int] = {}
    which = [numbers.setdefault(word, len(numbers)) for word in words]
    return list(numbers), which
