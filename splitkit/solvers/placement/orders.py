"""Topological orders of a graph in which few expensive nets are open at a time, for `order_dp`."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Floats, Ints

_BLENDS = 3  # random depth-first orders, besides the fixed ones
ORDERS = 6 + _BLENDS
"""The number of `orders`."""


def orders(core: Core) -> Iterator[Ints]:
    """Yield nine topological orders: by number, breadth, depth and cost, from either end, and random
    depth-first ones.
    """
    after, before = _neighbours(core.edges, core.size)
    numbers = np.arange(core.size, dtype=np.float64)
    yield _depth_first(after, before, numbers)
    yield _by_key(after, before, numbers)
    yield _depth_first(before, after, numbers)[::-1]
    yield _cheapest(core, after, before)
    yield _breadth_first(after, before)
    yield _by_key(before, after, -_height(after, before))[::-1]
    random = np.random.default_rng(0)
    for _ in range(_BLENDS):
        yield _depth_first(after, before, random.permutation(core.size).astype(np.float64))


def order_within_stages(core: Core, rank: Ints, random: np.random.Generator) -> Ints:
    """Return a topological order in which stages follow each other, each in a random depth-first order."""
    after, before = _neighbours(core.edges, core.size)
    missing = [len(units) for units in before]
    key, of_stage = random.permutation(core.size).tolist(), rank.tolist()
    ready: list[list[int]] = [[] for _ in range(int(rank.max(initial=-1)) + 1)]
    for unit, count in enumerate(missing):
        if not count:
            ready[of_stage[unit]].append(unit)
    order = []
    for stage, waiting in enumerate(ready):
        stack = sorted(waiting, key=key.__getitem__)
        while stack:
            unit = stack.pop()
            order.append(unit)
            freed: list[int] = []
            for then in after[unit]:
                missing[then] -= 1
                if not missing[then]:
                    (freed if of_stage[then] == stage else ready[of_stage[then]]).append(then)
            stack.extend(sorted(freed, key=key.__getitem__))
    return np.array(order, np.int64)


def order_by_key(core: Core, key: Floats) -> Ints:
    """Return the topological order that always takes the ready unit of the least key."""
    after, before = _neighbours(core.edges, core.size)
    return _by_key(after, before, key)


def _neighbours(edges: Ints, size: int) -> tuple[list[list[int]], list[list[int]]]:
    after: list[list[int]] = [[] for _ in range(size)]
    before: list[list[int]] = [[] for _ in range(size)]
    for first, then in edges.tolist():
        after[first].append(then)
        before[then].append(first)
    return after, before


def _depth_first(after: list[list[int]], before: list[list[int]], key: Floats) -> Ints:
    """Take the unit that became ready last."""
    missing = [len(units) for units in before]
    rank = key.tolist()
    stack = sorted((unit for unit, count in enumerate(missing) if not count), key=lambda unit: -rank[unit])
    order = []
    while stack:
        unit = stack.pop()
        order.append(unit)
        ready = []
        for then in after[unit]:
            missing[then] -= 1
            if not missing[then]:
                ready.append(then)
        stack.extend(sorted(ready, key=lambda unit: -rank[unit]))
    return np.array(order, np.int64)


def _breadth_first(after: list[list[int]], before: list[list[int]]) -> Ints:
    """Take the unit that became ready first."""
    missing = [len(units) for units in before]
    queue = deque(unit for unit, count in enumerate(missing) if not count)
    order = []
    while queue:
        unit = queue.popleft()
        order.append(unit)
        for then in after[unit]:
            missing[then] -= 1
            if not missing[then]:
                queue.append(then)
    return np.array(order, np.int64)


def _by_key(after: list[list[int]], before: list[list[int]], key: Floats) -> Ints:
    """Take the ready unit of the least key."""
    missing = [len(units) for units in before]
    rank = key.tolist()
    heap = [(rank[unit], unit) for unit, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    order = []
    while heap:
        _, unit = heapq.heappop(heap)
        order.append(unit)
        for then in after[unit]:
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(heap, (rank[then], then))
    return np.array(order, np.int64)


def _height(after: list[list[int]], before: list[list[int]]) -> Floats:
    """Return the number of units on the longest path from each unit to the end."""
    height = np.zeros(len(after))
    for unit in _breadth_first(after, before)[::-1].tolist():
        height[unit] = 1 + max((height[then] for then in after[unit]), default=0)
    return height


def _cheapest(core: Core, after: list[list[int]], before: list[list[int]]) -> Ints:
    """Take the unit that leaves the cheapest nets open; of equal ones, the one that became ready last."""
    cost = core.costs.max(axis=0, initial=0).tolist()
    open_pins = np.diff(core.starts).tolist()
    full = list(open_pins)
    nets: list[list[int]] = [[] for _ in range(core.size)]
    for net, pin in zip(core.pin_nets.tolist(), core.pins.tolist(), strict=True):
        nets[pin].append(net)

    def price(unit: int) -> int:
        opened = sum(cost[net] for net in nets[unit] if open_pins[net] == full[net])
        return int(opened - sum(cost[net] for net in nets[unit] if open_pins[net] == 1))

    missing = [len(units) for units in before]
    heap = [(price(unit), 0, unit) for unit, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        known, turn, unit = heapq.heappop(heap)
        now = price(unit)
        if now != known and heap and (now, turn, unit) > heap[0]:
            heapq.heappush(heap, (now, turn, unit))
            continue
        order.append(unit)
        for net in nets[unit]:
            open_pins[net] -= 1
        for then in after[unit]:
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(heap, (price(then), -len(order), then))
    return np.array(order, np.int64)
