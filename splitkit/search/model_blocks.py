"""The blocks of a model: members of its module lists, which is how people divide a model by hand."""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow, module_path

Block = tuple[str, int]
"""The list that a block is in, and its number there: ``("transformer.h", 3)``."""

_COMPARABLE = 0.5  # of the work of the heaviest list: a list with so much may be the model's blocks
_ANOTHER = 0.1  # so much makes a list of the same depth one of several: the encoder's and the decoder's


def model_blocks(flow: Dataflow, costs: Costs) -> dict[Block, list[Node]]:
    """Return the blocks of the model with their nodes, in graph order.

    Of the lists that do about as much work as any other, the longest one holds the blocks: the layers of a backbone
    count, not the pair of backbone and head, nor the experts of each layer. Lists of the same depth count too if they
    do much of the work.
    """
    lists: dict[str, dict[int, list[Node]]] = {}
    work: Counter[str] = Counter()
    for node in flow.nodes:
        atoms = module_path(node).split(".")
        for i, atom in enumerate(atoms):
            if atom.isdecimal():
                name = ".".join(atoms[:i])
                lists.setdefault(name, {}).setdefault(int(atom), []).append(node)
                work[name] += costs.seconds(node)  # type: ignore[assignment]
    several = [name for name, members in lists.items() if len(members) > 1]
    most = max((work[name] for name in several), default=0)
    able = [name for name in several if work[name] >= _COMPARABLE * most]
    if not able:
        return {}
    main = max(able, key=lambda name: (len(lists[name]), -len(name)))
    same = [name for name in several if _depth(name) == _depth(main) and work[name] >= _ANOTHER * most]
    return {(name, number): nodes for name in same for number, nodes in lists[name].items()}


def _depth(name: str) -> int:
    """Return how many lists contain the list."""
    return sum(atom.isdecimal() for atom in name.split("."))
