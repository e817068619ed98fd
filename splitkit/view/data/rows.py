"""Divides a graph into the rows of its picture; no row reads from a row below it.

A row is a module: a numbered layer, or a sibling of numbered layers. Where a plan divides a module, each part of the
plan has a row of its own::

    transformer.wte            row 0   stage 0
    transformer.h.0            row 1   stage 0
    transformer.h.1            row 2   stage 0
    transformer.h.1 (part 2)   row 3   stage 1

A row of more than `MOST_OPS` ops that is not a numbered layer is divided further: into the modules inside it, and what
lies directly in one module, as in a model written without modules, into runs of ops where few values are alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, module_path, readers_of, waits_for
from splitkit.graph.joint_marks import backward_nodes, forward_owners

MOST_OPS = 100
"""A row of more ops is divided. Layers of transformers have 20 to 60."""
_RUN, _SPREAD = 40, 15
"""The ops of a run where modules do not divide a row, and by how many its end may move to where fewer are alive."""


@dataclass(frozen=True)
class LadderRows:
    """The rows of a graph.

    Attributes:
        names: the unique names of the rows, from the top.
        of: placeable node -> its row.
        backward: the backward nodes of a joint graph; each lies in the row of the forward node that it belongs to.
        parts: the part of each row.
    """

    names: tuple[str, ...]
    of: Mapping[Node, int]
    backward: frozenset[Node]
    parts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


def ladder_rows(flow: Dataflow, part: Mapping[Node, int]) -> LadderRows:
    """Divide a graph into rows under a plan.

    A node lies in the row of its module, or in the row of a node that it waits for if that is lower: so values only go
    down. The backward nodes of a joint graph do not decide where a row is.

    Args:
        flow: facts about the graph.
        part: placeable node -> the number of its part in the order in which parts run; backward nodes follow their
            forward nodes.
    """
    late = backward_nodes(flow.graph)
    forward = [node for node in flow.nodes if node not in late]
    row_paths = _row_paths(Counter(module_path(node) for node in forward))
    order = sorted(forward, key=lambda node: part.get(node, 0))  # stable: in graph order within a part
    runs = _runs(flow, forward, row_paths)
    row_of: dict[Node, int] = {}
    known: dict[Hashable, int] = {}
    names: list[str] = []
    parts: list[int] = []
    # a node opens its module's row at the first node of that module and part; then it sinks below what it waits for
    for node in order:
        own = part.get(node, 0)
        path, run = row_paths[module_path(node)], runs.get(node, "")
        key = path, run, own
        if key not in known:
            known[key] = len(names)
            names.append(f"{path} · {run}" if run else path)
            parts.append(own)
        row_of[node] = max([known[key], *(row_of[n] for n in waits_for(flow, node) if n in row_of)])
    names = _unique(names)
    kept = sorted(set(row_of.values()))  # sinking may have emptied rows
    place = {row: i for i, row in enumerate(kept)}
    of = {node: place[row] for node, row in row_of.items()}
    owner = forward_owners(flow.graph) if late else {}
    of |= {node: of.get(owner[node], len(kept) - 1) for node in flow.nodes if node in late and node in owner}
    # backward nodes without a forward node of their own, such as the loss's, go to the last row
    left = {node: len(kept) - 1 for node in flow.nodes if node not in of}
    return LadderRows(tuple(names[r] for r in kept), of | left, frozenset(late), tuple(parts[r] for r in kept))


def _row_paths(paths: Counter[str]) -> dict[str, str]:
    """Return module path -> the path of the row that the module lies in.

    A row's path ends at the first number. A module that contains numbered layers is not a row of its children: they are
    rows themselves, and so is what the module computes itself. The same holds for a module of too many ops.

    Args:
        paths: module path -> the number of its ops.
    """
    through = {""}
    for path in paths:
        atoms = path.split(".")
        first = next((i for i, atom in enumerate(atoms) if atom.isdigit()), None)
        if first is not None:
            through.update(".".join(atoms[:i]) for i in range(1, first))
    while True:
        found = _rows_below(paths, through)
        ops: Counter[str] = Counter()
        for path, count in paths.items():
            ops[found[path]] += count
        inside = {row for path, row in found.items() if path != row and row not in through}
        large = {row for row in inside if _is_divided(row, ops[row])}
        if not large:
            return found
        through |= large


def _is_divided(path: str, ops: int) -> bool:
    """Whether a row is divided: it has too many ops, and is not a numbered layer."""
    return ops > MOST_OPS and not path.rpartition(".")[2].isdigit()


def _rows_below(paths: Mapping[str, int], through: set[str]) -> dict[str, str]:
    """Return module path -> its row, where the children of the modules ``through`` are rows."""
    found = {}
    for path in paths:
        atoms = path.split(".") if path else []
        end = 0
        while end < len(atoms) and (end == 0 or ".".join(atoms[:end]) in through):
            end += 1
            if end < len(atoms) and atoms[end].isdigit():
                end += 1
                break
        found[path] = ".".join(atoms[:end]) or "(top level)"
    return found


def _runs(flow: Dataflow, forward: Sequence[Node], row_paths: Mapping[str, str]) -> dict[Node, str]:
    """Return node -> the name of its run of ops, for the nodes of rows that modules do not divide enough."""
    rows: dict[str, list[Node]] = {}
    for node in forward:
        rows.setdefault(row_paths[module_path(node)], []).append(node)
    large = [nodes for path, nodes in rows.items() if _is_divided(path, len(nodes))]
    if not large:
        return {}
    last = {node: max((flow.index[r] for r in readers), default=-1) for node, readers in readers_of(flow).items()}
    return {node: name for nodes in large for name, run in _narrow_runs(flow, nodes, last) for node in run}


def _narrow_runs(
    flow: Dataflow, nodes: Sequence[Node], last: Mapping[Node, int]
) -> Iterator[tuple[str, Sequence[Node]]]:
    """Yield the name and the nodes of each run; runs end where the fewest values of these nodes are alive."""
    ends = [0] * (len(nodes) + 1)  # by position among the nodes: how many values are read for the last time there
    place = [flow.index[node] for node in nodes]
    for node in nodes:
        ends[bisect_left(place, last.get(node, -1))] += 1
    alive = [i + 1 - read for i, read in enumerate(accumulate(ends[:-1]))]
    start = 0
    while start < len(nodes):
        middle = start + _RUN
        if middle + _RUN // 2 >= len(nodes):
            end = len(nodes)
        else:
            end = 1 + min(range(middle - _SPREAD, middle + _SPREAD), key=lambda i: (alive[i], abs(i - middle)))
        run = nodes[start:end]
        yield f"{run[0].name} … {run[-1].name}", run
        start = end


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} (part {seen[name]})")
    return found
