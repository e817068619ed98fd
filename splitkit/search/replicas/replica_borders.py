"""The borders between which replicated stages can lie: all borders of the graph, or those along some orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from splitkit.graph.dataflow import crossing_values
from splitkit.memory.segments.segment import OrderMemory, SegmentMemory
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest
from splitkit.search.stages.candidate_borders import BorderSet, border_ideals, nested
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Floats, Ints, Slot


def all_replica_borders(placing: PlacementModel, demand: StageRequest) -> BorderSet | None:
    """Return all borders of a graph, or None if there are too many."""
    if (ideals := border_ideals(placing)) is None:
        return None
    members = np.array([[ideal >> unit & 1 for unit in range(len(placing.units))] for ideal in ideals], np.bool_)
    first, last = nested(members)

    def line(*borders: int) -> tuple[OrderMemory, list[int]]:
        """Return the units between these borders one after the other, and the position of each border."""
        marks = [np.zeros(members.shape[1], np.bool_), *(members[b] for b in borders), np.ones(members.shape[1], bool)]
        parts = [np.flatnonzero(then & ~now) for now, then in pairwise(marks)]
        nodes = [placing.nodes(part) for part in parts]
        return demand.stage_prices.memory.order(nodes), np.cumsum(list(map(len, nodes))).tolist()

    @cache
    def stretch(start: int, end: int) -> SegmentMemory:
        row, at = line(start, end)
        return row.segment(at[0], at[1])

    def messages(border: int) -> tuple[int, int]:
        row, at = line(border)
        return _messages(row, at[0])

    return BorderSet(members, first, last, stretch, messages, _state(demand), whole=True)


def along(placing: PlacementModel, demand: StageRequest, known: Sequence[Ints], most: int) -> Iterator[BorderSet]:
    """Return borders along orders: the graph's own, those of the known (n,) stages, and nine others, each order once.

    Args:
        placing: the units; none of them shared.
        demand: the request.
        known: stages whose order is tried.
        most: about how many borders to take along one order.
    """
    seen: set[bytes] = set()
    for order in _orders(placing, demand, known):
        if (key := order.astype(np.int64).tobytes()) not in seen:
            seen.add(key)
            yield replica_order_borders(placing, demand, order.astype(np.int64), most)


def _orders(placing: PlacementModel, demand: StageRequest, known: Sequence[Ints]) -> Iterator[Ints]:
    units = np.arange(len(placing.units))
    yield units
    yield from (np.argsort(stage, kind="stable") for stage in known)
    yield from orders(core_of(placing.problem([Slot()] * 2, demand.travel(range(2))), units))


def replica_order_borders(placing: PlacementModel, demand: StageRequest, order: Ints, most: int) -> BorderSet:
    """Return the borders along one order: all of them, or about ``most``."""
    nodes, ends = placing.nodes(order), placing.places(order)
    places = _places(crossing_values(placing.flow, demand.costs, nodes)[1][ends], placing.seconds[0][order], most)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    first, last = (index.astype(np.int64) for index in np.triu_indices(len(places), 1))
    at = ends[places].tolist()

    @cache
    def line() -> OrderMemory:
        return demand.stage_prices.memory.order([nodes])

    return BorderSet(
        rank[None, :] < places[:, None],
        first,
        last,
        lambda start, end: line().segment(at[start], at[end]),
        lambda border: _messages(line(), at[border]),
        _state(demand),
        whole=False,
    )


def _places(crossed: Floats, work: Floats, most: int) -> Ints:
    """Return (b,) positions, the first 0 and the last the size: the cheapest of each segment of equal work, and those
    next to the longest units.
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


def _messages(line: OrderMemory, place: int) -> tuple[int, int]:
    """Return the bytes that cross before a place of an order, downstream and upstream."""
    return int(line.messages[place]), int(line.gradient_messages[place]) if line.training else 0


def _state(demand: StageRequest) -> int:
    """Return the bytes of optimizer state per byte of gradient."""
    return STATE_OF[demand.optimizer] if demand.optimizer else 0
