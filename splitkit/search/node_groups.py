"""Sets of nodes that must be in one part, extended by every node that lies between their members."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, waits_for
from splitkit.solvers.placement.colocation import strong_components


def bundled(flow: Dataflow, nodes: Sequence[Node], together: Sequence[Sequence[Node]]) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes in bundles, in topological order: single nodes, and one bundle for each of the sets.

    A node on a path between two nodes of a set is in their part too, or parts would wait for each other.

    Args:
        flow: facts about the graph.
        nodes: the nodes in graph order.
        together: sets of these nodes; sets that share a node are merged.
    """
    if not together:
        return tuple((node,) for node in nodes)
    at = {node: place for place, node in enumerate(nodes)}
    edges = [(at[first], place) for node, place in at.items() for first in waits_for(flow, node) if first in at]
    ties = [(at[a], at[b]) for group in together for a, b in pairwise(group)]
    both = np.array([*edges, *ties, *((b, a) for a, b in ties)], np.int64).reshape(-1, 2)
    label = strong_components(both, len(nodes)).tolist()
    members: dict[int, list[Node]] = {}
    for node, bundle in zip(nodes, label, strict=True):
        members.setdefault(bundle, []).append(node)
    after: dict[int, set[int]] = {bundle: set() for bundle in members}
    for first, then in edges:
        if label[first] != label[then]:
            after[label[first]].add(label[then])
    return tuple(tuple(members[bundle]) for bundle in _sorted(after, {b: at[m[0]] for b, m in members.items()}))


def _sorted(after: dict[int, set[int]], place: dict[int, int]) -> list[int]:
    """Return a topological order that follows ``place`` where it is free to choose."""
    missing = dict.fromkeys(after, 0)
    for bundles in after.values():
        for bundle in bundles:
            missing[bundle] += 1
    ready = [(place[bundle], bundle) for bundle, count in missing.items() if not count]
    heapq.heapify(ready)
    found: list[int] = []
    while ready:
        _, bundle = heapq.heappop(ready)
        found.append(bundle)
        for then in after[bundle]:
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(ready, (place[then], then))
    return found
