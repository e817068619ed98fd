"""The search for stages that may be replicated: borders and replicas together, by dynamic programming over orders.

The state of the program is (border, devices used so far), and a step adds a stage with r replicas, whose load is its
work over r, its messages, and the all-reduce of its gradients: the partition of PipeDream (Narayanan et al., SOSP
2019), with memory and on any set of borders. The least bottleneck is not the shortest step: a step of m microbatches
takes at least ``max_j(m * load_j + the loads before j)``, so slower stages with fewer devices before them may win.
Several bottlenecks are therefore allowed in turn (`_SLOWER`), the best few plans of each are simulated, and the
shortest step that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from splitkit.errors import NoPlanError
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.search.replicas.replica_borders import all_replica_borders, along
from splitkit.search.replicas.replica_peaks import ReplicaPeaks, trained_by_units
from splitkit.search.replicas.replica_scoring import ReplicaScoring
from splitkit.search.stages.candidate_borders import BorderSet
from splitkit.search.stages.memory_fit import bad_problems
from splitkit.solvers.line.replicated import Aim, Replicated, ReplicatedChains
from splitkit.solvers.placement.problem import Floats, Ints
from splitkit.units import size

_CELLS = 3_000_000  # pairs that are weighed by a pass along one order; over all borders four times as many
_PER_SECOND = 2e7  # of these, in all passes
_PASSES = 8
_ORDERS, _PRICED = 12, 3  # orders that are tried; where stages must be priced in bytes
_FEWEST = 24  # borders along an order
_SLOWER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)  # than the fastest the slowest stage may be, where a step is shorter
_ROUNDS = 8
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
