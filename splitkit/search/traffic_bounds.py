"""Lower bounds for plans that may copy nodes: every part that sends or receives anything pays for one message at least.

A part without units (see `PlacementModel`) exists for the shared nodes that it sends. A part whose load is below the
price of a message of shared nodes computes all the shared nodes that its units depend on itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch.fx import Node

from splitkit.graph.dataflow import waits_for
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem

ROUNDED = 1 - 1e-13  # relative: sums of floats


def is_free(placing: PlacementModel, travel: TransferTimes | None) -> bool:
    """Return whether a part of shared nodes alone may pay for nothing.

    Another part reads the last of its nodes, so the node is sent; or the output reads it, and nobody pays for that.
    Nobody pays between parts of one rank either.
    """
    read = any(user.op == "output" for node in placing.shared for user in node.users)
    return read or (travel is not None and travel.joins)


def least_load(placing: PlacementModel, travel: TransferTimes | None, places: int) -> float:
    """Return a lower bound on the bottleneck of ``places`` parts in seconds, whatever their form and if some are empty.

    Every node is computed at least once. Below a limit, no value is sent whose price is the limit or more: its maker
    and its readers form a group in one part. If the limit is at most the price of a message of shared nodes, the shared
    nodes that a group depends on are in that part too. So either the limit holds, or the work of the longest group
    does. Groups shrink as the limit grows, and bisection finds the best limit.
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


def least_message(placing: PlacementModel, travel: TransferTimes | None) -> float:
    """Return the seconds of the quickest message with a shared node's value; infinite if no nodes are shared."""
    if not placing.shared:
        return np.inf
    return 0.0 if travel is None else float(travel.seconds(placing.shared_bytes).min(initial=np.inf))


def least_without_units(placing: PlacementModel, travel: TransferTimes | None) -> float:
    """Return a lower bound on the slowest stage in seconds if one has no units; infinite if that is impossible.

    Such a stage exists for shared nodes, the last of which it sends.
    """
    return 0.0 if is_free(placing, travel) else least_message(placing, travel) * ROUNDED


def _groups(placing: PlacementModel, uncut: Bools) -> Ints:
    """Return (n,) the group of each unit, where the values ``uncut`` (m,) are not sent."""
    ends = [(pins[0], pin) for (_, pins), whole in zip(placing.values, uncut, strict=True) if whole for pin in pins[1:]]
    pairs, size = np.array(ends, np.int64).reshape(-1, 2), len(placing.units)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(size, size))
    group: Ints = connected_components(graph, directed=False)[1].astype(np.int64)
    return group


def needed_by_units(placing: PlacementModel) -> list[int]:
    """Return, as bits, the shared nodes that each unit depends on through shared nodes alone."""
    bit = {node: 1 << place for place, node in enumerate(placing.shared)}
    found: dict[Node, int] = {}
    for node in placing.flow.nodes:
        reads = [read for read in waits_for(placing.flow, node) if read in bit]
        found[node] = reduce(or_, (bit[read] | found[read] for read in reads), 0)
    return [reduce(or_, (found[node] for node in members)) for members in placing.members]


def _longest(placing: PlacementModel, work: Floats, needed: list[int], group: Ints) -> float:
    """Return the seconds of the longest group, including the shared nodes that it depends on."""
    seconds: list[float] = np.bincount(group, work).tolist()
    bits = [0] * len(seconds)
    for its, more in zip(group.tolist(), needed, strict=True):
        bits[its] |= more
    price = placing.shared_work
    taken = {its: sum(price[place] for place in range(its.bit_length()) if its >> place & 1) for its in set(bits)}
    return max(own + taken[its] for own, its in zip(seconds, bits, strict=True))


# The price of copies of shared nodes, as nets of a problem whose units are the other nodes (see `PlacementModel`).
#
# A stage with a unit that needs shared nodes either computes all of them or receives the value of at least one: it pays
# for their work or for the cheapest message. A net whose pins are all the units that need a node is paid for by each
# stage that holds some of them but not all. If nets cost at most the work of their nodes, and together at most that
# message, no stage pays more than it must, so a bound of the extended problem is a bound.


def with_copies(problem: Problem, placing: PlacementModel, travel: TransferTimes | None) -> Problem:
    """Return the problem with nets for the price of copies; the same problem if nothing is copied, or links differ."""
    if travel is None or not placing.shared or problem.links is not None:  # which would multiply what copies take
        return problem
    nets = list(_nets(placing, least_message(placing, travel)))
    sizes = np.array([len(pins) for _, pins in nets], np.int64)
    pins = np.array([pin for _, pins in nets for pin in pins], np.int64)
    return replace(
        problem,
        net_costs=np.concatenate([problem.net_costs, np.array([cost for cost, _ in nets], np.float64)]),
        net_starts=np.concatenate([problem.net_starts, problem.net_starts[-1] + np.cumsum(sizes)]),
        pins=np.concatenate([problem.pins, pins]),
    )


def _nets(placing: PlacementModel, message: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Return costs and pins of the nets, which cost at most one message together; nodes that most units need count
    first.
    """
    needed, work = needed_by_units(placing), placing.shared_work
    of_pins: dict[tuple[int, ...], float] = {}
    for place, seconds in enumerate(work):
        pins = tuple(unit for unit, bits in enumerate(needed) if bits >> place & 1)
        of_pins[pins] = of_pins.get(pins, 0.0) + seconds
    left = message
    for pins in sorted(of_pins, key=lambda pins: (-len(pins), pins)):
        cost = min(of_pins[pins], left)
        left -= cost
        if cost > 0 and len(pins) > 1:
            yield cost * ROUNDED, pins
