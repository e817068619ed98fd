"""The borders between which stages with a cache may lie: all of a small graph, else many along its own order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from splitkit.memory.segments.segment import SegmentMemory
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.search.placement_model import PlacementModel
from splitkit.search.stages.candidate_borders import BorderSet, ideal_borders, order_borders
from splitkit.solvers.placement.problem import Floats, Ints

_MOST_BORDERS = 1_000
_SMALL = 1e-6  # of all bytes: what holds less, such as a norm, needs no border of its own


@dataclass(frozen=True, eq=False)
class CacheBorders:
    """Borders, and the memory between them.

    Attributes:
        track: the borders.
        least: (p,) a lower bound on the activations of the stage between each pair of borders.
    """

    track: BorderSet
    least: Floats

    @classmethod
    def of(cls, placing: PlacementModel, prices: StagePrices, held: Ints) -> CacheBorders:
        """Return all borders of the graph if they are few, else those along its own order.

        Args:
            placing: the units.
            prices: the memory of stages.
            held: (n,) bytes of weights and of cache per token of each unit.
        """
        if (track := ideal_borders(placing, prices)) is not None:
            return cls(track, np.zeros(len(track.first)))
        order = np.arange(len(placing.units))
        line, ends = prices.memory.order([placing.nodes(order)]), placing.places(order)
        places = _places(line.messages[ends], held)
        track = order_borders(placing, prices, order, places)
        alone = line.single_nodes()[3]
        return cls(track, _greatest(alone)(ends[places][track.first], ends[places][track.last]))

    def held(self, pair: int) -> SegmentMemory:
        """Return the memory of the stage between a pair of borders."""
        return self.track.stretch(int(self.track.first[pair]), int(self.track.last[pair]))


def _places(messages: Ints, held: Ints) -> Ints:
    """Return (b,) positions of an order: all, or one for each way to divide the weights and the cache.

    Of positions between which nothing is held, the one that the fewest bytes cross is taken. If there are still too
    many, those that the fewest bytes cross are, spread evenly among equals.

    Args:
        messages: (n + 1,) bytes that cross before each position.
        held: (n,) bytes of weights and of cache per token of each unit.
    """
    size = len(held)
    if size < _MOST_BORDERS:
        return np.arange(size + 1)
    group = np.concatenate([[0], np.cumsum(held > _SMALL * held.sum())])
    cheapest = np.lexsort((messages, group))
    inner = np.sort(cheapest[np.unique(group[cheapest], return_index=True)[1]])
    inner = inner[(inner > 0) & (inner < size)]
    if len(inner) > _MOST_BORDERS:
        limit = np.sort(messages[inner], kind="stable")[_MOST_BORDERS - 1]
        below, equal = inner[messages[inner] < limit], inner[messages[inner] == limit]
        some = equal[np.linspace(0, len(equal) - 1, _MOST_BORDERS - len(below)).astype(np.int64)]
        inner = np.concatenate([below, some])
    return np.unique(np.concatenate([[0], inner, [size]])).astype(np.int64)


def _greatest(values: Ints) -> Callable[[Ints, Ints], Floats]:
    """Return a function from starts and ends to the greatest value between them (a sparse table)."""
    table = [values]
    while (width := 1 << len(table)) <= len(values):
        half = table[-1]
        table.append(np.maximum(half[: len(values) - width + 1], half[width // 2 : len(values) - width // 2 + 1]))

    def greatest(start: Ints, end: Ints) -> Floats:
        level = np.log2(np.maximum(1, end - start)).astype(np.int64)
        found = np.zeros(len(start))
        for number in np.unique(level).tolist():
            at = np.flatnonzero(level == number)
            rows = table[number]
            found[at] = np.maximum(rows[start[at]], rows[end[at] - (1 << number)])
        return found

    return greatest
