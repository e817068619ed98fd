"""Finds nodes that only keep a module's books: counters, running ranges and the like, whose results no node reads.

Nothing but its module tells where such a node belongs. It costs next to nothing and feeds nothing, so a search would
put it wherever there is room, and its buffer with it::

    num_batches_tracked.add_(1)                 with the batch norm of its module
    low.copy_(minimum(low, x.amin()))           with what makes x
"""

from __future__ import annotations

from bisect import bisect

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, given_back, module_path


def bookkeeping(flow: Dataflow) -> list[tuple[Node, ...]]:
    """Return sets of nodes that only keep books, each set behind the node, which keeps none, in whose part it belongs.

    That is the last node that they compute from; if there is none, their neighbour in the order of the graph: the next
    node, or the one before if only that one is in their module.
    """
    place, group = flow.index.__getitem__, dict[Node, list[Node]]()
    for node in _books(flow):
        own = group[node] = [node]
        for first in flow.waits[node]:
            if first in group and group[first] is not own:
                own += group[first]
                group |= dict.fromkeys(group[first], own)
    others = [node for node in flow.nodes if node not in group]
    found = []
    for nodes in {id(nodes): sorted(nodes, key=place) for nodes in group.values()}.values():
        at, owner = bisect(others, place(nodes[0]), key=place), module_path(nodes[0])
        near = [*others[at : at + 1], *others[max(at - 1, 0) : at]]
        made = [first for node in nodes for first in flow.waits[node] if first not in group]
        inside = (node for node in near if f"{module_path(node)}.".startswith(f"{owner}."))
        home = max(made, key=place) if made else next(inside, near[0] if near else None)
        if home is not None:
            found.append((home, *nodes))
    return found


def _books(flow: Dataflow) -> list[Node]:
    """Return, in graph order, the nodes that write memory or make a new state and are read by no node, and those of
    their module that only these read.
    """
    given, found = given_back(flow), set[Node]()
    readers: dict[Node, list[Node]] = {node: [] for node in flow.nodes}
    for node, before in flow.waits.items():
        for first in before:
            readers[first].append(node)
    for node in reversed(flow.nodes):
        owner, isolated = module_path(node), not flow.waits[node]
        if readers[node]:
            alike = isolated or (owner and all(module_path(reader) == owner for reader in readers[node]))
            is_book = node not in given and alike and found.issuperset(readers[node])
        else:
            # a joint graph returns the new state, where others write it
            is_book = node in flow.once and (isolated or (node not in given and bool(flow.effects[node].writes)))
        if is_book:
            found.add(node)
    return [node for node in flow.nodes if node in found]
