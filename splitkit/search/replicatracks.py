"""Borders between which stages with replicas can lie: all that there are, or those along orders of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from splitkit.graph.dataflow import crossing
from splitkit.memory.stretch import Line, Stretch
from splitkit.pipeline.stageprices import STATE_OF
from splitkit.search.demand import Demand
from splitkit.search.placing import Placing
from splitkit.search.tracks import Track, ideals_of, nested
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Floats, Ints, Slot


def whole_track(placing: Placing, demand: Demand) -> Track | None:
    """All borders of a graph; None if they are too many."""
    if (ideals := ideals_of(placing)) is None:
        return None
    members = np.array([[ideal >> unit & 1 for unit in range(len(placing.units))] for ideal in ideals], np.bool_)
    first, last = nested(members)

    def line(*borders: int) -> tuple[Line, list[int]]:
        """The units between these borders one after the other, and where each border is."""
        marks = [np.zeros(members.shape[1], np.bool_), *(members[b] for b in borders), np.ones(members.shape[1], bool)]
        parts = [np.flatnonzero(then & ~now) for now, then in pairwise(marks)]
        nodes = [placing.nodes(part) for part in parts]
        return demand.stage_prices.units.line(nodes), np.cumsum(list(map(len, nodes))).tolist()

    @cache
    def stretch(start: int, end: int) -> Stretch:
        row, at = line(start, end)
        return row.stretch(at[0], at[1])

    def messages(border: int) -> tuple[int, int]:
        row, at = line(border)
        return _messages(row, at[0])

    return Track(members, first, last, stretch, messages, _state(demand), whole=True)


def along(placing: Placing, demand: Demand, known: Sequence[Ints], most: int) -> Iterator[Track]:
    """Borders along orders: the graph's own, those of known (n,) stages, and nine others, each once.

    Args:
        placing: the units; none of them shared.
        demand: what the search is asked.
        known: stages whose order is tried.
        most: borders along one order, about.
    """
    seen: set[bytes] = set()
    for order in _orders(placing, demand, known):
        if (key := order.astype(np.int64).tobytes()) not in seen:
            seen.add(key)
            yield order_track(placing, demand, order.astype(np.int64), most)


def _orders(placing: Placing, demand: Demand, known: Sequence[Ints]) -> Iterator[Ints]:
    units = np.arange(len(placing.units))
    yield units
    yield from (np.argsort(stage, kind="stable") for stage in known)
    yield from orders(core_of(placing.problem([Slot()] * 2, demand.travel(range(2))), units))


def order_track(placing: Placing, demand: Demand, order: Ints, most: int) -> Track:
    """Borders along one order: all of it, or about so many of them."""
    nodes, ends = placing.nodes(order), placing.places(order)
    places = _places(crossing(placing.flow, demand.costs, nodes)[1][ends], placing.seconds[0][order], most)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    first, last = (index.astype(np.int64) for index in np.triu_indices(len(places), 1))
    at = ends[places].tolist()

    @cache
    def line() -> Line:
        return demand.stage_prices.units.line([nodes])

    return Track(
        rank[None, :] < places[:, None],
        first,
        last,
        lambda start, end: line().stretch(at[start], at[end]),
        lambda border: _messages(line(), at[border]),
        _state(demand),
        whole=False,
    )


def _places(crossed: Floats, work: Floats, most: int) -> Ints:
    """(b,) positions, the first 0 and the last the size: the cheapest of each stretch of equal work, and those beside
    the longest units.
    """
    size = len(work)
    if size < most:
        return np.arange(size + 1)
    done = np.concatenate([[0.0], np.cumsum(work)])
    stretches = most // 2
    bucket = np.minimum((done * (stretches / max(done[-1], 1e-300))).astype(np.int64), stretches - 1)
    by_bucket = np.lexsort((crossed, bucket))
    _, cheapest = np.unique(bucket[by_bucket], return_index=True)
    longest = np.argsort(-work, kind="stable")[: most // 4]
    ends = np.array([0, size])
    return np.unique(np.concatenate([ends, by_bucket[cheapest], longest, longest + 1])).astype(np.int64)


def _messages(line: Line, place: int) -> tuple[int, int]:
    """Bytes that cross before a place of a line, on and back."""
    return int(line.messages[place]), int(line.gradient_messages[place]) if line.training else 0


def _state(demand: Demand) -> int:
    """Bytes of optimizer state for a byte of gradient."""
    return STATE_OF[demand.optimizer] if demand.optimizer else 0
