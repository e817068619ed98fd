"""What a graph is drawn as: rows from top to bottom, none of which reads from a row below it.

A row is a module: a numbered layer, or what stands beside numbered layers. Where a plan cuts through a module, each of
its parts has a row of its own::

    transformer.wte            row 0   stage 0
    transformer.h.0            row 1   stage 0
    transformer.h.1            row 2   stage 0
    transformer.h.1 (rest)     row 3   stage 1
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, module_path, waits_for
from splitkit.graph.joint import backward_nodes, owners


@dataclass(frozen=True)
class LadderRows:
    """The rows of a graph.

    Attributes:
        names: of each row, from the top; different.
        of: placeable node -> its row.
        backward: the nodes that a joint graph runs in backward; they stand in the row of what they are the backward of.
        parts: the part of each row.
    """

    names: tuple[str, ...]
    of: Mapping[Node, int]
    backward: frozenset[Node]
    parts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


def rows_of(flow: Dataflow, part: Mapping[Node, int]) -> LadderRows:
    """The rows of a graph under a plan.

    A node is in the row of its module, or in that of a node that it waits for, whichever is lower: so values only go
    down. Backward nodes of a joint graph do not decide where a row is.

    Args:
        flow: facts about the graph.
        part: placeable node -> the number of its part in the order in which parts run; of backward nodes that of the
            forward node's is taken.
    """
    late = backward_nodes(flow.graph)
    forward = [node for node in flow.nodes if node not in late]
    units = _units({module_path(node) for node in forward})
    order = sorted(forward, key=lambda node: part.get(node, 0))  # stable: in graph order within a part
    row_of: dict[Node, int] = {}
    known: dict[Hashable, int] = {}
    names: list[str] = []
    parts: list[int] = []
    for node in order:
        own = part.get(node, 0)
        key = units[module_path(node)], own
        if key not in known:
            known[key] = len(names)
            names.append(key[0])
            parts.append(own)
        row_of[node] = max([known[key], *(row_of[n] for n in waits_for(flow, node) if n in row_of)])
    names = _different(names)
    kept = sorted(set(row_of.values()))
    place = {row: i for i, row in enumerate(kept)}
    of = {node: place[row] for node, row in row_of.items()}
    owner = owners(flow.graph) if late else {}
    of |= {node: of.get(owner[node], len(kept) - 1) for node in flow.nodes if node in late and node in owner}
    left = {node: len(kept) - 1 for node in flow.nodes if node not in of}
    return LadderRows(tuple(names[r] for r in kept), of | left, frozenset(late), tuple(parts[r] for r in kept))


def _units(paths: Iterable[str]) -> dict[str, str]:
    """Module path -> the path of the row that it is in.

    Down to the first number. A module that has numbered layers below it is seen through, so that its other children
    are rows too, and what it computes itself is one.
    """
    paths = set(paths)
    through = {""}
    for path in paths:
        atoms = path.split(".")
        first = next((i for i, atom in enumerate(atoms) if atom.isdigit()), None)
        if first is not None:
            through.update(".".join(atoms[:i]) for i in range(1, first))
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


def _different(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} (part {seen[name]})")
    return found
