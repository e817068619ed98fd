"""The core of a placement problem: groups as units, classes of equal devices, whole numbers instead of seconds.

The exact solvers add and compare whole numbers only, because sums of floats round, which could lose an optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem
from splitkit.solvers.topological import in_turn

BIG = 2**61
"""Larger than any load."""
_ROOM = 2.0**58  # the sum of all work and all costs stays below this
_EXACT = 2.0**52  # whole numbers up to this sum are kept as they are


@dataclass(frozen=True)
class Kind:
    """A class of equal devices.

    Attributes:
        devices: the indices of the devices.
        capacity: the bytes of each, `BIG` for no limit.
        cpu: whether they are CPUs, which pay for no communication.
        factor: the factor on the cost of nets; where links differ, the least of their factors, so that loads are
            bounds.
    """

    devices: tuple[int, ...]
    capacity: int
    cpu: bool
    factor: float


@dataclass(frozen=True, eq=False)
class Core:
    """Units (n) that are groups of a problem's, nets (m) of at least two pins, order edges (e) without cycles.

    Attributes:
        work: (classes, n) whole numbers; 0 where ``barred``.
        barred: (classes, n) whether a class does not support a unit.
        nbytes: (n,) bytes that each unit always needs.
        saved: (n,) bytes of each unit for each microbatch in flight.
        costs: (classes, m) the cost of each net for a device that holds it in part.
        starts: (m + 1,) where the pins of each net start.
        pins: (q,) each unit once in a net, the maker first.
        edges: (e, 2) each pair once.
        kinds: the classes of devices.
        group: (units of the problem,) the unit of the core that each belongs to.
        flights: the most microbatches that a stage can have in flight.
        scale: the factor from seconds to whole numbers.
        slack: the largest rounding error of a sum, in whole numbers.
    """

    work: Ints
    barred: Bools
    nbytes: Ints
    saved: Ints
    costs: Ints
    starts: Ints
    pins: Ints
    edges: Ints
    kinds: tuple[Kind, ...]
    group: Ints
    flights: int
    scale: float
    slack: float

    @property
    def size(self) -> int:
        """The number of units."""
        return int(self.work.shape[1])

    @cached_property
    def pin_nets(self) -> Ints:
        """(q,) the net of each pin."""
        return np.repeat(np.arange(self.costs.shape[1]), np.diff(self.starts))

    @cached_property
    def incidence(self) -> csr_array:
        """(m, n) which net has a pin at which unit."""
        return csr_array(
            (np.ones(len(self.pins), np.int64), self.pins, self.starts), shape=(self.costs.shape[1], self.size)
        )

    @cached_property
    def least_work(self) -> Ints:
        """(n,) the work of each unit on its quickest class."""
        work: Ints = np.where(self.barred, BIG, self.work).min(axis=0)
        return work

    def merged(self, label: Ints) -> Core:
        """Return the core in which all units with the same label (0 to size - 1) are one unit."""
        size = int(label.max(initial=-1)) + 1
        work, barred = _summed(self.work, label, size), _summed(self.barred.astype(np.int64), label, size) > 0
        starts, pins, kept = _repinned(self.pin_nets, label[self.pins], self.costs.shape[1])
        edges = label[self.edges]
        return replace(
            self,
            work=np.where(barred, 0, work),
            barred=barred,
            nbytes=_summed(self.nbytes[None], label, size)[0],
            saved=_summed(self.saved[None], label, size)[0],
            costs=self.costs[:, kept],
            starts=starts,
            pins=pins,
            edges=distinct_pairs(edges[edges[:, 0] != edges[:, 1]]),
            group=label[self.group],
        )

    def reversed(self) -> Core:
        """Return the same core with every edge reversed."""
        return replace(self, edges=self.edges[:, ::-1])


def core_of(problem: Problem, group: Ints) -> Core:
    """Return the core of a problem over groups of its units (`acyclic_groups` or `colour_groups`)."""
    size = int(group.max(initial=-1)) + 1
    kinds = classes(problem)
    rows = np.array([problem.devices[kind.devices[0]].kind for kind in kinds])
    barred = np.isinf(problem.seconds[rows])
    seconds = np.where(barred, 0.0, problem.seconds[rows])
    factor = np.array([0.0 if kind.cpu else kind.factor for kind in kinds])
    costs = factor[:, None] * problem.net_costs[None]
    whole, scale, slack = _scaled(seconds, costs)
    starts, pins, kept = _repinned(problem.pin_nets, group[problem.pins], len(problem.net_costs))
    closed = _summed(barred.astype(np.int64), group, size) > 0
    return Core(
        work=np.where(closed, 0, _summed(whole(seconds), group, size)),
        barred=closed,
        nbytes=_summed(problem.nbytes[None], group, size)[0],
        saved=_summed(problem.saved[None], group, size)[0],
        costs=whole(costs)[:, kept],
        starts=starts,
        pins=pins,
        edges=group_edges(problem, group),
        kinds=kinds,
        group=group,
        flights=max(problem.in_flight, default=0),
        scale=scale,
        slack=slack,
    )


def classes(problem: Problem) -> tuple[Kind, ...]:
    """Return the classes of equal devices; where devices are ordered, each is a class of its own."""
    found: dict[tuple[object, ...], list[int]] = {}
    for d, device in enumerate(problem.devices):
        prices = problem.seconds[device.kind].tobytes()
        capacity = BIG if device.cpu or device.capacity >= BIG else int(device.capacity)
        single = d if problem.ordered else -1
        found.setdefault((prices, capacity, device.cpu, _factor(problem, d), single), []).append(d)
    return tuple(
        Kind(tuple(devices), capacity, cpu, factor)  # type: ignore[arg-type]
        for (_, capacity, cpu, factor, _), devices in found.items()
    )


def exact_links(problem: Problem) -> bool:
    """Return whether one factor per device describes all links exactly."""
    if problem.links is None or len(problem.devices) == 1:
        return True
    apart = ~np.eye(len(problem.devices), dtype=np.bool_)
    for d, device in enumerate(problem.devices):
        factors = np.concatenate([problem.links[d][apart[d]], problem.links[:, d][apart[d]]])
        if not device.cpu and (factors != factors[0]).any():
            return False
    return True


def _factor(problem: Problem, d: int) -> float:
    if problem.links is None or len(problem.devices) == 1 or problem.devices[d].cpu:
        return 1.0
    others = np.arange(len(problem.devices)) != d
    return float(min(problem.links[d][others].min(), problem.links[others, d].min()))


def _scaled(seconds: Floats, costs: Floats) -> tuple[Callable[[Floats], Ints], float, float]:
    """Return how floats become whole numbers, the factor, and the largest error of a sum."""
    total = float(seconds.sum(axis=1).max(initial=0.0) + costs.sum(axis=1).max(initial=0.0))
    whole = all(np.all(floats == np.floor(floats)) for floats in (seconds, costs))
    scale = 1.0 if not total or (whole and total < _EXACT) else 2.0 ** np.floor(np.log2(_ROOM / total))
    slack = 0.0 if scale == 1.0 and whole else 0.5 * (seconds.shape[1] + costs.shape[1])
    return lambda floats: np.rint(floats * scale).astype(np.int64), float(scale), slack


def _summed(rows: Ints, label: Ints, size: int) -> Ints:
    """Return (r, size) the sums of (r, n) rows over the units with the same label."""
    total = np.zeros((len(rows), size), np.int64)
    for row, sums in zip(rows, total, strict=True):
        np.add.at(sums, label, row)
    return total


def _repinned(nets: Ints, pins: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """Return starts and pins of nets whose pins were renumbered, each pin once, the maker first; and which nets are
    kept.
    """
    place = np.arange(len(pins))
    order = np.lexsort((place, pins, nets))
    first = np.ones(len(order), np.bool_)
    first[1:] = (nets[order][1:] != nets[order][:-1]) | (pins[order][1:] != pins[order][:-1])
    once = np.sort(order[first])
    sizes = np.bincount(nets[once], minlength=count)
    kept = np.flatnonzero(sizes > 1)
    starts = np.concatenate([[0], np.cumsum(sizes[kept])]).astype(np.int64)
    return starts, pins[once[sizes[nets[once]] > 1]], kept


# Groups of units that must share a device, and the order between groups.


def colour_groups(problem: Problem) -> Ints:
    """Return (n,) the group of each unit: units of one colour form a group, numbered by their first unit."""
    key = np.where(problem.colours >= 0, problem.colours, -1 - np.arange(problem.units))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return _renumbered(first[group])


def group_edges(problem: Problem, group: Ints) -> Ints:
    """Return (e, 2) the order edges between different groups."""
    ends = group[problem.edges]
    return distinct_pairs(ends[ends[:, 0] != ends[:, 1]])


def acyclic_groups(problem: Problem) -> Ints:
    """Return (n,) the group of each unit after groups that depend on each other in a cycle are merged."""
    group = colour_groups(problem)
    size = int(group.max(initial=-1)) + 1
    return _renumbered(strong_components(group_edges(problem, group), size)[group])


def strong_components(edges: Ints, size: int) -> Ints:
    """Return (size,) the strongly connected component of each node."""
    matrix = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(size, size))
    label: Ints = connected_components(matrix, connection="strong")[1].astype(np.int64)
    return label


def distinct_pairs(edges: Ints) -> Ints:
    """Return each pair once, sorted."""
    once: Ints = np.unique(edges, axis=0) if len(edges) else edges.reshape(-1, 2)
    return once


def _renumbered(labels: Ints) -> Ints:
    """Return the same groups, numbered in the order in which they first occur."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


# Topological orders of a graph in which few expensive nets are open at a time, for `order_dp`.


_BLENDS = 3  # random depth-first orders, besides the fixed ones
ORDERS = 6 + _BLENDS
"""The number of `orders`."""


def orders(core: Core) -> Iterator[Ints]:
    """Yield nine topological orders: by number, breadth, depth and cost, from either end, and random
    depth-first ones.
    """
    before, after = _before(core), _before(core.reversed())
    numbers = list(range(core.size))
    yield _depth_first(before, numbers)
    yield _sorted(before, lambda unit, _: unit)
    yield _depth_first(after, numbers)[::-1]
    yield _cheapest(core, before)
    by_breadth = _sorted(before, lambda _, taken: taken)
    yield by_breadth
    height = [0] * core.size  # units on the longest path from each unit to the end
    for unit in by_breadth[::-1].tolist():
        height[unit] = 1 + max((height[then] for then in after[unit]), default=0)
    yield _sorted(after, lambda unit, _: -height[unit])[::-1]
    random = np.random.default_rng(0)
    for _ in range(_BLENDS):
        yield _depth_first(before, random.permutation(core.size).tolist())


def order_within_stages(core: Core, rank: Ints, random: np.random.Generator) -> Ints:
    """Return a topological order in which stages follow each other, each in a random depth-first order."""
    key, of_stage = random.permutation(core.size).tolist(), rank.tolist()
    first = np.append(0, np.cumsum(np.bincount(rank))).tolist()  # how many units are taken when a stage begins
    return _sorted(_before(core), lambda unit, taken: (of_stage[unit], -max(taken, first[of_stage[unit]]), -key[unit]))


def order_by_key(core: Core, key: Floats) -> Ints:
    """Return the topological order that always takes the ready unit of the least key."""
    rank = key.tolist()
    return _sorted(_before(core), lambda unit, _: rank[unit])


def descendants(core: Core) -> Bools:
    """Return (n, n) whether the second unit is the first one or a descendant of it."""
    after = _before(core.reversed())
    closed: Bools = np.eye(core.size, dtype=np.bool_)
    for unit in order_by_key(core, np.zeros(core.size))[::-1].tolist():
        for then in after[unit]:
            closed[unit] |= closed[then]
    return closed


def value_lists(owner: Ints, value: Ints, size: int) -> list[list[int]]:
    """Return for each of so many owners its values, in the given order."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for own, its in zip(owner.tolist(), value.tolist(), strict=True):
        lists[own].append(its)
    return lists


def _before(core: Core) -> list[list[int]]:
    return value_lists(core.edges[:, 1], core.edges[:, 0], core.size)


def _sorted(before: list[list[int]], place: Callable[[int, int], Any]) -> Ints:
    """Return the order of `in_turn`."""
    return np.array(list(in_turn(before, place)), np.int64)


def _depth_first(before: list[list[int]], rank: list[int]) -> Ints:
    """Take the unit that became ready last; of several the one of the least rank."""
    return _sorted(before, lambda unit, taken: (-taken, rank[unit]))


def _cheapest(core: Core, before: list[list[int]]) -> Ints:
    """Take the unit that left the cheapest nets open when it became ready; of equal ones, the one that did so last."""
    cost = core.costs.max(axis=0, initial=0).tolist()
    open_pins = np.diff(core.starts).tolist()
    full = list(open_pins)
    nets = value_lists(core.pins, core.pin_nets, core.size)

    def place(unit: int, taken: int) -> tuple[int, int]:
        opened = sum(cost[net] for net in nets[unit] if open_pins[net] == full[net])
        return int(opened - sum(cost[net] for net in nets[unit] if open_pins[net] == 1)), -taken

    order: list[int] = []
    for unit in in_turn(before, place):
        order.append(unit)
        for net in nets[unit]:
            open_pins[net] -= 1
    return np.array(order, np.int64)
