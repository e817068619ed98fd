"""The search for parts of given devices, which `splitkit.policies.Devices` runs.

It makes a placement problem of the graph and hands it to the solver of the objective: `contiguous` (one convex piece
on each device, least bottleneck), `noncontiguous` (any set), `latency` (least time of one sample), and
`on_unequal_links` after the first two where links differ, because these know one price per value. A plan with all
nodes on one device is a candidate too: on slow links it is often the best one. The true peaks of the devices decide
what fits (`memory_fit`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, permutations

import numpy as np
import torch
from torch.fx import Node

from splitkit.costs import Costs, Device, roofline
from splitkit.costs.roofline import mesh_of
from splitkit.errors import CycleError, NoPlanError
from splitkit.graph.dataflow import bookkeeping
from splitkit.graph.node_selection import modules_matching
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import purpose, request_of
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.plans.parts import Claim, Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine
from splitkit.prices import unit_of
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.request import StageRequest
from splitkit.search.stages.memory_fit import MemoryFit, bad_problems, nodes_listed
from splitkit.search.stages.peak_search import PeakSearch
from splitkit.search.stages.stage_search import NEAR
from splitkit.search.traffic_bounds import least_load
from splitkit.solvers.clock import Clock, endless_clock
from splitkit.solvers.placement import problem as placement
from splitkit.solvers.placement.latency_solver import latency
from splitkit.solvers.placement.packing import sets_fit, stages_fit
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.set_solver import noncontiguous
from splitkit.solvers.placement.solution import Solution, faults, timeout_note
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.solvers.placement.unequal_solver import MOST_EXACT, on_unequal_links
from splitkit.units import duration, size


@dataclass(frozen=True, eq=False)
class DeviceRequest(StageRequest):
    """A request for parts of given devices; the ends of ``links`` are the keys of the devices.

    Attributes:
        devices: key of the part -> device.
        together: patterns of module paths; all nodes that one pattern matches go to one device.
        only: pattern of module paths -> keys of the devices that can run the nodes it matches.
    """

    devices: Mapping[PartKey, Device] = field(default_factory=dict)
    together: Sequence[str] = ()
    only: Mapping[str, Collection[PartKey]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[PartKey, ...]:
        """The keys of the devices."""
        return tuple(self.devices)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The row of prices that each device uses."""
        distinct = list(dict.fromkeys(self.devices.values()))
        return tuple(map(distinct.index, self.devices.values()))

    @cached_property
    def kind_prices(self) -> tuple[Costs, ...]:
        """The prices of each kind of device: the given ones if all devices are alike, else each kind's roofline."""
        distinct = dict(zip(self.kinds, self.devices.values(), strict=True))
        if len(distinct) == 1:
            return (self.prices,)
        mesh = mesh_of(self.costs)
        return tuple(self.trained(roofline(self.flow, distinct[kind], mesh=mesh)) for kind in range(len(distinct)))

    @cached_property
    def kind_seconds(self) -> tuple[Mapping[Node, float], ...]:
        """Seconds of every placeable node on each kind of device."""
        return tuple({n: prices.seconds(n) for n in self.flow.nodes} for prices in self.kind_prices)

    @cached_property
    def stage_prices(self) -> StagePrices:
        """The costs of parts as stages, each with the kernels of its own device where devices differ."""
        differ = len(self.kind_prices) > 1
        kernels = {key: device.kernels for key, device in self.devices.items()} if differ else {}
        return StagePrices(self.flow, self.prices, self.optimizer, divided=False, kernels=kernels)

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The places of CPUs among accelerators, unless it is said how much memory they have."""
        cpus = {place for place, device in enumerate(self.devices.values()) if device.is_cpu}
        return frozenset(cpus if self.memory is None and len(cpus) < len(self.devices) else ())

    @cached_property
    def capacities(self) -> tuple[int | None, ...]:
        """Bytes of each device; None for CPUs among accelerators, and where there is no limit."""
        if self.memory is not None:
            return self.limits(len(self.devices))
        return tuple(None if i in self.cpus else device.memory for i, device in enumerate(self.devices.values()))

    @cached_property
    def groups(self) -> Mapping[Node, int]:
        """Node -> number of the ``together`` pattern that matches it."""
        number = {pattern: i for i, pattern in enumerate(self.together)}
        return {node: number[pattern] for node, pattern in modules_matching(number, self.flow.nodes).items()}

    @cached_property
    def supported(self) -> Mapping[Node, tuple[PartKey, ...]]:
        """Node -> keys of the devices that can run it, for nodes that not all devices can run."""
        return {n: tuple(self.only[pattern]) for n, pattern in modules_matching(self.only, self.flow.nodes).items()}


# The request behind a search for parts of given devices, and what follows from it: prices, limits, CPUs.


_ORDERS, _WAYS = 5_040, 6  # orders of devices that are looked at; those, different in memory or kind, that are tried
_UNEQUAL = 3.0  # times as long as a solver that takes links to be alike may search where they are not


@dataclass(frozen=True, eq=False)
class DeviceSearch:
    """One search for parts of given devices.

    Attributes:
        demand: the request.
        latency: minimise the time of one sample instead of the load of the bottleneck device.
        pieces: how many convex pieces a device may run; ``None`` for any number.
        seconds: the solvers' effort, as seconds converted into counted steps.
        named: whether keys name torch devices.
        sends: whether shared nodes are computed once and sent.
        tries: what the solvers have found so far, for the note.
        clock: the deadline of the whole search.
    """

    demand: DeviceRequest
    latency: bool
    pieces: int | None
    seconds: float
    named: bool = False
    sends: bool = False
    tries: list[Solution] = field(default_factory=list, repr=False)
    clock: Clock = field(default_factory=endless_clock, repr=False)

    def plan(self) -> Plan:
        """Return the best plan; `StagePlanner.plan` explains shared nodes."""
        sending = replace(self, sends=True)
        try:
            found, plan = self._found()
        except NoPlanError:
            if not self._placing.shared or len(self._placing.units) > MOST_EXACT:
                raise
            return sending._described(*sending._found())  # which holds fewer values
        value = self._value(found)
        worth = self._placing.shared_seconds > NEAR * value and value > found.bound * (1 + NEAR)
        if worth and not self.clock.is_over():
            with suppress(NoPlanError):  # there is one that fits
                other, sent = sending._found()
                if sending._value(other) < value:
                    return sending._described(replace(other, bound=max(found.bound, other.bound)), sent)
        return self._described(found, plan)

    def _found(self) -> tuple[Solution, Plan]:
        """Return the solver's placement, or all nodes on one device where that is better or the only one that fits."""
        with bad_problems(self.demand.policy, self._placing):
            problem, known = self._problem(), len(self.tries)
            alone = [(found, self._plan_of(found)) for found in self._alone(problem)]
            choices = [(found, plan) for found, plan in alone if self._fitting.fits(plan)]
            bound, refused = float(problem.seconds.min(axis=0).max()), None
            try:
                choices.insert(0, self._fitting.best(problem))
                bound = choices[0][0].bound
            except NoPlanError as error:
                refused = error
            if self.tries[known:] and (refused or len(self.tries) > known + 1):  # sums said too little of memory
                of_all = self._of_all(problem, choices[0][0] if choices else self.tries[-1])
                bound = max([bound, *(solution.bound for solution, _ in of_all)])
                choices += of_all
            if not choices:
                assert refused is not None
                self._require_keepable(problem)
                raise refused
            found, plan = min(choices, key=lambda choice: self._value(choice[0]))
            return replace(found, bound=max(bound, self._least_load)), plan

    def _of_all(self, problem: Problem, found: Solution) -> list[tuple[Solution, Plan]]:
        """Return the best placement of a small problem whose true peaks fit, if there is any."""
        if self.latency or problem.units > MOST_EXACT or self.clock.is_over():
            return []
        best = on_unequal_links(
            problem,
            self._placing.prices(self._travel or TransferTimes.free(len(self._keys))),
            replace(found, bound=0.0),
            _UNEQUAL * self.seconds,
            acyclic=self.pieces == 1,
            clock=self.clock,
            fits=lambda device, order: self._fitting.fits(self._plan_of(replace(found, device=device, order=order))),
        )
        if best is None:
            return []
        proven = best.solver == "all placements" and not self._placing.shared  # copies hold what others do not
        return [(replace(best, bound=best.bound if proven else 0.0), self._plan_of(best))]

    @property
    def _least_load(self) -> float:
        """A lower bound on the load in seconds; 0 for makespans, and where CPUs send to each other for free."""
        known = not self.latency and len(self.demand.cpus) < 2
        return least_load(self._placing, self._travel, len(self._keys)) if known else 0.0

    def _require_keepable(self, problem: Problem) -> None:
        """Refuse an ``only`` that no plan with one piece per device can satisfy, whatever the memory.

        Raises:
            NoPlanError: SK303.
        """
        demand = self.demand
        roomy = self._roomy(problem)
        if not demand.supported or self.pieces != 1 or stages_fit(roomy) is not False or sets_fit(roomy) is False:
            return
        nodes = [*demand.supported]
        reason = f"one convex piece on each device cannot keep `only`{nodes_listed(nodes)}"
        more = "pieces=2, or more" if self.latency else "pieces=None"
        remedy = f"Give {more}: a device then runs several pieces; or let more devices run what stands between."
        raise NoPlanError("SK303", f"{type(demand.policy).__name__}: {reason}", remedy, nodes)

    def _roomy(self, problem: Problem) -> Problem:
        return replace(problem, devices=tuple(replace(slot, capacity=np.inf) for slot in problem.devices))

    def _alone(self, problem: Problem) -> Iterator[Solution]:
        """Place all units on one device, for each device that supports them all."""
        for place, device in enumerate(problem.devices):
            total = float(problem.seconds[device.kind].sum())
            if np.isfinite(total):
                loads = np.zeros(len(self._keys))
                loads[place] = total
                yield Solution(
                    device=np.full(problem.units, place, np.int64),
                    order=(place,),
                    value=total,
                    bound=0.0,
                    solver="one device",
                    loads=loads,
                    tolerance=1e-9,
                )

    def _described(self, found: Solution, plan: Plan) -> Plan:
        value, name = self._value(found), "makespan" if self.latency else "bottleneck"
        busiest = self._keys[int(self._loads(found).argmax())]
        limiting = next((key for key in plan.parts if _root(key, self._keys) == busiest), busiest)
        claim = Claim(name, value, min(value, found.bound), found.solver, limiting, found.tolerance)
        used, took = len(set(found.device.tolist())), duration(value, unit_of(self.demand.kind_prices[0]))
        told = f"A sample takes {took}. {claim}" if self.latency else claim.told(took)
        memory = ""
        if any(limit is not None for limit in self.demand.capacities):
            held = dict(zip(self._keys, self._held_by(plan), strict=True))
            fullest = max(held, key=lambda key: held[key].total)
            where = fullest if isinstance(fullest, str) else f"device {fullest}"
            peak = f"peak {size(held[fullest].total)} on {where}"
            memory = f"; {peak}, {purpose(self.demand.optimizer)}: {held[fullest]}"
        return replace(
            plan,
            note=f"{used} of {len(self._keys)} devices. {told}{memory}{timeout_note(self.tries, self.clock)}",
            claim=claim,
        )

    def _value(self, found: Solution) -> float:
        return found.value if self.latency else float(self._loads(found).max())

    @property
    def _keys(self) -> tuple[PartKey, ...]:
        return self.demand.keys

    @cached_property
    def _placing(self) -> PlacementModel:
        demand = self.demand
        bound = {*demand.groups, *demand.supported}
        repeat = demand.links is not None and not self.latency and not self.sends
        wish = {n: (demand.groups.get(n), demand.supported.get(n)) for n in bound}
        books = [nodes for nodes in demand.flow.fact(bookkeeping) if len({wish.get(n) for n in nodes}) == 1]
        return PlacementModel(
            demand.flow, demand.kind_prices[0], demand.kind_seconds, repeat=repeat, keep=bound, together=books
        )

    @cached_property
    def _travel(self) -> TransferTimes | None:
        return self.demand.travel(self._keys)

    @cached_property
    def _holding(self) -> AdditiveMemory:
        demand, prices = self.demand, self.demand.stage_prices
        kinds: Collection[str | None] = set(prices.kernels.values()) or (None,)
        kept = [prices.memory_on(kernels).activations for kernels in kinds]
        each = [AdditiveMemory.of(self._placing, one, demand.optimizer, demand.cache) for one in kept]
        return AdditiveMemory(each[0].fixed, np.min([one.saved for one in each], axis=0))

    def _problem(self) -> Problem:
        demand, placing = self.demand, self._placing
        row_of: dict[tuple[int, frozenset[Node]], int] = {}
        rows: list[Floats] = []
        specs: list[placement.Slot] = []
        for place, key in enumerate(demand.keys):
            barred = frozenset(n for n, keys in demand.supported.items() if key not in keys)
            kind = (demand.kinds[place], barred)
            if kind not in row_of:
                row_of[kind] = len(rows)
                can = np.array([n not in barred for n in placing.units])
                rows.append(np.where(can, placing.seconds[kind[0]], np.inf))
            limit = demand.capacities[place]
            capacity = np.inf if limit is None else float(limit)
            specs.append(placement.Slot(row_of[kind], capacity, cpu=place in demand.cpus))
        colours = np.array([demand.groups.get(n, -1) for n in placing.units], np.int64)
        limited = any(limit is not None for limit in demand.capacities)
        return placing.problem(
            specs,
            self._travel,
            seconds=np.array(rows, np.float64),
            nbytes=self._holding.fixed + self._holding.saved if limited else None,
            colours=colours,
        )

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        if self.latency:
            found = latency(problem, seconds=self.seconds, pieces=self.pieces or 1, clock=self.clock)
        else:
            solver = noncontiguous if self.pieces is None else contiguous
            found = solver(problem, seconds=self.seconds, clock=self.clock)
            if self._travel is not None and self._travel.differs and not self.clock.is_over():
                prices, acyclic = self._placing.prices(self._travel), self.pieces == 1
                seconds = _UNEQUAL * self.seconds
                better = on_unequal_links(problem, prices, found, seconds, acyclic=acyclic, clock=self.clock)
                found = better or found
        self.tries.append(found)
        return found, self._plan_of(found)

    def _plan_of(self, found: Solution) -> Plan:
        """Convert a solution into a plan; the visits of a device are numbered if it is visited several times."""
        labels = self._placing.labels(found.device, self._keys)
        plan = Plan.of(labels)
        device_of: Mapping[PartKey, PartKey] = {key: key for key in self._keys}
        if not found.order:
            pieces = refine(self.demand.flow, plan) if found.turn is None else self._pieces(found, labels)
            names = _numbered([(key, _root(key, self._keys)) for key in run_order(self.demand.flow, pieces)])
            plan = Plan.of({n: [names[key] for key in keys] for n, keys in pieces.items()})
            device_of = {name: _root(key, self._keys) for key, name in names.items()}
        on = {key: (self._torch_device(device), device) for key, device in device_of.items()}
        parts = {key: Part(key, on[key][0], planned_on=on[key][1]) for key in plan.parts}
        return replace(plan, parts=parts, request=request_of(self.demand.policy, self.demand.costs))

    def _pieces(self, found: Solution, labels: Mapping[Node, PartKey | list[PartKey]]) -> Plan:
        """Return the pieces as the makespan counts them; on a CPU each run of consecutive units is a part."""
        assert found.turn is not None
        turn = {n: t for nodes, t in zip(self._placing.members, found.turn.tolist(), strict=True) for n in nodes}
        cpus = {self._keys[place] for place in self.demand.cpus}
        whole = {n: (key, 0 if key in cpus else turn[n]) for n, key in labels.items()}
        parted = refine(self.demand.flow, Plan.of(whole))
        kept = Plan.of({n: parted.home(n) if labels[n] in cpus else key for n, key in whole.items()})
        try:
            run_order(self.demand.flow, kept)
        except CycleError:
            return parted
        return kept

    def _torch_device(self, key: PartKey) -> torch.device | None:
        """Return the device that the key of a mapping names."""
        if not self.named or not isinstance(key, str | torch.device):
            return None
        try:
            return torch.device(key)
        except RuntimeError:
            return None

    @cached_property
    def _fitting(self) -> MemoryFit:
        return MemoryFit(
            policy=self.demand.policy,
            units=self._placing.units,
            solve=self._solved,
            held_by=self._held_by,
            held=self._held,
            memory_of=range(len(self._keys)),
            limits=self.demand.capacities,
            optimizer=self.demand.optimizer,
            fit=sets_fit if self.pieces is None or self.latency else stages_fit,
            truly=None if self.latency else self._truly,
            clock=self.clock,
        )

    def _truly(self, found: Solution, plan: Plan) -> tuple[Solution, Plan]:
        """Return the fastest stages along orders of the graph whose true peaks fit, or which exceed memory the least.

        Devices take the stages in any order, of which some are tried.
        """
        plain, size = replace(self, sends=True), len(self._keys)
        units, choices = len(plain._placing.units), [(found, plan)]
        mine = [plain._placing.index[unit] for unit in self._placing.units]
        rank = {self._keys[device]: place for place, device in enumerate(found.order)}
        known = np.arange(units) * size // units
        if rank:
            known = np.array([rank[plan.home(unit)] for unit in plain._placing.units], np.int64)
            for made, reader in sorted(plain._placing.edges):  # what is copied has its home in the first part of all
                known[reader] = max(known[reader], known[made])
        kinds = list(zip(self.demand.capacities, self.demand.kinds, strict=True))
        ways = {tuple(kinds[d] for d in way): way for way in islice(permutations(range(size)), _ORDERS)}
        for way in islice(ways.values(), _WAYS):
            for stage in plain._peak_search(way).choices(known, lowest=False):
                one = replace(found, device=np.array(way)[stage[mine]], order=way, solver="true peaks")
                choices.append((one, self._plan_of(one)))
        roomy = self._roomy(self._problem())
        legal = [choice for choice in choices if not faults(roomy, choice[0].device)]
        return min(legal, key=lambda choice: (self._fitting.lacks(choice[1]), self._value(choice[0])))

    def _peak_search(self, way: tuple[int, ...]) -> PeakSearch:
        """Return the search by true peaks for stages of which the first is on the first of some devices, and so on."""
        demand, device, travel = self.demand, np.array(way), self._travel
        return PeakSearch(
            placing=self._placing,
            prices=demand.stage_prices,
            problem=self._problem(),
            cache=self._placing.sums(demand.cache),
            holding=self._holding,
            flights=demand.flights(len(way), surely=False),
            sure_flights=demand.flights(len(way), surely=True),
            rank_of=way,
            limits=demand.capacities,
            travel=None if travel is None else travel.between(device),
            tolerance=0.0,
            peaks=lambda stage: [
                one.total for one in self._held_by(Plan.of(self._placing.labels(device[stage], self._keys)))
            ],
            clock=self.clock,
        )

    def _held(self, found: Solution) -> Ints:
        sums = self._holding.fixed + self._holding.saved
        return np.bincount(found.device, sums, len(self._keys)).astype(np.int64)

    def _held_by(self, plan: Plan) -> tuple[ByteBreakdown, ...]:
        """Return the peak bytes of each device by kind."""
        return self.demand.held(plan, self._keys, partial(_root, devices=self._keys))

    def _loads(self, found: Solution) -> Floats:
        plan = Plan.of(self._placing.labels(found.device, self._keys))
        return self._placing.loads(plan, self._keys, self.demand.kinds, self._travel, self.demand.cpus)


def _root(key: PartKey, devices: Collection[PartKey]) -> PartKey:
    """Return the device of a part: ``("cuda:0", 1)`` is a visit of ``"cuda:0"``."""
    while key not in devices:
        assert isinstance(key, tuple)
        key = key[0]
    return key


def _numbered(parts: Sequence[tuple[PartKey, PartKey]]) -> dict[PartKey, PartKey]:
    """Name parts that are given with their devices in execution order: by the device if it has only one part."""
    of_device: dict[PartKey, list[PartKey]] = {}
    for key, device in parts:
        of_device.setdefault(device, []).append(key)
    once = all(len(keys) == 1 for keys in of_device.values())
    return {
        key: device if once else (device, number)
        for device, keys in of_device.items()
        for number, key in enumerate(keys)
    }
