"""Names sets of nodes by their modules, with equal layers folded: ``layers.0-5``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.view.data.short_paths import collapse

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST = 8


def folded_modules(nodes: Iterable[Node], flow: Dataflow) -> str:
    """Return the modules of some nodes, folded to ranges; where few nodes of a module are meant, it says how many."""
    paths = flow.fact(_paths)
    names = collapse([paths[n] for n in nodes if n in paths], paths.values())
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _paths(flow: Dataflow) -> dict[Node, str]:
    return {node: module_path(node) for node in flow.nodes}


def without_numbers(path: str) -> tuple[str, tuple[int, ...]]:
    """Return a module path with ``*`` in place of its numbers, and the numbers."""
    return _NUMBER.sub("*", path), tuple(map(int, _NUMBER.findall(path)))


def ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3 and 5."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
