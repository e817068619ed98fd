"""Stages for a pipeline: links, memory and schedule taken into account, and the best plan described."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from splitkit.costs import unit_of
from splitkit.pipeline.defaults import by_rank
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Claim, PartKey
from splitkit.plans.record import Plan
from splitkit.search.demand import Demand
from splitkit.search.fitting import Fitting, bad_problems
from splitkit.search.holding import Holding
from splitkit.search.placing import Placing, Travel
from splitkit.solvers.line.blocks import blocks_of
from splitkit.solvers.line.priced_cuts import best_cuts
from splitkit.solvers.placement.memory import stages_fit
from splitkit.solvers.placement.problem import Floats, Ints, Problem, Slot
from splitkit.solvers.placement.solution import Solution, ending, stages_of
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.units import duration, size

NEAR = 1e-3
"""Relative: where there is less to gain, what is near the best is not searched again."""
_MOST_EVEN = 5_000  # units that are cut again along an order, in time that grows with their square


@dataclass(frozen=True, eq=False)
class Staging:
    """One search for stages.

    Attributes:
        demand: what it is asked.
        keys: what the stages are called, from first to last.
        seconds: about how long to search.
        solver: what finds stages: `contiguous`, or another of the same form.
        sends: shared nodes are computed once and sent.
        tries: what solvers have found so far, for the note.
    """

    demand: Demand
    keys: tuple[PartKey, ...]
    seconds: float = 10.0
    solver: Callable[..., Solution] = contiguous
    sends: bool = False
    tries: list[Solution] = field(default_factory=list, repr=False)

    def plan(self) -> Plan:
        """The best stages that fit.

        With links, stages that compute shared nodes for themselves; and where these nodes take long, stages that send
        them. The bound of the former holds for both, that of the latter for those that compute each node once.

        Raises:
            NoPlanError: SK303 when none fit.
        """
        found, plan = self._found()
        value = self._value(plan)
        if self._placing.shared_seconds > NEAR * value and value > found.bound * (1 + NEAR):
            sending = replace(self, sends=True)
            other, sent = sending._found()
            if sending._value(sent) < value:
                found, plan = replace(other, bound=max(found.bound, other.bound)), sent
        return self._described(plan, found)

    def _found(self) -> tuple[Solution, Plan]:
        """The best stages whose true peaks fit."""
        fitting = Fitting(
            policy=self.demand.policy,
            units=self._placing.units,
            solve=self._solved,
            peaks=self._peaks,
            held=self._held,
            memory_of=self._rank_of,
            limits=self._limits,
            fit=stages_fit,
        )
        return fitting.best(self._problem())

    def _value(self, plan: Plan) -> float:
        return float(by_rank(self._loads(plan), self._rank_of)[0].max())

    def _held(self, found: Solution) -> Ints:
        """(stages,) bytes by the sums of `Holding`."""
        stage = stages_of(found.device, found.order)
        sums = self._held_in_stages[stage, np.arange(len(stage))]
        return np.bincount(stage, sums, len(self.keys)).astype(np.int64)

    @cached_property
    def _held_in_stages(self) -> Ints:
        """(stages, n) bytes of the units in each stage; 0 where no memory is limited."""
        if not self._limited:
            return np.zeros((len(self.keys), len(self._placing.units)), np.int64)
        return self._holding.in_stages(self.demand.in_flight(len(self.keys)))

    @cached_property
    def _placing(self) -> Placing:
        demand = self.demand
        if demand.links is not None and not self.sends:
            made = Placing(demand.flow, demand.prices, [demand.seconds], repeat=True)
            if len(made.units) >= len(self.keys):
                return made
        return Placing(demand.flow, demand.prices, [demand.seconds])

    @cached_property
    def _rank_of(self) -> tuple[int, ...]:
        return self.demand.ranks(len(self.keys))

    @cached_property
    def _limits(self) -> tuple[int | None, ...]:
        return self.demand.limits(max(self._rank_of) + 1)

    @cached_property
    def _travel(self) -> Travel | None:
        return self.demand.travel(self._rank_of)

    @cached_property
    def _holding(self) -> Holding:
        return Holding.of(self._placing, self.demand.stage_prices.activations, self.demand.optimizer)

    @property
    def _least_work(self) -> float:
        """Seconds that the most loaded rank has at least: all nodes are computed once or more."""
        return sum(self.demand.seconds.values()) / len(self._limits) * (1 - 1e-12)

    @property
    def _limited(self) -> bool:
        return any(limit is not None for limit in self._limits)

    def _problem(self) -> Problem:
        limits = [self._limits[rank] for rank in self._rank_of]
        in_flight = self.demand.in_flight(len(self.keys))[::-1] if self.demand.schedule else (1,)
        held = self._holding if self._limited else None
        with bad_problems(self.demand.policy, self._placing):
            return self._placing.problem(
                [Slot(capacity=np.inf if limit is None else float(limit)) for limit in limits],
                self._travel,
                nbytes=None if held is None else held.fixed,
                saved=None if held is None else held.saved,
                in_flight=() if held is None else in_flight,
                ordered=held is not None or self._uneven,
            )

    @property
    def _uneven(self) -> bool:
        """Whether links make a difference between the ranks."""
        return self._travel is not None and self._travel.factors(self._placing.value_bytes) is not None

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        """As many stages as there are keys, the least greatest load first, then the key of `_weigh`."""
        with bad_problems(self.demand.policy, self._placing):
            found = self.solver(problem, seconds=self.seconds, prefer=self._weigh, advise=False)
            if len(found.order) < len(self.keys):
                full = replace(problem, fill=True)
                filled = self.solver(full, seconds=self.seconds, prefer=self._weigh, advise=False)
                proven = found.bound if self._placing.shared else max(found.bound, filled.bound)
                found = replace(filled, bound=proven, cut=found.cut or filled.cut)
        self.tries.append(found)
        choices = [found, *self._again(problem, found)]
        plans = [(choice, self._plan_of(choice.device, choice.order)) for choice in choices]
        values = [self._value(plan) for _, plan in plans]  # copies and links as they are, which solvers only bound
        best = [i for i, value in enumerate(values) if value <= min(values) * (1 + 1e-9)]
        if len(best) == 1:
            return plans[best[0]]
        return plans[min(best, key=lambda i: self._weigh(choices[i].device, choices[i].order))]

    def _again(self, problem: Problem, found: Solution) -> Iterator[Solution]:
        """Even stages along the order that was found and the graph's own; where links differ, better ones from them."""
        if problem.units > _MOST_EVEN:
            return
        held = self._held_in_stages
        capacity = np.array([device.capacity for device in problem.devices])
        at = stages_of(found.device, found.order)
        starts = [at]
        for order in (np.argsort(at, kind="stable"), np.arange(problem.units)):
            prices = np.zeros((len(self.keys) - 1, problem.units + 1))
            if self._travel is not None:
                prices = self._placing.cut_prices(order, self._travel)
            cuts = best_cuts(problem.seconds[0][order], prices, held[:, order], capacity)
            if cuts is not None:
                stage = np.empty(problem.units, np.int64)
                stage[order] = blocks_of(cuts, problem.units)
                starts.append(stage)
                yield self._moved(found, stage)
        if self._uneven and self._travel is not None:
            linked = self._placing.linked(problem, self._travel, held, capacity)
            for stage in starts:
                yield self._moved(found, linked.annealed(stage))

    def _moved(self, found: Solution, stage: Ints) -> Solution:
        order = tuple(range(len(self.keys)))
        return replace(found, device=stage, order=order)

    def _weigh(self, device: Ints, order: tuple[int, ...]) -> tuple[float, ...]:
        """What decides between equal greatest loads: the simulated step, then the peak, then what crosses. The solver
        does not see what copies take, so that the true greatest load comes first.

        Without a schedule it is what crosses, in seconds, then how even the stages are.
        """
        if len(order) < len(self.keys):  # to be solved again
            return (0.0,)
        plan = self._plan_of(device, order)
        loads = self._loads(plan)
        worst = float(by_rank(loads, self._rank_of)[0].max())
        if self.demand.schedule is None:
            return worst, float(loads.sum()), float(np.square(loads).sum())
        run = self._run(plan)
        return (
            worst,
            run.seconds,
            float(max(run.peaks)),
            float(sum(stage.activation_bytes for stage in run.stages)),
        )

    def _plan_of(self, device: Ints, order: tuple[int, ...]) -> Plan:
        return Plan.of(self._placing.labels(stages_of(device, order), self.keys))

    def _run(self, plan: Plan) -> ScheduleRun:
        return self.demand.run(self.demand.stage_prices.of(plan))

    def _loads(self, plan: Plan) -> Floats:
        return self._placing.loads(plan, self.keys, [0] * len(self.keys), self._travel)

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return self._run(plan).peaks

    def _described(self, plan: Plan, found: Solution) -> Plan:
        """The plan with its claim and a note."""
        loads = self._loads(plan)
        of_rank, busiest = by_rank(loads, self._rank_of)
        value, mean = float(of_rank.max()), float(of_rank.mean())
        claim = Claim(
            "bottleneck",
            value,
            min(value, max(found.bound, self._least_work)),
            found.solver,
            self.keys[busiest],
            found.tolerance,
        )
        share = value / mean if mean else 1.0
        what = "slowest" if len(of_rank) == len(loads) else "most loaded rank"
        load = duration(value, unit_of(self.demand.costs))
        words = [f"{len(self.keys)} stages, the {what} {load}, {share:.3f} of the mean: {claim}"]
        if self.demand.schedule is not None:
            run = self._run(plan)
            words.append(
                f"{run.order.name} of {run.order.microbatches} microbatches: step {duration(run.seconds, run.unit)}, "
                f"bubble {run.bubble:.1%}, peak {size(max(run.peaks))} on rank {run.limiting_rank}"
            )
        elif self._limited:
            peaks = self._peaks(plan)
            words.append(f"peak {size(max(peaks))} on rank {peaks.index(max(peaks))}")
        return replace(plan, note="; ".join(words) + ending(self.tries), claim=claim)
