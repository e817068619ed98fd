"""Levels of a graph with two kinds of nodes: the number of times a chain must change its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow, given_back, readers_of, waits_for

Kinds = Mapping[Node, bool]
Levels = dict[Node, int]


def lowest(flow: Dataflow, kinds: Kinds, first: int) -> Levels:
    """Return the lowest level of each node; a level ends where the kind changes along data or effects.

    Nodes of kind ``True`` have the levels ``first``, ``first + 2`` ..., the others the levels between, from 0 on. Some
    chain changes its kind at every level, so no plan whose parts have one kind has fewer levels, for the better
    ``first``::

        kinds   a ── B ── c         first = 0     a: 0  B: 1  c: 2
                d ── e ── E ── f                  d: 0  e: 0  E: 1  f: 2
    """
    levels: Levels = {}
    for node, kind in kinds.items():
        least = first if kind else 1 - first
        for n in waits_for(flow, node):
            least = max(least, levels[n] + (kinds[n] != kind))
        levels[node] = least
    return levels


def sink(flow: Dataflow, costs: Costs, kinds: Kinds, levels: Levels, least: int) -> Levels:
    """Move nodes to the level of their readers where that sends fewer bytes across; the number of levels stays.

    The pass runs from the end of the graph, so that a chain (positions, a mask) follows its reader link by link.

    Args:
        flow: facts about the graph.
        costs: bytes of values.
        kinds: the kind of each placeable node.
        levels: the lowest level of each node.
        least: the least number of nodes that a level of kind ``True`` keeps.
    """
    users, given = readers_of(flow), given_back(flow)
    bound: dict[Node, int] = {}
    made, sizes = dict(levels), Counter(levels.values())
    for node in reversed(flow.nodes):
        kind, now, then = kinds[node], made[node], bound.get(node, 0)
        may = then > now and (not kind or sizes[now] > least) and node not in given
        may = may and all(made[u] == then for u in users[node])
        if may and not _brings(flow, costs, node, users, made, then):
            made[node] = then
            sizes.update({now: -1, then: 1})
        for n in waits_for(flow, node):
            bound[n] = min(bound.get(n, made[node]), made[node] - (kinds[n] != kind))
    return made


def _brings(
    flow: Dataflow, costs: Costs, node: Node, users: Mapping[Node, list[Node]], levels: Levels, level: int
) -> bool:
    """Return whether moving ``node`` to ``level`` adds more traffic than it removes."""
    new = [n for n in flow.inputs(node) if not any(levels[u] == level for u in users[n])]
    return sum(map(costs.nbytes, new)) > costs.nbytes(node)
