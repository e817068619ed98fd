"""The search of `splitkit.policies.MemoryBudget`: divide several orders of a graph, for each number of parts.

Along one order a part is a segment. For a number of parts and the memory of each, a dynamic program over the possible
ends of parts decides exactly whether the order can be divided, and how with the least traffic (`memory_cuts`). The
number of parts rises from a lower bound until some order can be divided. Other orders than the graph's allow other
parts; in graphs of up to `_SMALL` nodes all cuts of all orders are tried, and then the answer is exact. What a part
holds depends only on its nodes and on what it takes and gives, that is, on the borders at its two ends.

Microbatches in flight, and so the memory left for a part, depend on how many parts follow it: the program is run once
for each number of parts instead of for all at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch.fx import Node

from splitkit.errors import ScheduleError
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan, keep_books
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.memory_cuts import Limits, MemoryCuts
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.request import StageRequest
from splitkit.search.stages.candidate_borders import BorderSet, StagePeaks, ideal_borders
from splitkit.solvers.line.path_bound import least_sum
from splitkit.solvers.placement.core import core_of, orders
from splitkit.solvers.placement.problem import Slot

_WORK = 18_000  # nodes times orders
_MORE = 8  # parts; with 1, 4 or 16, thirteen requests had the same parts or refusals
_ROUNDS = 8  # to make room for buffers; one was enough for nine requests
_SMALL = 40  # nodes of a graph of which all cuts of all orders are tried, if these are few enough
_MOST_ASKED = 8_000  # parts of these whose memory is asked for


@dataclass(frozen=True)
class MemoryParts:
    """Parts that fit.

    Attributes:
        parts: the nodes of each part, in graph order.
        held: the bytes of each part at its peak, by kind.
        memory: bytes of the devices.
        traffic: bytes that cross between parts, both ways.
        solver: how the parts were found.
    """

    parts: tuple[tuple[Node, ...], ...]
    held: tuple[ByteBreakdown, ...]
    memory: tuple[int, ...]
    traffic: int
    solver: str


class MemorySearch:
    """A search for parts of one graph that fit their devices.

    Args:
        demand: as below.
        parts: how many parts; ``None`` for as few as possible.
        sizes: a function from a number of devices to their bytes.

    Attributes:
        demand: the request, without the memory.
        flow: facts about the graph.
        optimizer: the optimizer whose state counts.
        tried: the largest number of parts that was tried.
        excluded: numbers of parts for which no plan exists in any order.
    """

    def __init__(self, demand: StageRequest, parts: int | None, sizes: Callable[[int], tuple[int, ...]]) -> None:
        self.flow, self.optimizer = demand.flow, demand.optimizer
        self.tried = 0
        self.excluded: set[int] = set()
        self._least_traffic: dict[int, int] = {}
        self.demand, self._parts, self._sizes = demand, parts, sizes
        self._prices = demand.stage_prices
        self._state = STATE_OF[demand.optimizer] if demand.optimizer else 0
        self._size = len(self.flow.nodes)
        self._chains: dict[int, MemoryCuts] = {}
        self._flights: dict[int, tuple[int, ...] | None] = {}

    def best(self) -> MemoryParts | None:
        """Return as many parts as the request asks for."""
        return self.fewest() if self._parts is None else self.of(self._parts)

    def fewest(self) -> MemoryParts | None:
        """Return the fewest parts that fit, or ``None`` if no number of them does.

        More parts have more borders and may hold more microbatches, so the search tries a few more than twice the
        number that could fit.
        """
        last = len(self._sizes(self._size))
        if self.largest_unit()[1] > max(self._sizes(self._size)):
            return None
        for count in range(self.fewest_possible(), last + 1):
            self.tried = count
            if (found := self.of(count)) is not None:
                return found
            if count >= last or not self._helps(count):
                return None
            if self._chain(0).may_fit(self._limits(count)):
                last = min(last, 2 * count + _MORE)
        return None

    def of(self, count: int) -> MemoryParts | None:
        """Return ``count`` parts that fit, with the least traffic found."""
        if self._in_flight(count) is None:
            return None
        limits = self._limits(count)
        best = self._exactly(count, limits)
        if count in self.excluded or (best is not None and best.traffic == self._least_traffic[count]):
            return best
        for order in range(len(self._orders)):
            chain = self._chain(order)
            ends = chain.cuts(limits)
            traffic = sum(chain.traffic[end] for end in ends[:-1]) if ends else 0
            if ends is not None and (best is None or traffic < best.traffic):
                found = self._found(order, ends, limits, traffic)
                best = found if found is not None else best
        return best

    def _exactly(self, count: int, limits: Limits) -> MemoryParts | None:
        """Return the best parts over all orders of a small graph; on failure, note in `excluded` that none exist."""
        capacity = np.array(limits.memory, np.float64)
        peaks = None if self._all is None else StagePeaks(*self._all, self.demand.flights(count, surely=True))
        if peaks is None or peaks.unpriced(capacity).sum() > _MOST_ASKED:
            return None
        track, size = peaks.track, len(peaks.track.members)
        fits = np.full((count, size, size), np.inf)
        fits[:, track.first, track.last] = np.where(np.isfinite(peaks.within(capacity)), 0.0, np.inf)
        found = least_sum(fits, track.crossing.sum(axis=0).astype(np.float64), np.inf)
        if not np.isfinite(found.value):
            self.excluded.add(count)
            return None
        self._least_traffic[count] = int(found.value)
        stages = track.stage_of(found.ends)
        parts = self._as_run([self._placing.nodes(np.flatnonzero(stages == part)) for part in range(count)])
        chain = MemoryCuts(self._prices.memory.order([[node for part in parts for node in part]]), self._state)
        ends = np.cumsum([len(part) for part in parts])[:-1].tolist()
        return self._fitting(parts, limits, sum(chain.traffic[end] for end in ends), "all cuts of all orders")

    def _as_run(self, parts: Sequence[Sequence[Node]]) -> tuple[tuple[Node, ...], ...]:
        """Return the parts in execution order, which differs where some do not wait for each other."""
        plan = Plan.of({node: part for part, members in enumerate(parts) for node in members})
        return tuple(tuple(parts[key]) for key, _ in part_order(self.flow, plan) if isinstance(key, int))

    @cached_property
    def _all(self) -> tuple[BorderSet, AdditiveMemory] | None:
        """All borders of a small graph, if they are few, and what its nodes hold at least."""
        track = ideal_borders(self._placing, self._prices) if self._size <= _SMALL else None
        held = self._placing, self._prices.activations, self.optimizer
        return None if track is None else (track, AdditiveMemory.of(*held))

    @cached_property
    def _placing(self) -> PlacementModel:
        return PlacementModel(self.flow, self.demand.prices, [dict.fromkeys(self.flow.nodes, 0.0)])

    def at_least(self, count: int) -> int:
        """Return a lower bound on the number of parts: the first that is neither excluded nor short of memory."""
        least = self.fewest_possible()
        return next((fewer for fewer in range(least, count) if fewer not in self.excluded), count)

    def fewest_possible(self) -> int:
        """A lower bound on the number of parts: what all must hold together needs so many devices."""
        chain, memory = self._chain(0), self._sizes(self._size)
        if not self._size or chain.peak(0, self._size, 1) <= memory[0]:
            return 1
        least = chain.line.lower_bound(0, self._size)
        total = least.parameters + least.gradients * (1 + self._state) + least.saved
        room = np.cumsum(memory)
        return max(2, int(np.searchsorted(room, total)) + 1)

    def least_traffic(self, count: int) -> int:
        """A lower bound on traffic: in a connected graph each of the ``count - 1`` cuts is crossed by some value."""
        if count in self._least_traffic:
            return self._least_traffic[count]
        line = self._chain(0).line
        nbytes = line.value_bytes + (np.where(line.gradient_of >= 0, line.value_bytes, 0) if line.training else 0)
        items, readers = line.reads.item, line.reads.position
        makers = line.made[items]
        inside = (makers >= 0) & (makers != readers)
        pairs = makers[inside], readers[inside]
        graph = coo_array((np.ones(len(pairs[0])), pairs), shape=(self._size, self._size))
        if count < 2 or connected_components(graph, directed=False, return_labels=False) > 1:
            return 0
        return (count - 1) * int(nbytes[items[inside]].min())

    def largest_unit(self) -> tuple[Node, int]:
        """The node that needs the most memory in any part, and a lower bound on the bytes of a part with it."""
        chain = self._chain(0)
        alone = chain.alone()
        largest = int(alone.argmax())
        return self.flow.nodes[largest], int(alone[largest])

    def needs(self) -> list[tuple[int, int]]:
        """Return, for some numbers of parts, the smallest memory per device that was found to do, with a plan for it.

        Without a schedule it is the smallest for the graph's own order.
        """
        wanted = self._parts
        most = len(self._sizes(self._size))
        counts = [wanted] if wanted else [most] if most < self._size else [1, 2, 4, 8]
        found = [(count, self._need(count)) for count in counts if count <= self._size]
        return [(count, need) for count, need in found if need is not None]

    def _need(self, count: int) -> int | None:
        flights, chain = self._in_flight(count), self._chain(0)
        if flights is None:
            return None
        most = max(chain.peak(0, self._size, flight) for flight in flights) * 2 + 1
        fits = range(most + 1)
        need = bisect_left(fits, True, key=lambda room: chain.cuts(Limits((room,) * count, flights)) is not None)
        if need > most:
            return None
        return self._planned(count, need)

    def _planned(self, count: int, need: int) -> int | None:
        """Return ``need``, or a little more if message buffers, which cuts leave out, exceed it in each plan."""
        for _ in range(_ROUNDS):
            more = MemorySearch(self.demand, count, lambda devices, need=need: (need,) * devices)  # type: ignore[misc]
            if more.of(count) is not None:
                return need
            flights = self._in_flight(count)
            ends = None if flights is None else self._chain(0).cuts(Limits((need,) * count, flights))
            if flights is None or ends is None:
                return None
            parts = [self.flow.nodes[start:end] for start, end in pairwise([0, *ends])]
            need = max(need + 1, *(held.total for held in self._held(parts, flights)))
        return None

    def _helps(self, count: int) -> bool:
        """Return whether more parts than ``count``, which do not fit, may fit."""
        if self._in_flight(count) is None:
            return False
        uniform = len(set(self._sizes(self._size))) == 1
        stuck = (self._chain(order).stuck(self._limits(count)) for order in range(len(self._orders)))
        return not (uniform and all(stuck))

    def _limits(self, count: int) -> Limits:
        flights = self._in_flight(count)
        assert flights is not None
        return Limits(self._sizes(count), flights)

    def _found(self, order: int, ends: Sequence[int], limits: Limits, traffic: int) -> MemoryParts | None:
        """Return the parts if they fit as the engine runs them: one after the other, each in the graph's own order."""
        index, nodes = self.flow.index, self._orders[order] if order else self.flow.nodes
        starts = [0, *ends[:-1]]
        parts = tuple(
            tuple(sorted(nodes[start:end], key=index.__getitem__)) for start, end in zip(starts, ends, strict=True)
        )
        solver = f"cuts of order {order + 1} of {len(self._orders)}" if order else "cuts of the graph's order"
        return self._fitting(parts, limits, traffic, solver)

    def _fitting(
        self, parts: tuple[tuple[Node, ...], ...], limits: Limits, traffic: int, solver: str
    ) -> MemoryParts | None:
        """Return the parts in execution order if they fit then; independent parts may run in another order."""
        plan = Plan.of({node: part for part, members in enumerate(parts) for node in members})
        if [key for key, _ in part_order(self.flow, plan) if key is not PARENT] != list(range(len(parts))):
            return None
        books = keep_books(self.flow, plan)
        kept = tuple(tuple(n for n in self.flow.nodes if books.home(n) == part) for part in range(len(parts)))
        for each in (kept, parts) if books is not plan and all(kept) else (parts,):
            held = self._held(each, limits.flights)
            if all(one.total <= room for one, room in zip(held, limits.memory, strict=True)):
                return MemoryParts(each, held, tuple(limits.memory), traffic, solver)
        return None

    def _held(self, parts: Sequence[Sequence[Node]], flights: Sequence[int]) -> tuple[ByteBreakdown, ...]:
        """Return the bytes of each part at its peak; under a schedule with message buffers."""
        stages = self._prices.of(parts)
        if self.demand.schedule is not None:
            return tuple(map(ByteBreakdown.of_rank, self.demand.run(stages).memory))
        each = zip(stages, flights, strict=True)
        return tuple(ByteBreakdown.of_stage(costs, in_flight=flight) for costs, flight in each)

    def _in_flight(self, count: int) -> tuple[int, ...] | None:
        """Return the microbatches in flight of each part; ``None`` if the schedule does not allow ``count`` parts.

        Raises:
            ScheduleError: SK330 if the request asks for exactly that number.
        """
        if count not in self._flights:
            try:
                self._flights[count] = self.demand.in_flight(count)
            except ScheduleError:
                if self._parts is not None:
                    raise
                self._flights[count] = None
        return self._flights[count]

    def _chain(self, order: int) -> MemoryCuts:
        if order not in self._chains:
            nodes = self._orders[order] if order else self.flow.nodes
            self._chains[order] = MemoryCuts(self._prices.memory.order([nodes]), self._state)
        return self._chains[order]

    @cached_property
    def _orders(self) -> list[list[Node]]:
        """The graph's own order, and others."""
        found = {tuple(range(self._size)): None}
        if 2 * self._size > _WORK:
            return [list(self.flow.nodes)]
        bytes_as_seconds = TransferTimes(np.zeros((2, 2)), np.ones((2, 2)))
        problem = self._placing.problem([Slot()], bytes_as_seconds)
        for order in orders(core_of(problem, np.arange(self._size))):
            if (len(found) + 1) * self._size <= _WORK:
                found[tuple(order.tolist())] = None
        return [[self.flow.nodes[i] for i in order] for order in found]
