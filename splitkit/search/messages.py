"""What stages pay for messages at least, counted: where links are slow to start, the number of values is what matters.

Units that hang together by values, the *pieces* of a graph, are in one stage, or some value between them is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from splitkit.search.placing import Placing, Travel
from splitkit.search.sending import ROUNDED, is_free, least_load, least_message, needed_by_units
from splitkit.solvers.placement.problem import Ints


def counted(placing: Placing, travel: Travel | None, places: int, stages: int) -> float:
    """Seconds of the most loaded of so many places of stages, at least, none of which is empty."""
    least = least_load(placing, travel, places)
    if travel is None or is_free(placing, travel) or not placing.units:
        return least
    pieces = Pieces.of(placing, travel)
    work = sum(placing.shared_work[place] for place in range(len(placing.shared)) if pieces.shared >> place & 1)
    return max(least, pieces.two_messages(stages), pieces.longest(stages, min(work, pieces.message)))


def without_units(placing: Placing, travel: Travel | None, stages: int) -> float:
    """Seconds of the slowest of stages one of which has no units, at least; infinite where none can be so.

    That stage is there for shared nodes, the last of which it sends. From that value a way leads through shared nodes
    to a unit, whose stage receives a value of these. So, if all units that need shared nodes are of the longest piece,
    one of its stages pays for that message.
    """
    if is_free(placing, travel):
        return 0.0
    message = least_message(placing, travel)
    if travel is None or not np.isfinite(message) or not placing.units:
        return message * ROUNDED
    pieces = Pieces.of(placing, travel)
    return max(message * ROUNDED, pieces.longest(stages - 1, message if pieces.needing == {pieces.first} else 0.0))


@dataclass(frozen=True)
class Pieces:
    """Units that hang together by values.

    Attributes:
        work: seconds of each piece on what is quickest.
        falls: into how many each falls, at most, when one of its values is sent.
        cheapest: seconds of the cheapest message with a value of each; infinite where there are none.
        cuts: for each value of the longest piece into how many that falls without it, the seconds of the longest of
            these, and of a message.
        needing: pieces with units that need shared nodes.
        shared: the shared nodes that the longest piece needs, as bits.
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
    def of(cls, placing: Placing, travel: Travel) -> Pieces:
        """Of all units."""
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
        """The longest."""
        return self.work.index(max(self.work))

    def two_messages(self, stages: int) -> float:
        """Seconds of two messages, if some stage must send or receive two values; 0 if perhaps none does.

        If none does, a piece is cut by one value at most: of two some stage would touch both, as the piece hangs
        together. What it falls into without that value is not cut, so it is in so many stages at most. And a stage of
        shared nodes alone sends one value, which no other sends, to a stage that touches nothing else: that holds whole
        pieces, one of which needs shared nodes.
        """
        most = sum(max(falls, 1 + (piece in self.needing)) for piece, falls in enumerate(self.falls))
        return 2 * min(*self.cheapest, self.message) * ROUNDED if stages > most else 0.0

    def longest(self, stages: int, more: float) -> float:
        """Seconds of the slowest of at most so many stages with units of the longest piece, which take more besides.

        Whole, it takes its work. Cut by one value, each of its stages pays for that, and what it falls into stays
        together; cut by more values, each pays for one, and some stage for two.
        """
        total, message = self.work[self.first] + more, self.cheapest[self.first]
        least = total
        if stages > 1 and len(self.cuts) > 1:
            least = min(least, max(2 * message, total / stages + message))
        for falls, longest, price in self.cuts:
            least = min(least, max(total / min(stages, falls), longest) + price)
        return least * ROUNDED


def _pieces(placing: Placing) -> Ints:
    """(n,) the piece of each unit."""
    starts, pins, size = *_pins(placing), len(placing.units)
    value = size + np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    shape = (size + len(starts) - 1,) * 2
    graph = csr_array((np.ones(len(pins), np.int8), (pins, value)), shape=shape)
    label = connected_components(graph, directed=False)[1][:size]
    piece: Ints = np.unique(label, return_inverse=True)[1].astype(np.int64)
    return piece


def _pins(placing: Placing) -> tuple[Ints, Ints]:
    sizes = [len(pins) for _, pins in placing.values]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return starts, np.array([pin for _, pins in placing.values for pin in pins], np.int64)


def _falls(placing: Placing) -> list[tuple[int, list[float]]]:
    """Into how many each piece falls without each of its values, and the seconds of all of these but one.

    They are branches of a search in depth that reach no higher (Tarjan 1972). Vertices are units, then values.
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
