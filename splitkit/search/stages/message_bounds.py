"""Lower bounds on what stages pay for messages, by counting them: on links with high latency, counts are what matters.

Units that are connected by values, the *components* of a graph, are either in one stage, or some value between them is
sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from splitkit.search.memory.traffic_bounds import ROUNDED, is_free, least_load, least_message, needed_by_units
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.solvers.placement.problem import Ints


def counted(placing: PlacementModel, travel: TransferTimes | None, places: int, stages: int) -> float:
    """Return a lower bound on the largest load of ``places`` non-empty places of stages, in seconds."""
    least = least_load(placing, travel, places)
    if travel is None or is_free(placing, travel) or not placing.units:
        return least
    pieces = ValueComponents.of(placing, travel)
    work = sum(placing.shared_work[place] for place in range(len(placing.shared)) if pieces.shared >> place & 1)
    return max(least, pieces.two_messages(stages), pieces.longest(stages, min(work, pieces.message)))


def without_units(placing: PlacementModel, travel: TransferTimes | None, stages: int) -> float:
    """Return a lower bound on the slowest of ``stages`` stages if one has no units; infinite if that is impossible.

    Such a stage exists for shared nodes, the last of which it sends. From that value a path of shared nodes leads to a
    unit, whose stage receives one of their values. If all units that need shared nodes are in the longest component,
    one of its stages pays for that message.
    """
    if is_free(placing, travel):
        return 0.0
    message = least_message(placing, travel)
    if travel is None or not np.isfinite(message) or not placing.units:
        return message * ROUNDED
    pieces = ValueComponents.of(placing, travel)
    return max(message * ROUNDED, pieces.longest(stages - 1, message if pieces.needing == {pieces.first} else 0.0))


@dataclass(frozen=True)
class ValueComponents:
    """Units connected by values.

    Attributes:
        work: seconds of each component on the quickest device.
        falls: the most pieces into which each component falls when one of its values is sent.
        cheapest: seconds of the cheapest message with a value of each component; infinite where there is none.
        cuts: for each value of the longest component: how many pieces remain without it, the seconds of the longest of
            them, and of a message.
        needing: the number of components with units that need shared nodes.
        shared: the shared nodes that the longest component needs, as bits.
        message: seconds of the cheapest message with a value of a shared node.
    """

    work: tuple[float, ...]
    falls: tuple[int, ...]
    cheapest: tuple[float, ...]
    cuts: tuple[tuple[int, float, float], ...]
    needing: frozenset[int]
    shared: int
    message: float

    @classmethod
    def of(cls, placing: PlacementModel, travel: TransferTimes) -> ValueComponents:
        """Compute the components of all units."""
        piece, least, prices = _pieces(placing), placing.seconds.min(axis=0), travel.seconds(placing.value_bytes)
        work = np.bincount(piece, least)
        first, needed = int(work.argmax()), needed_by_units(placing)
        falls, cheapest, cuts = np.ones(len(work), np.int64), np.full(len(work), np.inf), []
        for (count, apart), (_, pins), price in zip(_falls(placing), placing.values, prices.tolist(), strict=True):
            its = int(piece[pins[0]])
            falls[its], cheapest[its] = max(falls[its], count), min(cheapest[its], price)
            if its == first:
                cuts.append((count, max(*apart, float(work[its]) - sum(apart)), price))
        return cls(
            tuple(work.tolist()),
            tuple(falls.tolist()),
            tuple(cheapest.tolist()),
            tuple(cuts),
            frozenset(of for of, bits in zip(piece.tolist(), needed, strict=True) if bits),
            reduce(or_, (bits for of, bits in zip(piece.tolist(), needed, strict=True) if of == first)),
            least_message(placing, travel),
        )

    @property
    def first(self) -> int:
        """The longest component."""
        return self.work.index(max(self.work))

    def two_messages(self, stages: int) -> float:
        """Return the seconds of two messages if some stage must send or receive two values; 0 if perhaps none must.

        If none must, each component is cut by at most one value: as it is connected, some stage would touch both of two
        values. What it falls into without that value is not cut, so it lies in at most that many stages. A stage of
        shared nodes alone sends one value, which no other stage sends, to a stage that touches nothing else: that stage
        holds whole components, one of which needs shared nodes.
        """
        most = sum(max(falls, 1 + (piece in self.needing)) for piece, falls in enumerate(self.falls))
        return 2 * min(*self.cheapest, self.message) * ROUNDED if stages > most else 0.0

    def longest(self, stages: int, more: float) -> float:
        """Return a lower bound on the slowest of at most ``stages`` stages with units of the longest component, which
        take ``more`` besides.

        A whole component takes its work. If one value cuts it, each of its stages pays for that value, and what it
        falls into stays together; if several values cut it, each stage pays for one, and some stage for two.
        """
        total, message = self.work[self.first] + more, self.cheapest[self.first]
        least = total
        if stages > 1 and len(self.cuts) > 1:
            least = min(least, max(2 * message, total / stages + message))
        for falls, longest, price in self.cuts:
            least = min(least, max(total / min(stages, falls), longest) + price)
        return least * ROUNDED


def _pieces(placing: PlacementModel) -> Ints:
    """Return (n,) the component of each unit."""
    starts, pins, size = *_pins(placing), len(placing.units)
    value = size + np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    shape = (size + len(starts) - 1,) * 2
    graph = csr_array((np.ones(len(pins), np.int8), (pins, value)), shape=shape)
    label = connected_components(graph, directed=False)[1][:size]
    piece: Ints = np.unique(label, return_inverse=True)[1].astype(np.int64)
    return piece


def _pins(placing: PlacementModel) -> tuple[Ints, Ints]:
    sizes = [len(pins) for _, pins in placing.values]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return starts, np.array([pin for _, pins in placing.values for pin in pins], np.int64)


def _falls(placing: PlacementModel) -> list[tuple[int, list[float]]]:
    """Return the number of pieces of each component without each of its values, and the seconds of all pieces but one.

    The pieces are the branches of a depth-first search that reach no higher (Tarjan 1972). Vertices are units, then
    values.
    """
    size = len(placing.units)
    beside: list[list[int]] = [[] for _ in range(size)] + [list(pins) for _, pins in placing.values]
    for value, (_, pins) in enumerate(placing.values):
        for pin in pins:
            beside[pin].append(size + value)
    found, low = [0] * len(beside), [0] * len(beside)
    below = placing.seconds.min(axis=0).tolist() + [0.0] * len(placing.values)
    apart: list[list[float]] = [[] for _ in beside]
    past = 0
    for root in range(size):
        stack = [] if found[root] else [(root, -1, iter(beside[root]))]
        while stack:
            vertex, parent, rest = stack[-1]
            if not found[vertex]:
                past += 1
                found[vertex] = low[vertex] = past
            other = next((near for near in rest if near != parent), None)
            if other is None:
                stack.pop()
                if parent >= 0:
                    low[parent], below[parent] = min(low[parent], low[vertex]), below[parent] + below[vertex]
                    if low[vertex] >= found[parent]:
                        apart[parent].append(below[vertex])
            elif not found[other]:
                stack.append((other, vertex, iter(beside[other])))
            else:
                low[vertex] = min(low[vertex], found[other])
    return [(1 + len(branches), [*branches, 0.0]) for branches in apart[size:]]
