"""What no plan is below where nodes may be copied: a part that sends or receives anything pays for a message at least.

A part without units (`Placing`) is there for shared nodes that it sends. And a part whose load is less than the price
of a message of shared nodes computes for itself all of these that its units depend on.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch.fx import Node

from splitkit.graph.dataflow import waits_for
from splitkit.search.placing import Placing, Travel
from splitkit.solvers.placement.problem import Bools, Floats, Ints

ROUNDED = 1 - 1e-13  # relative: sums of floats


def is_free(placing: Placing, travel: Travel | None) -> bool:
    """Whether a part of shared nodes alone may pay for nothing.

    The last of its nodes is read by another part, so it is sent, or by the output, for which nobody pays. Nobody does
    between parts of one rank either.
    """
    read = any(user.op == "output" for node in placing.shared for user in node.users)
    return read or (travel is not None and travel.joins)


def least_load(placing: Placing, travel: Travel | None, places: int) -> float:
    """Seconds of the most loaded of so many places, at least, whatever the form of parts and whether some are empty.

    All nodes are computed once or more. And below a limit no value is sent whose price is the limit or more: its maker
    and readers are one group, in one part. Where the limit is no more than a message of shared nodes, all of these that
    a group depends on are there too. So the limit holds, or the work of the longest group. The best limit is found by
    bisection: the higher, the smaller are groups.
    """
    work, most = placing.seconds.min(axis=0), least_message(placing, travel)
    best = (float(work.sum()) + sum(placing.shared_work)) / places
    prices = np.zeros(len(placing.values)) if travel is None else travel.seconds(placing.value_bytes)
    limits = [*np.unique(prices[(prices > 0) & (prices < most)]).tolist(), most]
    low, high, needed = 0, len(limits) if len(work) else 0, needed_by_units(placing)
    while low < high:
        middle = (low + high) // 2
        longest = _longest(placing, work, needed, _groups(placing, prices >= limits[middle]))
        best = max(best, min(limits[middle], longest))
        low, high = (middle + 1, high) if longest > limits[middle] else (low, middle)
    return best * ROUNDED


def least_message(placing: Placing, travel: Travel | None) -> float:
    """Seconds of the quickest message with a value of shared nodes; infinite where none are shared."""
    if not placing.shared:
        return np.inf
    return 0.0 if travel is None else float(travel.seconds(placing.shared_bytes).min(initial=np.inf))


def _groups(placing: Placing, uncut: Bools) -> Ints:
    """(n,) the group of each unit, of which some values (m,) are not sent."""
    ends = [(pins[0], pin) for (_, pins), whole in zip(placing.values, uncut, strict=True) if whole for pin in pins[1:]]
    pairs, size = np.array(ends, np.int64).reshape(-1, 2), len(placing.units)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(size, size))
    group: Ints = connected_components(graph, directed=False)[1].astype(np.int64)
    return group


def needed_by_units(placing: Placing) -> list[int]:
    """The shared nodes that each unit depends on through shared nodes alone, as bits."""
    bit = {node: 1 << place for place, node in enumerate(placing.shared)}
    found: dict[Node, int] = {}
    for node in placing.flow.nodes:
        reads = [read for read in waits_for(placing.flow, node) if read in bit]
        found[node] = reduce(or_, (bit[read] | found[read] for read in reads), 0)
    return [reduce(or_, (found[node] for node in members)) for members in placing.members]


def _longest(placing: Placing, work: Floats, needed: list[int], group: Ints) -> float:
    """Seconds of the longest group with the shared nodes that it depends on."""
    seconds: list[float] = np.bincount(group, work).tolist()
    bits = [0] * len(seconds)
    for its, more in zip(group.tolist(), needed, strict=True):
        bits[its] |= more
    price = placing.shared_work
    taken = {its: sum(price[place] for place in range(its.bit_length()) if its >> place & 1) for its in set(bits)}
    return max(own + taken[its] for own, its in zip(seconds, bits, strict=True))
