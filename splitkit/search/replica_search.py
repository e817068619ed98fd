"""The search for stages that may be replicated: borders and replicas together, by dynamic programming over orders.

The state of the program is (border, devices used so far), and a step adds a stage with r replicas, whose load is its
work over r, its messages, and the all-reduce of its gradients: the partition of PipeDream (Narayanan et al., SOSP
2019), with memory and on any set of borders. The least bottleneck is not the shortest step: a step of m microbatches
takes at least ``max_j(m * load_j + the loads before j)``, so slower stages with fewer devices before them may win.
Several bottlenecks are therefore allowed in turn (`_SLOWER`), the best few plans of each are simulated, and the
shortest step that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice, pairwise

import numpy as np

from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import crossing_values
from splitkit.memory.segment import OrderMemory, SegmentMemory
from splitkit.pipeline.memory import trained_bytes, undivided
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel
from splitkit.search.replica_scoring import ReplicaScoring
from splitkit.search.request import StageRequest
from splitkit.search.stages.candidate_borders import BorderSet, border_ideals, nested
from splitkit.search.stages.memory_fit import bad_problems
from splitkit.solvers.line.replicated import Aim, Replicated, ReplicatedChains
from splitkit.solvers.placement.core import core_of, orders
from splitkit.solvers.placement.problem import Floats, Ints, Slot
from splitkit.units import size

_CELLS = 3_000_000  # pairs that are weighed by a pass along one order; over all borders four times as many
_PER_SECOND = 2e7  # of these, in all passes
_PASSES = 8  # along an order, about, to divide the time among orders; with 1 to 64, six requests had the same plans
_ORDERS, _PRICED = 12, 3  # orders that are tried; where stages must be priced in bytes
_FEWEST = 24  # borders along an order
_SLOWER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)  # than the fastest the slowest stage may be, where a step is shorter
_ROUNDS = 8  # in which room is made for what waits; 1 to 64 made no difference where it was tried
_WAITING = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (4, 4))  # messages on and back that may wait for a device
_GROWTH = 1.5  # of a memory that would do, as it is looked for


@dataclass(frozen=True, eq=False)
class PricedBorders:
    """A set of borders, and what is known of the stages between them.

    Attributes:
        track: the borders.
        peaks: the memory of the stages.
        work: (p,) seconds of each stage on one device.
        crossed: (b,) bytes that cross each border.
        entering: (2, p) values that each stage reads from earlier stages, and their bytes; empty without links.
        leaving: (2, p) values that it makes for later stages, and their bytes; empty without links.
        gradients: (p,) bytes of the gradients of each stage.
    """

    track: BorderSet
    peaks: ReplicaPeaks
    work: Floats
    crossed: Floats
    entering: Floats
    leaving: Floats
    gradients: Floats


@dataclass(frozen=True, eq=False)
class ReplicaSearch:
    """One search for replicated stages.

    Attributes:
        worth: the request, and the score of plans.
        seconds: the effort, as seconds converted into counted steps.
        single: stages on one device each, which are a candidate and whose order is tried; None for none.
        ending: what the note says of how the search without replicas ended.
        lanes: the borders to use; found if not given.
    """

    worth: ReplicaScoring
    seconds: float
    single: Plan | None = None
    ending: str = ""
    lanes: list[PricedBorders] = field(default_factory=list)

    def plan(self) -> Plan:
        """Return the best stages that fit.

        Raises:
            NoPlanError: SK303 if none were found; the message says how much memory would do.
        """
        with bad_problems(self.worth.demand.policy, self.worth.placing):
            if not self.lanes:
                self.lanes.extend(self._made())
            plans = [plan for plan in self._found() if self.worth.over(plan) <= 0]
            if not plans:
                little = (plan for lane in self.lanes for plan in self._thrifty(lane))
                plans = [plan for plan in little if self.worth.over(plan) <= 0]
            if not plans:
                raise self._lacking()
            plan = self.worth.described(self.worth.preferred(plans), self._bound)
            return replace(plan, note=plan.note + self.ending)

    def _found(self) -> Iterator[Plan]:
        """Return plans that may be best and may fit."""
        if self.single is not None:
            yield self.single
        seen: set[tuple[bytes, tuple[int, ...]]] = set()
        for lane in self.lanes:
            for found in self._along(lane):
                key = lane.track.stage_of(found.borders).tobytes(), tuple(found.replicas)
                if key not in seen:
                    seen.add(key)
                    yield self._plan_of(lane, found)

    def _along(self, lane: PricedBorders) -> Iterator[Replicated]:
        """Yield divisions along a set of borders: without memory limits, and, where these matter, within them."""
        found = list(self._choices(self._chains(lane)))
        yield from found
        if all(self.worth.over(self._plan_of(lane, each)) <= 0 for each in found):
            return
        chains = self._fitting(lane)
        if chains is not None:
            yield from self._choices(chains)

    def _fitting(self, lane: PricedBorders) -> ReplicatedChains | None:
        """Return the divisions whose fastest truly fits: what waits for a device is taken off its room, or assumed to
        be a number of messages.
        """
        for waiting in _WAITING:
            taken = 0.0
            for _ in range(_ROUNDS):
                chains = self._chains(lane, (taken, waiting))
                fastest = chains.best(Aim())
                if fastest is None:
                    break
                over = self.worth.over(self._plan_of(lane, fastest))
                if over <= 0:
                    return chains
                taken += over
        return None

    def _thrifty(self, lane: PricedBorders) -> Iterator[Plan]:
        """Return plans with little memory: for each number of devices, and of messages that may wait."""
        for waiting in _WAITING:
            chains = self._chains(lane, (0.0, waiting))
            held = replace(chains, work=np.zeros(len(lane.work)), enter=None, leave=None, extra=chains.held, held=None)
            for found in held.ends(Aim()):
                yield self._plan_of(lane, found)

    def _choices(self, chains: ReplicatedChains) -> Iterator[Replicated]:
        """Return the fastest stages, more balanced ones, cheaper ones; with a schedule those of a shorter step."""
        fastest = chains.best(Aim())
        if fastest is None:
            return
        yield fastest
        tolerance = self.worth.tolerance
        for near in dict.fromkeys((tolerance, 0.0)):
            limit = fastest.value * (1 + near)
            even = chains.best(Aim(limit, squares=1.0)) or fastest
            yield even
            crossing = float(chains.crossing[even.borders].sum())
            if near and crossing:
                price = near * even.value / crossing  # so that at most so much is yielded in evenness
                yield chains.best(Aim(limit, squares=1.0, crossing=price)) or even
        if self.worth.demand.schedule is not None:  # a step: about all loads, and the greatest for each microbatch
            for slower in _SLOWER:
                yield chains.best(Aim(fastest.value * slower, loads=1.0)) or fastest

    def _chains(self, lane: PricedBorders, held_to: tuple[float, tuple[int, int]] | None = None) -> ReplicatedChains:
        """Return divisions along a set of borders; unless ``held_to`` is None, within the memory of devices less some
        bytes, with so many waiting messages.
        """
        worth, links = self.worth, self.worth.links
        taken, waiting = held_to or (0.0, (0, 0))
        if held_to is not None:
            lane.peaks.price(max(worth.room(before, 1) for before in range(worth.devices)))

        def enter(before: int, left: int, right: int) -> Floats:
            assert links is not None
            return links.seconds(lane.entering, before, left, right)

        def leave(before: int, left: int, right: int) -> Floats:
            assert links is not None
            return links.seconds(lane.leaving, before, left, right)

        def extra(_: int, before: int, replicas: int) -> Floats:
            assert links is not None
            if replicas == 1:
                return np.zeros(len(lane.gradients))
            return links.ring(before, replicas, lane.gradients) / worth.microbatches

        def held(to_come: int, before: int, replicas: int) -> Floats:
            return lane.peaks.over(to_come, replicas, worth.room(before, replicas) - taken, waiting)

        return ReplicatedChains(
            first=lane.track.first,
            last=lane.track.last,
            work=lane.work,
            crossing=lane.crossed,
            devices=worth.devices,
            degrees=worth.degrees,
            enter=None if links is None else enter,
            leave=None if links is None else leave,
            extra=None if links is None or worth.demand.schedule is None else extra,
            held=None if held_to is None else held,
            places=0 if held_to is None else self._places,
        )

    @cached_property
    def _places(self) -> int:
        """The number of stages told apart by how many come after them; 0 if all hold as many microbatches."""
        return len(self._flights) if self.worth.limited and len(set(self._flights.tolist())) > 1 else 0

    @cached_property
    def _flights(self) -> Ints:
        """(k,) microbatches in flight in the last stage, the one before it ..."""
        most = self.worth.devices // self.worth.degrees[0]
        return np.array(self.worth.demand.in_flight(most)[::-1], np.int64)

    def _made(self) -> Iterator[PricedBorders]:
        """Return all borders if they are few, else those along as many orders as there is time for."""
        worth = self.worth
        around = len(worth.degrees) ** (1 if worth.links is None else 3) * worth.devices * max(1, self._places)
        whole = all_replica_borders(worth.placing, worth.demand)
        if whole is not None and len(whole.first) * around <= 4 * _CELLS:
            yield self._lane(whole)
            return
        most = max(_FEWEST, min(500, int((2 * _CELLS / around) ** 0.5)))
        passes = _PASSES + (len(_SLOWER) if worth.demand.schedule else 0)
        count = int(self.seconds * _PER_SECOND / (around * most**2 / 2 * passes))
        known = [] if self.single is None else [self._stage_of(self.single)]
        tracks = along(worth.placing, worth.demand, known, most)
        most_tracks = max(1 + len(known), min(count, _PRICED if worth.limited else _ORDERS))
        yield from map(self._lane, islice(tracks, most_tracks))

    def _stage_of(self, plan: Plan) -> Ints:
        return np.array([plan.home(unit) for unit in self.worth.placing.units], np.int64)

    def _lane(self, track: BorderSet) -> PricedBorders:
        worth, placing = self.worth, self.worth.placing
        crossed = np.zeros(len(track.members))
        entering, leaving = np.zeros((2, len(track.first))), np.zeros((2, len(track.first)))
        for nbytes, (_, pins) in zip(placing.value_bytes.tolist(), placing.values, strict=True):
            made, read = track.members[:, pins[0]], track.members[:, list(pins[1:])]
            crossed += nbytes * (made & ~read.all(axis=1))
            if worth.links is not None:
                count = read.sum(axis=1)
                comes = made[track.first] & (count[track.last] > count[track.first])
                goes = made[track.last] & ~made[track.first] & (count[track.last] < len(pins) - 1)
                entering += np.outer((1, nbytes), comes)
                leaving += np.outer((1, nbytes), goes)
        peaks = ReplicaPeaks(track, worth.demand, placing, self._flights, worth.degrees[-1])
        gradients = np.zeros(len(track.first))
        if worth.links is not None and worth.demand.schedule is not None:
            gradients = track.between(trained_by_units(placing))
        return PricedBorders(track, peaks, track.between(placing.seconds[0]), crossed, entering, leaving, gradients)

    def _plan_of(self, lane: PricedBorders, found: Replicated) -> Plan:
        replicas: dict[PartKey, int] = dict(enumerate(found.replicas))
        plan = Plan.of(self.worth.placing.labels(lane.track.stage_of(found.borders), list(replicas)))
        return replace(plan, parts={key: replace(part, replicas=replicas[key]) for key, part in plan.parts.items()})

    @cached_property
    def _bound(self) -> float:
        """A lower bound on the seconds of the bottleneck device: all work is shared, and no op has more replicas than
        allowed; where all borders are known, no stages between them are faster without links and memory.
        """
        worth = self.worth
        seconds = np.array(list(worth.demand.seconds.values()))
        least = max(seconds.sum() / worth.devices, seconds.max() / worth.degrees[-1]) * (1 - 1e-12)
        track = self.lanes[0].track
        if not track.whole:
            return float(least)
        free = ReplicatedChains(
            track.first, track.last, self.lanes[0].work, self.lanes[0].crossed, worth.devices, worth.degrees
        )
        fastest = free.best(Aim())
        assert fastest is not None
        return max(float(least), fastest.value * (1 - 1e-12))

    def _lacking(self) -> NoPlanError:
        """Return the error for too little memory, which says what would do."""
        policy, devices = type(self.worth.demand.policy).__name__, self.worth.devices
        given = ", ".join("no limit" if limit is None else size(limit) for limit in dict.fromkeys(self.worth.limits))
        reason = f"{policy}: what {devices} devices with replicas hold does not fit {given}"
        enough = self._enough()
        remedy = f"Give {enough} bytes ({size(enough)}) to each of {devices} devices: for that there is a plan."
        return NoPlanError("SK303", reason, remedy)

    def _enough(self) -> int:
        """Return a memory limit near the smallest feasible one; one stage with the fewest replicas fits at last."""
        nbytes = max(limit for limit in self.worth.limits if limit is not None)
        plans: list[Plan] = []
        while not plans:
            nbytes = int(nbytes * _GROWTH) + 1
            limited = replace(self, worth=replace(self.worth, limits=(nbytes,) * self.worth.devices))
            plans = [plan for lane in self.lanes for plan in limited._thrifty(lane)]
        return min(max(self.worth.peaks(plan)) for plan in plans)


# The memory of each device of a replicated stage, for all stages between a set of borders.


_FIXED, _SAVED, _TEMPORARY, _GRADIENTS = range(4)


@dataclass(frozen=True, eq=False)
class ReplicaPeaks:
    """Peaks by the formula of `splitkit.pipeline.memory.replica_of`.

    They are lower bounds, since some of what waits for a device is known only when a step is simulated.

    Attributes:
        track: the borders.
        demand: the request.
        placing: the units.
        flights: (k,) microbatches that a stage has in flight, by the number of stages from it to the last, 1 first.
        most: the largest number of replicas of a stage.
    """

    track: BorderSet
    demand: StageRequest
    placing: PlacementModel
    flights: Ints
    most: int

    def price(self, room: float) -> None:
        """Compute the memory of the stages whose share may fit a device."""
        holding = AdditiveMemory.of(self.placing, self.demand.stage_prices.activations, self.demand.optimizer)
        saved = int(self.flights.min()) * self.track.between(holding.saved) / self.most
        wanted = (self.track.between(holding.fixed) + saved <= room) & (self._held[:, _FIXED] < 0)
        members = self.track.members
        for pair in np.flatnonzero(wanted).tolist():
            start, end = int(self.track.first[pair]), int(self.track.last[pair])
            held = self.track.stretch(start, end)
            trained = self._trained[members[end] & ~members[start]].tolist() if held.gradients else []
            fixed = held.parameters + held.gradients * (1 + self.track.state)
            self._held[pair] = fixed, held.saved, held.temporary, undivided(trained, held.gradients)

    def over(self, to_come: int, replicas: int, room: float, waiting: tuple[int, int] = (0, 0)) -> Floats:
        """Return (p,) bytes by which each stage on so many devices exceeds their room; infinite if it is not priced.

        Args:
            to_come: stages from it to the last; 0 where that does not matter.
            replicas: the number of devices.
            room: bytes of each device.
            waiting: how many messages are assumed to wait for a device, downstream and upstream.
        """
        fixed, saved, temporary, gradients = self._held.T
        besides = np.minimum(temporary, -(-(temporary + (replicas - 1) * gradients) // replicas))
        peaks = fixed + int(self.flights[max(0, to_come - 1)]) * -(-saved // replicas) + besides
        if self.demand.schedule is not None:
            on, back = self.track.crossing[0][self.track.first], self.track.crossing[1][self.track.last]
            peaks = peaks + waiting[0] * -(-on // replicas) + (1 + waiting[1]) * -(-back // replicas)
        return np.where(fixed < 0, np.inf, peaks - room)

    @cached_property
    def _held(self) -> Ints:
        """(p, 4) bytes, -1 where not known."""
        return np.full((len(self.track.first), 4), -1, np.int64)

    @cached_property
    def _trained(self) -> Ints:
        """(n,) bytes of parameter gradients that the backward of each unit makes."""
        return trained_by_units(self.placing)


def trained_by_units(placing: PlacementModel) -> Ints:
    """Return (n,) bytes of parameter gradients that the backward of each unit makes."""
    sums = [sum(trained_bytes(placing.flow, node) for node in members) for members in placing.members]
    return np.array(sums, np.int64)


# The borders between which replicated stages can lie: all borders of the graph, or those along some orders.


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
