"""The borders between which stages can lie, and the true memory of the stage between any two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from splitkit.memory.segment import OrderMemory, SegmentMemory
from splitkit.pipeline.memory import share
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_prices import STATE_OF, StagePrices
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.solvers.line.border_chains import Chains, on_chains
from splitkit.solvers.placement.problem import Bools, Floats, Ints

MOST_IDEALS = 400
"""Of more borders, only those along orders are priced; with 200 or 800, twelve requests had the same plans."""
_MOST_BORDERS = 220  # along an order: 24,000 stages lie between so many


@dataclass(frozen=True, eq=False)
class BorderSet:
    """Borders, each a set of units closed under predecessors; a stage is what lies between two of them.

    Attributes:
        members: (b, n) whether a unit is before the border; the first border is empty, the last has all units.
        first: (p,) the border at which each possible stage begins.
        last: (p,) the border at which it ends.
        stretch: a function from two borders to the memory of the stage between them.
        messages: a function from a border to the bytes that cross it, downstream and upstream.
        state: bytes of optimizer state per byte of gradient.
        whole: whether these are all borders of the graph.
        cache: (n,) bytes of cache that each unit keeps; None for none.
        replicas: the devices of each stage, which divide what it saves and takes.
    """

    members: Bools
    first: Ints
    last: Ints
    stretch: Callable[[int, int], SegmentMemory]
    messages: Callable[[int], tuple[int, int]]
    state: int
    whole: bool
    cache: Ints | None = None
    replicas: int = 1

    def stage_of(self, borders: Sequence[int]) -> Ints:
        """Return (n,) the stage of each unit, for a chain of these borders without the empty one."""
        stage: Ints = (~self.members[list(borders)]).sum(axis=0).astype(np.int64)
        return stage

    def between(self, of_units: Floats | Ints) -> Floats:
        """Return (p,) the sum over the units between two borders."""
        before = self.members @ of_units.astype(np.float64)
        total: Floats = before[self.last] - before[self.first]
        return total

    def price(self, wanted: Bools) -> None:
        """Compute the memory of the wanted (p,) stages, so that `once` and `saved` are known.

        For replicas it is a lower bound: gradients of parameters among the temporary bytes are not divided.
        """
        kept = None if self.cache is None else self.between(self.cache)
        for pair in np.flatnonzero(wanted).tolist():
            held = self.stretch(int(self.first[pair]), int(self.last[pair]))
            self.once[pair] = held.parameters + held.gradients * (1 + self.state) + share(held.temporary, self.replicas)
            self.once[pair] += 0 if kept is None else int(kept[pair])
            self.saved[pair] = share(held.saved, self.replicas)

    @cached_property
    def once(self) -> Ints:
        """(p,) bytes that do not depend on microbatches; -1 where not known."""
        return np.full(len(self.first), -1, np.int64)

    @cached_property
    def saved(self) -> Ints:
        """(p,) bytes per microbatch in flight, where known."""
        return np.zeros(len(self.first), np.int64)

    @cached_property
    def crossing(self) -> Ints:
        """(2, b) bytes that cross each border, downstream and upstream."""
        return -(-np.array([self.messages(border) for border in range(len(self.members))], np.int64).T // self.replicas)


class StagePeaks:
    """Lower bounds on the peaks of the stages between given borders in a pipeline.

    Args:
        track: the borders.
        holding: additive lower bounds on the memory of units.
        flights: what each stage has in flight.
    """

    def __init__(self, track: BorderSet, holding: AdditiveMemory, flights: InFlight) -> None:
        self.track, self._flights = track, flights
        fixed, saved = track.between(holding.fixed), track.between(holding.saved)
        self._sums = fixed + flights.forward[:, None] * saved

    def unpriced(self, capacity: Floats) -> Bools:
        """Return (p,) the stages that may fit and whose memory is not yet known."""
        wanted: Bools = self._possible(capacity)[np.isfinite(capacity)].any(axis=0) & (self.track.once < 0)
        return wanted

    def within(self, capacity: Floats) -> Floats:
        """Return (k, p) bytes of each stage in each place, without messages that wait for its rank.

        It is 0 where there is no limit, and infinite for stages that do not fit, or have no neighbours that fit.
        """
        track = self.track
        track.price(self.unpriced(capacity))
        forward, backward, handed = self._flights
        gone = track.once + forward[:, None] * track.saved
        back = track.once + backward[:, None] * track.saved
        if handed.any():
            back = back + np.where(handed[:, None], track.crossing[1][track.last], 0)
        peaks = np.where(np.isinf(capacity)[:, None], 0.0, np.maximum(gone, back))
        return np.where(self._possible(capacity) & (peaks <= capacity[:, None]), peaks, np.inf)

    @property
    def least_sums(self) -> float:
        """A lower bound on every peak: the smallest possible maximum of the sums along a chain."""
        return Chains(self.track.first, self.track.last, self._sums).least

    def waiting(self) -> Floats:
        """(k, p) bytes of one message that may wait at either end of each stage."""
        track, handed = self.track, self._flights.handed
        if not handed.any():
            return np.zeros(self._sums.shape)
        on = np.where(np.append(False, handed[:-1])[:, None], track.crossing[0][track.first], 0)
        back = np.where(handed[:, None], track.crossing[1][track.last], 0)
        return (on + back).astype(np.float64)

    def _possible(self, capacity: Floats) -> Bools:
        return on_chains(self.track.first, self.track.last, self._sums <= capacity[:, None])


def border_ideals(size: int, edges: Iterable[tuple[int, int]]) -> list[int] | None:
    """Return all borders of a graph by size, each as bits of the units before it; None if they are too many.

    Args:
        size: the number of units.
        edges: pairs of units (first, then).
    """
    before = [0] * size
    for first, then in edges:
        before[then] |= 1 << first
    found: dict[int, None] = {0: None}
    level = [0]
    while level and len(found) <= MOST_IDEALS:
        grown = {
            ideal | 1 << unit: None
            for ideal in level
            for unit in range(size)
            if not ideal >> unit & 1 and not before[unit] & ~ideal
        }
        found |= grown
        level = list(grown)
    return None if len(found) > MOST_IDEALS else list(found)


def ideal_borders(placing: PlacementModel, prices: StagePrices) -> BorderSet | None:
    """Return all borders of a graph, or None if there are more than the search can go through."""
    if (ideals := border_ideals(len(placing.units), placing.edges)) is None:
        return None
    members = np.array([[ideal >> unit & 1 for unit in range(len(placing.units))] for ideal in ideals], np.bool_)
    starts, ends = nested(members)
    memory = prices.memory
    known: dict[int, SegmentMemory] = {}

    def stretch(start: int, end: int) -> SegmentMemory:
        own = ideals[end] & ~ideals[start]
        if own not in known:
            parts = [np.flatnonzero(m) for m in (members[start], members[end] & ~members[start], ~members[end])]
            line = memory.order([placing.nodes(part) for part in parts])
            ends = [len(placing.nodes(part)) for part in parts]
            known[own] = line.segment(ends[0], ends[0] + ends[1])
        return known[own]

    def messages(border: int) -> tuple[int, int]:
        parts = [np.flatnonzero(m) for m in (members[border], ~members[border])]
        ahead, behind = (placing.nodes(part) for part in parts)
        return _messages(memory.order([ahead, behind]), len(ahead))

    return BorderSet(members, starts, ends, stretch, messages, _state(prices), whole=True)


def _messages(line: OrderMemory, place: int) -> tuple[int, int]:
    """Return the bytes that cross before a place of an order, downstream and upstream."""
    return int(line.messages[place]), int(line.gradient_messages[place]) if line.training else 0


def loads_between(track: BorderSet, placing: PlacementModel, travel: TransferTimes | None, stages: int) -> Floats:
    """Return (stages, p) seconds of each possible stage in each place, including values that only pass through."""
    work = np.tile(track.between(placing.seconds[0]), (stages, 1))
    if travel is None:
        return work
    crossed = np.zeros((2, len(track.members)))
    for nbytes, (_, pins) in zip(placing.value_bytes.tolist(), placing.values, strict=True):
        cut = track.members[:, pins[0]] & ~track.members[:, list(pins)].all(axis=1)
        crossed += np.outer((1, nbytes), cut)
    for stage in range(stages - 1):
        wait, speed = travel.latency[stage, stage + 1], travel.bandwidth[stage, stage + 1]
        price = travel.again * (wait * crossed[0] + crossed[1] / speed)
        work[stage] += price[track.last]
        work[stage + 1] += price[track.first]
    return work


def nested(members: Bools) -> tuple[Ints, Ints]:
    """Return the pairs of borders of which the second strictly contains the first. Borders are sorted by size."""
    lacks = (members.astype(np.int64) @ (~members).T.astype(np.int64)) > 0  # [i, j]: i has what j has not
    first, last = np.nonzero(np.triu(~lacks, 1))
    return first.astype(np.int64), last.astype(np.int64)


def order_borders(placing: PlacementModel, prices: StagePrices, order: Ints, places: Ints | None = None) -> BorderSet:
    """Return the borders along one order: the given places of it, or all; where it is long, those of least traffic."""
    line, ends = prices.memory.order([placing.nodes(order)]), placing.places(order)
    places = _places(line.messages[ends], len(order)) if places is None else places
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    first, last = (index.astype(np.int64) for index in np.triu_indices(len(places), 1))
    at = ends[places].tolist()
    return BorderSet(
        rank[None, :] < places[:, None],
        first,
        last,
        lambda start, end: line.segment(at[start], at[end]),
        lambda border: _messages(line, at[border]),
        _state(prices),
        whole=False,
    )


def _places(messages: Ints, size: int) -> Ints:
    """Return (b,) positions, the first 0 and the last the size."""
    if size < _MOST_BORDERS:
        return np.arange(size + 1)
    cheap = np.argsort(messages[1:size], kind="stable")[: 3 * _MOST_BORDERS // 4] + 1
    evenly = np.linspace(0, size, _MOST_BORDERS // 4).astype(np.int64)
    return np.unique(np.concatenate([cheap, evenly])).astype(np.int64)


def _state(prices: StagePrices) -> int:
    """Return the bytes of optimizer state per byte of gradient."""
    return STATE_OF[prices.optimizer] if prices.optimizer else 0


# The number of microbatches that the stages of a pipeline hold, whatever the times of its actions.


class InFlight(NamedTuple):
    """The number of microbatches of each stage, by number of the stage.

    Attributes:
        forward: (k,) at most.
        backward: (k,) at most while a backward runs.
        handed: (k,) whether the gradient that backward starts with came from another rank and is held as well.
    """

    forward: Ints
    backward: Ints
    handed: Bools

    @classmethod
    def of(cls, run: ScheduleRun | None, stages: int, *, surely: bool = False) -> InFlight:
        """Return the numbers of a schedule for any times; without a schedule one microbatch and no messages.

        Where backward is divided, a microbatch counts until its weight part, since most of its memory waits for that.
        If ``surely``, it counts only until the end of its input part, when some stages free much. Torch's first stage
        has none.
        """
        ones = np.ones(stages, np.int64)
        if run is None:
            return cls(ones, ones, np.zeros(stages, np.bool_))
        _, stage, kind, _ = run.order.columns
        forward, backward = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        now = np.zeros(stages, np.int64)
        for s, k in zip(stage.tolist(), kind.tolist(), strict=True):
            now[s] += k == FORWARD
            forward[s] = max(forward[s], now[s])
            if k in (BACKWARD, BACKWARD_INPUT):
                backward[s] = max(backward[s], now[s])
            now[s] -= k in (BACKWARD, BACKWARD_INPUT if surely and s else BACKWARD_WEIGHT)
        of = np.array(run.order.rank_of)
        return cls(forward, backward, np.append(of[1:] != of[:-1], False))
