"""The search for pipeline stages under links, memory and a schedule, and the claim of the best plan.

No solver knows everything that a plan is judged by, so plans come from several sources, and all are judged alike: by
the true peak of each rank and, under a schedule, by the simulated step::

    solver                 additive memory, one price per value      finds the stages, proves the bound
    memory_fit             the same solver, with memory reserved     where true peaks exceed the sums
    rank_borders           cuts between blocks, simulated            where ranks have several stages
    peak_search            true peaks over given borders             where memory decides
    balancing              the same bottleneck, other cuts           equal loads, fewer bytes

The bound is of a relaxation (additive memory never exceeds the true peak, messages cost at least their price over the
cheapest link), so it holds whichever source the plan came from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs, unit_of
from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import Dataflow, given_back, readers_of, waits_for
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import by_rank, purpose
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Claim, PartKey, above_mean, evenness
from splitkit.plans.record import Plan
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.memory_search import MemoryParts, MemorySearch
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.request import StageRequest, with_all_reduce
from splitkit.search.stages.memory_fit import MemoryFit, bad_problems, named, nodes_listed
from splitkit.search.stages.peak_search import PeakSearch
from splitkit.search.stages.rank_borders import RankBorders
from splitkit.search.traffic_bounds import least_load, least_without_units, with_copies
from splitkit.solvers.clock import Clock, endless_clock
from splitkit.solvers.line.balanced_blocks import block_of_each, even_blocks
from splitkit.solvers.line.priced_cuts import best_borders
from splitkit.solvers.placement.contract import joining_bound, simple_bound
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.packing import stages_fit
from splitkit.solvers.placement.problem import Floats, Ints, Problem, Slot
from splitkit.solvers.placement.solution import Key, Solution, stage_numbers, timeout_note
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.units import duration, size

NEAR = 1e-3
"""Relative: where there is less to gain, what is near the best is not searched again."""
_MOST_LINKED = 5_000  # units that are moved one by one where links differ
_ROUNDING = 1e-9  # relative; larger than the rounding errors of sums, and no gain that anybody notices
_MOST_PRICED = 5_000  # units that are cut again where cuts are paid for, in time that grows with their square
_SENT = 0.5  # of the seconds, for stages that send what others compute again: the bound is there


@dataclass(frozen=True, eq=False)
class StagePlanner:
    """One search for stages.

    Attributes:
        demand: the request.
        keys: the names of the stages, from first to last.
        seconds: the solvers' effort, as seconds converted into counted steps.
        tolerance: relative; how much slower than the best the bottleneck may be where that balances the stages, or
            how much less balanced where fewer bytes cross.
        sends: whether shared nodes are computed once and sent.
        tries: what the solvers have found so far, for the note.
        clock: the deadline of the whole search.
    """

    demand: StageRequest
    keys: tuple[PartKey, ...]
    seconds: float = 10.0
    tolerance: float = 0.0
    sends: bool = False
    tries: list[Solution] = field(default_factory=list, repr=False)
    clock: Clock = field(default_factory=endless_clock, repr=False)

    def plan(self) -> Plan:
        """Return the best stages that fit.

        With links, stages first compute shared nodes for themselves; where that may lose more than the tolerance,
        stages that send them are tried too. The bound of the former holds for both, that of the latter for plans that
        compute each node once.

        Raises:
            NoPlanError: SK303 when none fit.
        """
        return self._described(*self.best())

    def best(self) -> tuple[Plan, Solution]:
        """Return the best stages that fit, without claim and note, and what is proven of them. Errors as in `plan`."""
        found, plan = self._found()
        value = self._value(plan)
        near = max(NEAR, self.tolerance)
        bound = max(found.bound, self._least)
        worth = self._placing.shared_seconds > near * value and value > bound * (1 + near)
        if worth and not self.clock.is_over():
            sending = replace(self, sends=True, seconds=_SENT * self.seconds)
            with suppress(NoPlanError):  # there is one that fits
                other, sent = sending._found()
                if sending._value(sent) < value:
                    found, plan = replace(other, bound=max(bound, other.bound)), sent
        return plan, found

    def least(self) -> Plan:
        """Return the fastest stages with the lowest maximum peak found, whatever memory is given."""
        free = replace(self, demand=replace(self.demand, memory=None))
        start = free._found()
        limited = replace(self, demand=replace(self.demand, memory=max(free._peaks(start[1]))))
        with suppress(NoPlanError):  # the sums of one unit may be above all that others leave room for
            start = min(start, limited._fitting.thrifty(limited._problem()), key=lambda its: max(self._peaks(its[1])))
        found, plan = min(start, limited._truly(*start, lowest=True), key=lambda its: max(limited._peaks(its[1])))
        lowest = max(limited._peaks(plan))
        try:
            return replace(self, demand=replace(self.demand, memory=lowest), tries=[]).plan()
        except NoPlanError:  # there is one, and time ended the search for faster ones
            return limited._described(plan, replace(found, bound=0.0))

    def _found(self) -> tuple[Solution, Plan]:
        """Return the best stages whose true peaks fit: a solver's, those of borders judged by a simulated step, and,
        where memory is short, what all borders allow if they are few.
        """
        refused: NoPlanError | None = None
        best: list[tuple[Solution, Plan]] = []
        try:
            best.append(self._fitting.best(self._problem()))
        except NoPlanError as error:
            refused = error
        near = best and self._value(best[0][1]) <= max(best[0][0].bound, self._least) * (1 + self.tolerance)
        others = [] if near and self.demand.schedule is None else [*self._cuts(), *([] if near else self._few())]
        plans = [plan for _, plan in best] + [plan for plan in others if self._fitting.fits(plan)]
        if not plans:
            assert refused is not None
            raise refused
        taken = plans[self._preferred([self._measures(plan) for plan in plans])]
        if best and taken is best[0][1]:
            return best[0]
        return self._cut(taken, best[0][0].bound if best else 0.0), taken

    def _cut(self, plan: Plan, bound: float) -> Solution:
        """Present a plan that no solver found as if one had."""
        device = np.array([plan.home(unit) for unit in self._placing.units], np.int64)
        loads, order = self._loads(plan), tuple(range(len(self.keys)))
        return Solution(device, order, float(loads.max()), bound, "cuts", loads, 1e-9)

    def _cuts(self) -> Iterator[Plan]:
        """Return divisions between blocks; where ranks have several stages, improved from the best of these."""
        if self.demand.schedule is not None and len(self._placing.units) <= _MOST_LINKED:
            cuts = RankBorders(self.demand, self._placing, self._rank_of, self.clock)
            yield from map(self._plan_of, cuts.stages(moved=len(self._limits) < len(self.keys)))

    def _few(self) -> Iterator[Plan]:
        """Return, where memory is short and borders are few, the fastest of all stages that fit by true peaks."""
        plain = self._plain
        if self._limited and (search := plain._peak_search).all_borders is not None:
            size = len(plain._placing.units)
            yield from map(plain._plan_of, search.within(np.arange(size) * len(self.keys) // size))

    @property
    def _fitting(self) -> MemoryFit:
        return MemoryFit(
            policy=self.demand.policy,
            units=self._placing.units,
            solve=self._solved,
            held_by=self._held_by,
            held=self._held,
            memory_of=self._rank_of,
            limits=self._limits,
            fit=stages_fit,
            optimizer=self.demand.optimizer,
            truly=self._truly,
            devices=self._fewest,
            clock=self.clock,
            replicas=self.demand.replicas,
        )

    def _truly(self, found: Solution, plan: Plan, *, lowest: bool = False) -> tuple[Solution, Plan]:
        """Return stages whose true peaks fit; if there are none, or if ``lowest``, those with the least memory."""
        plain = self._plain
        known = np.array([plan.home(unit) for unit in plain._placing.units], np.int64)
        plans = [plain._plan_of(stage) for stage in plain._peak_search.choices(known, lowest=lowest)]
        lacks = self._fitting.lacks
        if not lowest and all(map(lacks, plans)):
            plans = min([plans, *([own] for own in self._cuts_in_memory())], key=lambda its: lacks(its[0]))
        best = plans[plain._preferred([plain._measures(choice) for choice in plans])]
        return replace(found, solver="true peaks"), best

    def _cuts_in_memory(self) -> Iterator[Plan]:
        """Yield stages that fit, by `MemorySearch`: a second or two for thousands of nodes, where others time out.

        If there are none, yield the stages that need the least memory in the graph's own order.
        """
        sizes = tuple(limit for limit in self._limits if limit is not None)
        if not self._one_a_device or len(sizes) < len(self._limits):
            return
        search = self._memory_search(sizes)
        found = search.of(len(self.keys))
        if found is None:
            for count, need in search.needs():
                found = self._memory_search((need,) * count).of(count)
        if found is not None and (plan := self._plan_of_parts(found)) is not None:
            yield plan

    def _fewest(self) -> int | None:
        """Return the fewest stages found, more than there are, that fit the memory of each; None if there are none."""
        limit = self._limits[0]
        if not self._one_a_device or limit is None or len(set(self._limits)) > 1:
            return None
        found = MemorySearch(replace(self.demand, memory=None), None, lambda count: (limit,) * count).fewest()
        more = found is not None and len(found.parts) > len(self.keys) and self._plan_of_parts(found) is not None
        return len(found.parts) if found is not None and more else None

    @property
    def _one_a_device(self) -> bool:
        """Whether each device has one stage, without a cache."""
        return len(self._limits) == len(self.keys) and not self.demand.cache and self.demand.replicas == 1

    def _memory_search(self, sizes: tuple[int, ...]) -> MemorySearch:
        return MemorySearch(replace(self.demand, memory=None), len(self.keys), lambda count: sizes[:count])

    def _plan_of_parts(self, found: MemoryParts) -> Plan | None:
        """Return the plan of some parts; None if they separate nodes that a pipeline must keep together."""
        part_of = {node: number for number, nodes in enumerate(found.parts) for node in nodes}
        if any(len({part_of[node] for node in group}) > 1 for group in self.demand.inseparable):
            return None
        keys = self.keys if len(found.parts) == len(self.keys) else tuple(range(len(found.parts)))
        return Plan.of({node: keys[part_of[node]] for node in self.demand.flow.nodes})

    @cached_property
    def _plain(self) -> StagePlanner:
        """The same search over plans that compute each node once."""
        return replace(self, sends=True) if self._placing.shared else self

    @cached_property
    def _peak_search(self) -> PeakSearch:
        return PeakSearch(
            placing=self._placing,
            prices=self.demand.stage_prices,
            problem=self._problem(),
            cache=self._placing.sums(self.demand.cache),
            replicas=self.demand.replicas,
            holding=self._holding,
            flights=self.demand.flights(len(self.keys), surely=False),
            sure_flights=self.demand.flights(len(self.keys), surely=True),
            rank_of=self._rank_of,
            limits=self._limits,
            travel=self._travel,
            tolerance=self.tolerance,
            peaks=lambda stage: self._peaks(self._plan_of(stage)),
            clock=self.clock,
        )

    def _value(self, plan: Plan) -> float:
        return float(by_rank(self._loads(plan), self._rank_of)[0].max())

    @cached_property
    def _least(self) -> float:
        least = least_load(self._placing, self._travel, len(self._limits))
        return max(least, self._least_of_ranks) if len(self._limits) < len(self.keys) else least

    @property
    def _least_of_ranks(self) -> float:
        """A lower bound on the bottleneck rank in seconds: what is too expensive to cut is on one rank."""
        ranks = len(self._limits)
        problem = self._placing.problem([Slot()] * ranks, self.demand.travel(range(ranks)))
        core = core_of(problem, np.arange(problem.units))
        joined = joining_bound(core, simple_bound(core), int(core.least_work.sum()), acyclic=False)
        return max(0.0, joined - core.slack) / core.scale

    def _held(self, found: Solution) -> Ints:
        """Return (stages,) bytes by the sums of `AdditiveMemory`."""
        stage = stage_numbers(found.device, found.order)
        sums = self._held_in_stages[stage, np.arange(len(stage))]
        return np.bincount(stage, sums, len(self.keys)).astype(np.int64)

    @cached_property
    def _held_in_stages(self) -> Ints:
        """(stages, n) bytes of the units in each stage; 0 where no memory is limited."""
        if not self._limited:
            return np.zeros((len(self.keys), len(self._placing.units)), np.int64)
        return self._holding.in_stages(self.demand.in_flight(len(self.keys)))

    @cached_property
    def _placing(self) -> PlacementModel:
        demand = self.demand
        if demand.links is not None and not self.sends:
            made = PlacementModel(
                demand.flow, demand.prices, [demand.seconds], repeat=True, together=demand.inseparable
            )
            if len(made.units) >= len(self.keys):
                return made
        made = PlacementModel(demand.flow, demand.prices, [demand.seconds], together=demand.inseparable)
        if len(made.units) < len(self.keys):
            raise self._bound(made)
        return made

    def _bound(self, placing: PlacementModel) -> NoPlanError:
        """Return the error for fewer units than stages: nodes that must stay together form one unit."""
        largest, most, name = max(placing.members, key=len), len(placing.units), type(self.demand.policy).__name__
        reason = f"{name}: {len(self.keys)} stages were asked for, and {most} is the most: {len(largest)} nodes share "
        reason += f"memory that is written, or a value that cannot be sent{nodes_listed(largest)}"
        remedy = f"Ask for {most} at most, or write out of place: x = x + y, not x += y."
        return NoPlanError("SK303", reason, remedy, largest)

    @cached_property
    def _rank_of(self) -> tuple[int, ...]:
        return self.demand.ranks(len(self.keys))

    @cached_property
    def _limits(self) -> tuple[int | None, ...]:
        return self.demand.limits(max(self._rank_of) + 1)

    @cached_property
    def _travel(self) -> TransferTimes | None:
        return self.demand.travel(self._rank_of)

    @cached_property
    def _holding(self) -> AdditiveMemory:
        demand = self.demand
        held = AdditiveMemory.of(self._placing, demand.stage_prices.activations, demand.optimizer, demand.cache)
        return replace(held, saved=held.saved // demand.replicas)

    @property
    def _limited(self) -> bool:
        return any(limit is not None for limit in self._limits)

    def _problem(self) -> Problem:
        limits = [self._limits[rank] for rank in self._rank_of]
        in_flight = self.demand.in_flight(len(self.keys))[::-1] if self.demand.schedule else (1,)
        held = self._holding if self._limited else None
        with bad_problems(self.demand.policy, self._placing):
            problem = self._placing.problem(
                [Slot(capacity=np.inf if limit is None else float(limit)) for limit in limits],
                self._travel,
                nbytes=None if held is None else held.fixed,
                saved=None if held is None else held.saved,
                in_flight=() if held is None else in_flight,
                ordered=held is not None or self._uneven,
            )
            return with_copies(problem, self._placing, self._travel)

    @property
    def _uneven(self) -> bool:
        """Whether links differ between ranks."""
        return self._travel is not None and self._travel.factors(self._placing.value_bytes) is not None

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        """Return as many stages as there are keys, with the least bottleneck, then by `_measures`."""
        prefer = self._weigher() if self._travel is not None or self._limited or self.demand.schedule else None
        solve = partial(contiguous, seconds=self.seconds, prefer=prefer, near=self.tolerance, clock=self.clock)
        with bad_problems(self.demand.policy, self._placing):
            found = solve(problem)
            if len(found.order) < len(self.keys) and prefer is not None:  # else `_balanced` fills the others
                filled = solve(replace(problem, fill=True), prefer=self._weigher())
                proven = min(filled.bound, least_without_units(self._placing, self._travel))
                found = replace(filled, bound=max(found.bound, proven), timed_out=found.timed_out or filled.timed_out)
        self.tries.append(found)
        choices = [found] if len(found.order) == len(self.keys) else []
        if not choices or not self.clock.is_over():
            choices += self._again(problem, found)
        plans = [(choice, self._plan_of(choice.device, choice.order)) for choice in choices]
        return plans[self._preferred([self._measures(plan) for _, plan in plans])]

    def _again(self, problem: Problem, found: Solution) -> Iterator[Solution]:
        """Balance stages along orders; improve all of these where links differ or ranks have several stages."""
        at = stage_numbers(found.device, found.order)
        starts = [at, *self._balanced(problem, found, at)]
        yield from (self._moved(found, stage) for stage in starts[1:])
        if (self._uneven or len(self._limits) < len(self.keys)) and problem.units <= _MOST_LINKED:
            held, capacity = self._held_in_stages, np.array([device.capacity for device in problem.devices])
            linked = self._placing.linked(problem, self._travel, held, capacity, np.array(self._rank_of))
            for stage in {stage.tobytes(): stage for stage in starts}.values():
                yield self._moved(found, linked.annealed(stage, self.clock))

    def _balanced(self, problem: Problem, found: Solution, stage: Ints) -> Iterator[Ints]:
        """Return (n,) stages of the units: balanced ones along the graph's own order and along orders of given stages.

        An order of given stages has one stage after the other. Solvers put units that take no time anywhere; each
        order is also tried with those units in the stage of their readers.
        """
        orders = [np.arange(len(stage)), np.argsort(stage, kind="stable")]
        tolerances = tuple(dict.fromkeys((self.tolerance, 0.0)))
        if self._travel is None:
            orders.append(np.argsort(self._sunk(stage), kind="stable"))
        orders = [o for i, o in enumerate(orders) if not any(np.array_equal(o, before) for before in orders[:i])]
        divisions: list[list[list[int]]] = []
        for order in orders:
            if divisions and self.clock.is_over():
                break
            divisions.append(self._divisions(problem, found, order, stage, tolerances))
        for near in range(len(tolerances)):
            for order, division in zip(orders, divisions, strict=False):
                if near < len(division):
                    even = np.empty(len(stage), np.int64)
                    even[order] = block_of_each(division[near], len(stage))
                    yield even

    def _divisions(
        self, problem: Problem, found: Solution, order: Ints, stage: Ints, tolerances: Sequence[float]
    ) -> list[list[int]]:
        """Return the positions of the borders in an order, for each tolerance; nothing if none fit or the order is too
        long.
        """
        placing, travel, stages = self._placing, self._travel, len(self.keys)
        work, capacity = placing.seconds[0], np.array([device.capacity for device in problem.devices])
        if travel is None and not np.isfinite(capacity).any():
            value = float(np.bincount(stage, work, stages).max())
            prices = placing.crossing(order)[1, :-1]
            even = [
                even_blocks(work[order], stages, _limit(found.bound, value, near), prices, near) for near in tolerances
            ]
            return [cuts for cuts in even if cuts is not None]
        if len(order) > _MOST_PRICED:
            return []
        prices = np.zeros((stages - 1, len(order) + 1)) if travel is None else placing.cut_prices(order, travel)
        return best_borders(work[order], prices, self._held_in_stages[:, order], capacity, tolerances)

    def _sunk(self, stage: Ints) -> Ints:
        """Return the stages with units that take no time moved to their readers, where fewer bytes cross then.

        Otherwise labels that only the loss reads would be shifted in the first stage.
        """
        placing = self._placing
        found = {node: int(stage[unit]) for node, unit in placing.index.items()}
        bound = {node for members in placing.members if len(members) > 1 for node in members}
        _sink(placing.flow, self.demand.costs, found, bound)
        return np.array([found[unit] for unit in placing.units], np.int64)

    def _moved(self, found: Solution, stage: Ints) -> Solution:
        return replace(found, device=stage, order=tuple(range(len(self.keys))))

    def _weigher(self) -> Key:
        """Return what decides between placements that a solver takes for equal: it does not see the price of copies."""
        fewer = False

        def weigh(device: Ints, order: tuple[int, ...]) -> tuple[float, ...]:
            nonlocal fewer
            fewer |= len(order) < len(self.keys)  # solved again, whatever the others are
            return (float(len(order)),) if fewer else self._measures(self._plan_of(device, order))

        return weigh

    def _measures(self, plan: Plan) -> tuple[float, ...]:
        """Return what to minimise, the most important first: the bottleneck; with a schedule the step; the sum of
        squared loads, which is least for balanced stages; with a schedule the peak; the traffic.
        """
        loads = by_rank(self._loads(plan), self._rank_of)[0]
        worst, squares = float(loads.max()), float(np.square(loads).sum())
        if self.demand.schedule is None:
            return worst, squares, float(self.demand.traffic(plan))
        run = self._run(plan)
        return worst, run.seconds, squares, float(max(run.peaks)), float(self.demand.traffic(plan))

    def _preferred(self, measures: Sequence[tuple[float, ...]]) -> int:
        """Return the index of the best measures.

        Where ranks have several stages, only steps near the shortest one compete: the load of a rank does not say how
        long other ranks wait for its first stage.
        """
        paid, left = min(self.tolerance, NEAR), list(range(len(measures)))
        if self.tolerance and self.demand.schedule is not None and len(self._limits) < len(self.keys):
            least = min(step for _, step, *_ in measures)
            left = [i for i in left if measures[i][1] <= least * (1 + paid)]
        near = (self.tolerance,) * 2 if self.demand.schedule is None else (self.tolerance, paid) * 2
        return left[preferred([measures[i] for i in left], near)]

    def _plan_of(self, device: Ints, order: tuple[int, ...] = ()) -> Plan:
        """Return the plan of units on devices, which are the stages if no order is given."""
        plan = Plan.of(self._placing.labels(stage_numbers(device, order) if order else device, self.keys))
        each = self.demand.replicas
        return replace(plan, parts={key: replace(part, replicas=each) for key, part in plan.parts.items()})

    def _run(self, plan: Plan) -> ScheduleRun:
        return self.demand.run(self.demand.stage_prices.of(plan))

    def _loads(self, plan: Plan) -> Floats:
        """Return the load of each stage; of replicas, with the share of a microbatch in the all-reduce of gradients."""
        loads = self._placing.loads(plan, self.keys, [0] * len(self.keys), self._travel)
        if self.demand.replicas == 1 or self.demand.schedule is None:
            return loads
        return with_all_reduce(loads, self._run(plan))

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        """Return the peak bytes of each rank."""
        return tuple(one.total for one in self._held_by(plan))

    def _held_by(self, plan: Plan) -> tuple[ByteBreakdown, ...]:
        """Return the bytes of each rank; without a schedule of one microbatch, which no other disturbs."""
        if self.demand.schedule is not None:
            return tuple(map(ByteBreakdown.of_rank, self._run(plan).memory))
        return self.demand.held(plan, captured=True)

    @property
    def fair_share(self) -> float:
        """A lower bound on the bottleneck of all stages with these replicas: all work is shared, but for single ops."""
        seconds = self.demand.seconds.values()
        return max(sum(seconds) / len(self.keys), max(seconds)) * (1 - 1e-12)

    def described(self, plan: Plan) -> Plan:
        """Return a plan of other origin with a claim and a note."""
        return self._described(plan, self._cut(plan, 0.0))

    def retold(self, plan: Plan) -> Plan:
        """Return a plan that was made for another schedule, with the note for this one; its claim holds here, too."""
        claim = plan.claim
        assert claim is not None
        cut = self._cut(plan, claim.bound)
        return self._described(plan, replace(cut, solver=claim.solver, tolerance=claim.tolerance))

    def better(self, plan: Plan, other: Plan) -> Plan:
        """Return ``plan``, or another one of a lower bottleneck, for which the bound of ``plan`` holds too."""
        if self._value(other) >= self._value(plan) or plan.claim is None:
            return plan
        return self._described(other, self._cut(other, plan.claim.bound))

    def _described(self, plan: Plan, found: Solution, others: float = math.inf) -> Plan:
        """Return the plan with its claim and a note; ``others``: a lower bound for other numbers of replicas."""
        loads = self._loads(plan)
        of_rank, busiest = by_rank(loads, self._rank_of)
        value = float(of_rank.max())
        bound = min(value, max(found.bound, self._least), others)
        near, even = max(found.tolerance, self.tolerance), evenness(of_rank.tolist())
        claim = Claim("bottleneck", value, bound, found.solver, self.keys[busiest], near, even)
        load = duration(value, unit_of(self.demand.costs)) + ("" if len(of_rank) == len(loads) else " with its rank")
        each = f" on {self.demand.replicas} devices each" if self.demand.replicas > 1 else ""
        said = f"{len(self.keys)} stages{each}. {claim.told(load, above_mean(value, float(of_rank.mean())))}"
        words = [said, *limits(self.demand.seconds, len(of_rank))]
        if self.demand.schedule is not None:
            run = self._run(plan)
            words.append(f"{run.order.name} of {run.order.microbatches} microbatches: {run.figures}")
        if self.demand.schedule is not None or self._limited:
            held = self._held_by(plan) if self.demand.schedule is not None else self.demand.held(plan)
            fullest = max(range(len(held)), key=lambda rank: held[rank].total)
            peak = "" if self.demand.schedule is not None else f"peak {size(held[fullest].total)} on rank {fullest}, "
            words.append(f"{peak}{purpose(self.demand.optimizer)}: {held[fullest]}")
        return replace(plan, note="; ".join(words) + timeout_note(self.tries, self.clock), claim=claim)


def best_replicas(planners: Sequence[StagePlanner]) -> Plan:
    """Return the best of several numbers of replicas: the shortest step or, without a schedule, the least bottleneck.

    Raises:
        NoPlanError: SK303 if none fits; of the number whose plan lacks the fewest bytes.
    """
    found: list[tuple[float, StagePlanner, Plan, Solution]] = []
    bound, refused = math.inf, list[NoPlanError]()
    for planner in planners:
        try:
            plan, solution = planner.best()
        except NoPlanError as error:
            refused.append(error)
            bound = min(bound, planner.fair_share)
            continue
        step = planner._run(plan).seconds if planner.demand.schedule is not None else planner._value(plan)
        found.append((step, planner, plan, solution))
        bound = min(bound, max(solution.bound, planner._least))
    if not found:
        raise min(refused, key=lambda error: error.excess or math.inf)
    _, planner, plan, solution = min(found, key=lambda one: one[0])
    return planner._described(plan, solution, bound)


def _limit(bound: float, value: float, tolerance: float) -> float:
    """Return a limit on the bottleneck: within the tolerance of the bound if reachable, else of the value."""
    near = bound * (1 + tolerance)
    return near if value <= near else value * (1 + tolerance)


def _sink(flow: Dataflow, costs: Costs, stage: dict[Node, int], bound: Collection[Node]) -> None:
    readers, given = readers_of(flow), {*given_back(flow), *bound}
    latest: dict[Node, int] = {}
    for node in reversed(flow.nodes):
        then = latest.get(node, stage[node])
        if then > stage[node] and not costs.seconds(node) and node not in given:
            brought = [read for read in flow.inputs(node) if all(stage[u] != then for u in readers[read])]
            if sum(map(costs.nbytes, brought)) <= costs.nbytes(node):
                stage[node] = then
        for before in waits_for(flow, node):
            latest[before] = min(latest.get(before, stage[node]), stage[node])


def limits(seconds: Mapping[Node, float], ranks: int) -> Iterator[str]:
    """Name the op that keeps so many ranks from being faster than fewer."""
    heaviest, total = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    share = seconds[heaviest] / total if total else 0.0
    if share * ranks > 1 + NEAR:
        most = max(1, math.ceil(1 / share - NEAR))
        yield (
            f"{named(heaviest)}, one op, takes {share:.0%}: more than {most} stages are no faster; "
            "split that op, or ask for fewer"
        )


def preferred(measures: Sequence[tuple[float, ...]], tolerances: Sequence[float]) -> int:
    """Return the best of several: those near the minimum of each measure in turn, then the first with the least last.

    A load or balance is near if it is within the tolerance of users. The step and peak of a schedule are what users pay
    for and get less slack (`NEAR`).
    """
    left = list(range(len(measures)))
    for at, near in enumerate(tolerances):
        least = min(measures[i][at] for i in left)
        left = [i for i in left if measures[i][at] <= least * (1 + near + _ROUNDING)]
    return min(left, key=lambda i: measures[i][-1])
