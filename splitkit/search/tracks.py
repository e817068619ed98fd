"""Borders between which stages can lie, and what a stage between any two of them truly holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from splitkit.memory.stretch import Line, Stretch
from splitkit.pipeline.stageprices import STATE_OF, StagePrices
from splitkit.search.flights import Flights
from splitkit.search.holding import Holding
from splitkit.search.placing import Placing
from splitkit.solvers.line.chains import Chains, on_chains
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem

MOST_IDEALS = 400
_MOST_BORDERS = 220


@dataclass(frozen=True, eq=False)
class Track:
    """Borders, each a set of units that holds with each unit all before it; a stage is what lies between two of them.

    Attributes:
        members: (b, n) whether a unit is before the border; the first is empty, the last has all.
        first: (p,) the border at which each stage that is possible begins.
        last: (p,) where it ends.
        stretch: what a stage between two borders holds.
        messages: bytes that cross each border, on and back, by its number.
        state: bytes of optimizer state for a byte of gradient.
        whole: whether these are all borders that there are.
    """

    members: Bools
    first: Ints
    last: Ints
    stretch: Callable[[int, int], Stretch]
    messages: Callable[[int], tuple[int, int]]
    state: int
    whole: bool

    def stage_of(self, borders: Sequence[int]) -> Ints:
        """(n,) the stage of each unit, for a chain of these borders, the empty one left out."""
        stage: Ints = (~self.members[list(borders)]).sum(axis=0).astype(np.int64)
        return stage

    def between(self, of_units: Floats | Ints) -> Floats:
        """(p,) what the units between two borders come to."""
        before = self.members @ of_units.astype(np.float64)
        total: Floats = before[self.last] - before[self.first]
        return total

    def price(self, wanted: Bools) -> None:
        """Find out what these (p,) stages hold: `once` and `saved` are then known."""
        for pair in np.flatnonzero(wanted).tolist():
            held = self.stretch(int(self.first[pair]), int(self.last[pair]))
            self.once[pair] = held.parameters + held.gradients * (1 + self.state) + held.temporary
            self.saved[pair] = held.saved

    @cached_property
    def once(self) -> Ints:
        """(p,) bytes whatever the microbatches; -1 where that is not known."""
        return np.full(len(self.first), -1, np.int64)

    @cached_property
    def saved(self) -> Ints:
        """(p,) bytes for each microbatch in flight, where that is known."""
        return np.zeros(len(self.first), np.int64)

    @cached_property
    def crossing(self) -> Ints:
        """(2, b) bytes that cross each border, on and back."""
        return np.array([self.messages(border) for border in range(len(self.members))], np.int64).T


class StagePeaks:
    """The peaks of the stages of a track in a pipeline, from below.

    Args:
        track: the borders.
        holding: sums that are never above a peak.
        flights: of each stage.
    """

    def __init__(self, track: Track, holding: Holding, flights: Flights) -> None:
        self.track, self._flights = track, flights
        fixed, saved = track.between(holding.fixed), track.between(holding.saved)
        self._sums = fixed + flights.forward[:, None] * saved

    def unpriced(self, capacity: Floats) -> Bools:
        """(p,) the stages that may fit, and of which it is not known what they hold."""
        wanted: Bools = self._possible(capacity)[np.isfinite(capacity)].any(axis=0) & (self.track.once < 0)
        return wanted

    def within(self, capacity: Floats) -> Floats:
        """(k, p) bytes of each stage, in each place: what waits for its rank comes on top. 0 where there is no limit;
        infinite for what does not fit, and for what no stages that fit are beside.
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
        """The least greatest sum of a chain: no peak is lower."""
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


class Tracks:
    """The tracks of a graph.

    Args:
        placing: the units; none of them shared.
        prices: what stages hold.
        problem: what the units cost and what travels, for orders of them.
    """

    def __init__(self, placing: Placing, prices: StagePrices, problem: Problem) -> None:
        self.placing, self._prices, self._problem = placing, prices, problem
        self._known: dict[bytes, Track] = {}

    @cached_property
    def all(self) -> Track | None:
        """All borders, if they are few."""
        return ideal_track(self.placing, self._prices)

    def along(self, stage: Ints) -> Iterator[Track]:
        """Borders along orders: the graph's own, that of given stages, and nine others."""
        units = np.arange(len(stage))
        others = orders(core_of(self._problem, units))
        for order in chain([units, np.argsort(stage, kind="stable")], others):
            if (key := order.astype(np.int64).tobytes()) not in self._known:
                self._known[key] = order_track(self.placing, self._prices, order)
            yield self._known[key]


def ideals_of(placing: Placing) -> list[int] | None:
    """All borders of a graph by size, each with a bit for every unit before it; None if they are too many."""
    size = len(placing.units)
    before = [0] * size
    for first, then in placing.edges:
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


def ideal_track(placing: Placing, prices: StagePrices) -> Track | None:
    """All borders of a graph; None if there are more than can be gone through."""
    if (ideals := ideals_of(placing)) is None:
        return None
    members = np.array([[ideal >> unit & 1 for unit in range(len(placing.units))] for ideal in ideals], np.bool_)
    starts, ends = nested(members)
    units = prices.units
    known: dict[int, Stretch] = {}

    def stretch(start: int, end: int) -> Stretch:
        own = ideals[end] & ~ideals[start]
        if own not in known:
            parts = [np.flatnonzero(m) for m in (members[start], members[end] & ~members[start], ~members[end])]
            line = units.line([placing.nodes(part) for part in parts])
            ends = [len(placing.nodes(part)) for part in parts]
            known[own] = line.stretch(ends[0], ends[0] + ends[1])
        return known[own]

    def messages(border: int) -> tuple[int, int]:
        parts = [np.flatnonzero(m) for m in (members[border], ~members[border])]
        ahead, behind = (placing.nodes(part) for part in parts)
        return _messages(units.line([ahead, behind]), len(ahead))

    return Track(members, starts, ends, stretch, messages, _state(prices), whole=True)


def _messages(line: Line, place: int) -> tuple[int, int]:
    """Bytes that cross before a place of a line, on and back."""
    return int(line.messages[place]), int(line.gradient_messages[place]) if line.training else 0


def nested(members: Bools) -> tuple[Ints, Ints]:
    """Pairs of borders of which the second has all of the first, and more. Borders are in order of their size."""
    lacks = (members.astype(np.int64) @ (~members).T.astype(np.int64)) > 0  # [i, j]: i has what j has not
    first, last = np.nonzero(np.triu(~lacks, 1))
    return first.astype(np.int64), last.astype(np.int64)


def order_track(placing: Placing, prices: StagePrices, order: Ints) -> Track:
    """Borders along one order: all of it, or where it is long, those that the least crosses."""
    line, ends = prices.units.line([placing.nodes(order)]), placing.places(order)
    places = _places(line.messages[ends], len(order))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    first, last = (index.astype(np.int64) for index in np.triu_indices(len(places), 1))
    at = ends[places].tolist()
    return Track(
        rank[None, :] < places[:, None],
        first,
        last,
        lambda start, end: line.stretch(at[start], at[end]),
        lambda border: _messages(line, at[border]),
        _state(prices),
        whole=False,
    )


def _places(messages: Ints, size: int) -> Ints:
    """(b,) positions, the first 0 and the last the size."""
    if size < _MOST_BORDERS:
        return np.arange(size + 1)
    cheap = np.argsort(messages[1:size], kind="stable")[: 3 * _MOST_BORDERS // 4] + 1
    evenly = np.linspace(0, size, _MOST_BORDERS // 4).astype(np.int64)
    return np.unique(np.concatenate([cheap, evenly])).astype(np.int64)


def _state(prices: StagePrices) -> int:
    """Bytes of optimizer state for a byte of gradient."""
    return STATE_OF[prices.optimizer] if prices.optimizer else 0
