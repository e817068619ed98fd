"""Turns the nodes of a graph into columns of plain data, in which equal texts are stored once."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Node

from splitkit import _torch
from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.prices import Costs

# A frame of a formatted traceback, as fx, Dynamo and torch.export write it (2.11, 2.13, 2.15).
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(.*)')


def ops_data(flow: Dataflow, nodes: Sequence[Node], row: Callable[[Node], int], costs: Costs) -> dict[str, Any]:
    """Return columns of equal length, with one entry per node.

    ``module``, ``sort`` and ``source`` are indices into ``modules``, ``sorts`` and ``sources``; a sort is ``[op, value,
    bytes, seconds]``, which equal layers share; a source is the line of Python that made the op. ``reads`` has, for
    each value that a node reads, how many entries further up the value is.

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
    sources, source = _numbered(source_line(node) for node in nodes)
    return {
        "name": [node.name for node in nodes],
        "row": [row(node) for node in nodes],
        "modules": modules,
        "module": module,
        "sorts": sorts,
        "sort": sort,
        "sources": sources,
        "source": source,
        "reads": [[place[node] - place[n] for n in flow.inputs(node) if n in place] for node in nodes],
    }


def source_line(node: Node) -> str:
    """Return the innermost line of the model's code that made a node: ``net/model.py:12: x = self.act(x)``, or ``""``.

    Lines of torch itself, which every call of a layer passes, say nothing about the model. Of a path only the folder
    and the file are shown.
    """
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in found if "/site-packages/torch/" not in frame[0].replace("\\", "/")] or found
    if not own:
        return ""
    file, number, code = own[-1]
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-2:])}:{number}: {code.strip()}"


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
