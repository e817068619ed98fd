"""Stages for a pipeline: links, memory and schedule taken into account, and the best plan described."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from splitkit.activations import activations
from splitkit.costs import Costs, Links, training
from splitkit.dataflow import Dataflow
from splitkit.errors import CostError, PolicyError
from splitkit.plan import Claim, PartKey, Plan
from splitkit.plancosts import Optimizer, StagePrices
from splitkit.policies.fitting import Fitting, listed
from splitkit.policies.holding import Holding
from splitkit.policies.placing import Placing, Travel
from splitkit.schedule import simulate_schedule
from splitkit.schedulerun import ScheduleRun
from splitkit.solvers.hops import best_cuts
from splitkit.solvers.placement.contiguous import contiguous
from splitkit.solvers.placement.memory import stages_fit
from splitkit.solvers.placement.problem import BadProblemError, Device, Floats, Ints, Problem
from splitkit.solvers.placement.solution import Solution
from splitkit.stagecosts import StageCosts
from splitkit.units import duration, size

NEAR = 1e-2
"""Relative: where there is less to gain, what is near the best is not searched again."""
_SAME = ("_prices", "_stage_prices")  # whether shared nodes are sent or not


def require_schedule(policy: object, schedule: str | None, microbatches: int | None, stages: int) -> None:
    """Refuse a schedule that does not go with so many stages and microbatches.

    Raises:
        ScheduleError: SK330; says what does.
        PolicyError: SK302 for microbatches without a schedule.
    """
    if schedule is not None:
        from splitkit.torch_schedules import pipeline_order

        pipeline_order(schedule, stages, _microbatches(microbatches, stages))
    elif microbatches is not None:
        name = type(policy).__name__
        raise PolicyError("SK302", f"{name}: microbatches={microbatches!r} without a schedule", 'Add schedule="1f1b".')


def ranks_of(schedule: str | None, microbatches: int | None, stages: int) -> tuple[int, ...]:
    """The rank of each stage; each has its own without a schedule."""
    if schedule is None:
        return tuple(range(stages))
    from splitkit.torch_schedules import pipeline_order

    return tuple(pipeline_order(schedule, stages, _microbatches(microbatches, stages)).rank_of)


def _microbatches(given: int | None, stages: int) -> int:
    return 2 * stages if given is None else given


@dataclass(frozen=True, eq=False)
class Staging:
    """One search for stages.

    Attributes:
        policy: on whose behalf, for errors.
        flow: facts about the graph.
        costs: of its nodes; with a schedule their backward is added.
        keys: what the stages are called, from first to last.
        links: between the ranks; ``None``: values cross for nothing.
        memory: bytes of each rank, ``None`` for no limit.
        schedule: its name, or ``None``.
        microbatches: of a step.
        optimizer: whose state is held.
        seconds: about how long to search.
        sends: shared nodes are computed once and sent.
    """

    policy: object
    flow: Dataflow
    costs: Costs
    keys: tuple[PartKey, ...]
    links: Links | None
    memory: tuple[int | None, ...]
    schedule: str | None
    microbatches: int | None
    optimizer: Optimizer
    seconds: float = 10.0
    sends: bool = False

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
            vars(sending).update({name: vars(self)[name] for name in _SAME if name in vars(self)})
            other, sent = sending._found()
            if sending._value(sent) < value:
                found, plan = replace(other, bound=max(found.bound, other.bound)), sent
        return self._described(plan, found)

    def _found(self) -> tuple[Solution, Plan]:
        """The best stages whose true peaks fit."""
        fitting = Fitting(
            policy=self.policy,
            units=self._placing.units,
            solve=self._solved,
            peaks=self._peaks,
            held=lambda found: self._holding.of_stages(found.device, found.order, self._in_flight),
            memory_of=self._rank_of,
            limits=self.memory,
            fit=stages_fit,
        )
        return fitting.best(self._problem())

    def _value(self, plan: Plan) -> float:
        return float(self._loads(plan).max())

    @cached_property
    def _prices(self) -> Costs:
        known = hasattr(self.costs, "backward") or self.schedule is None
        return self.costs if known else training(self.costs, self.flow.root)

    @cached_property
    def _placing(self) -> Placing:
        seconds = {n: self._prices.seconds(n) for n in self.flow.nodes}
        return Placing(self.flow, self._prices, [seconds], repeat=self.links is not None and not self.sends)

    @cached_property
    def _rank_of(self) -> tuple[int, ...]:
        return ranks_of(self.schedule, self.microbatches, len(self.keys))

    @cached_property
    def _travel(self) -> Travel | None:
        if self.links is None:
            return None
        return Travel.over(self.links, self._rank_of, training=self.schedule is not None)

    @cached_property
    def _stage_prices(self) -> StagePrices:
        return StagePrices(self.flow, self._prices, self.optimizer, activations(self.flow.root))

    @cached_property
    def _holding(self) -> Holding:
        return Holding.of(self._placing, self._stage_prices.activations, self.optimizer)

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        """Microbatches in flight, by the number of stages behind."""
        if self.schedule is None:
            return (1,)
        stages = [StageCosts(1.0, 1.0, 1.0)] * len(self.keys)
        return self._simulated(stages).in_flight_of_stages[::-1]

    @property
    def _least_work(self) -> float:
        """Seconds that the most loaded stage has at least: all nodes are computed once or more."""
        return sum(map(self._prices.seconds, self.flow.nodes)) / len(self.keys) * (1 - 1e-12)

    @property
    def _limited(self) -> bool:
        return any(limit is not None for limit in self.memory)

    def _problem(self) -> Problem:
        limits = [self.memory[rank] for rank in self._rank_of]
        held = self._holding if self._limited else None
        with bad_problems(self.policy, self._placing):
            return self._placing.problem(
                [Device(capacity=np.inf if limit is None else float(limit)) for limit in limits],
                self._travel,
                nbytes=None if held is None else held.fixed,
                saved=None if held is None else held.saved,
                in_flight=() if held is None else self._in_flight,
                ordered=held is not None or self._uneven,
            )

    @property
    def _uneven(self) -> bool:
        """Whether links make a difference between the ranks."""
        return self._travel is not None and self._travel.factors(self._placing.value_bytes) is not None

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        """As many stages as there are keys, the least greatest load first, then the key of `_weigh`."""
        with bad_problems(self.policy, self._placing):
            found = contiguous(problem, seconds=self.seconds, prefer=self._weigh, advise=False)
            if len(found.order) < len(self.keys):
                full = replace(problem, fill=True)
                filled = contiguous(full, seconds=self.seconds, prefer=self._weigh, advise=False)
                found = replace(filled, bound=found.bound)
        choices = [found, *self._along_links(problem, found)] if self._uneven else [found]
        plans = [(choice, self._plan_of(choice.device, choice.order)) for choice in choices]
        return min(plans, key=lambda pair: self._value(pair[1]))

    def _along_links(self, problem: Problem, found: Solution) -> Iterator[Solution]:
        """The best stages along a few orders, each cut at the price of its own link, which solvers only bound."""
        assert self._travel is not None
        flights = [self._in_flight[min(after, len(self._in_flight) - 1)] for after in range(len(self.keys))][::-1]
        held: Ints = problem.nbytes + np.array(flights, np.int64)[:, None] * problem.saved
        capacity = np.array([device.capacity for device in problem.devices])
        for order in (np.arange(problem.units), np.argsort(found.device, kind="stable")):
            cuts = self._placing.cut_prices(order, self._travel)
            starts = best_cuts(problem.seconds[0][order], cuts, held[:, order], capacity)
            if starts is not None:
                device = np.empty(problem.units, np.int64)
                device[order] = np.searchsorted(starts, np.arange(problem.units), side="right") - 1
                yield replace(found, device=device, order=tuple(range(len(self.keys))), solver="hops")

    def _weigh(self, device: Ints, order: tuple[int, ...]) -> tuple[float, ...]:
        """What decides between equal greatest loads: the simulated step, then the peak, then what crosses.

        Without a schedule it is what crosses, in seconds, then how even the stages are.
        """
        if len(order) < len(self.keys):  # to be solved again
            return (0.0,)
        plan = self._plan_of(device, order)
        if self.schedule is None:
            loads = self._loads(plan)
            return float(loads.sum()), float(np.square(loads).sum())
        run = self._simulated(self._stages(plan))
        return run.seconds, float(max(run.peaks)), float(sum(stage.activation_bytes for stage in run.stages))

    def _plan_of(self, device: Ints, order: tuple[int, ...]) -> Plan:
        place = {d: i for i, d in enumerate(order)}
        at = np.array([place[d] for d in device.tolist()], np.int64)
        return Plan.of(self._placing.labels(at, self.keys))

    def _stages(self, plan: Plan) -> tuple[StageCosts, ...]:
        return self._stage_prices.of(plan)

    def _simulated(self, stages: Sequence[StageCosts]) -> ScheduleRun:
        count = len(self.keys)
        return simulate_schedule(
            stages,
            self.schedule or "gpipe",
            _microbatches(self.microbatches, count) if self.schedule else 1,
            links=self.links,
        )

    def _loads(self, plan: Plan) -> Floats:
        return self._placing.loads(plan, self.keys, [0] * len(self.keys), self._travel)

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return self._simulated(self._stages(plan)).peaks

    def _described(self, plan: Plan, found: Solution) -> Plan:
        """The plan with its claim and a note."""
        loads = self._loads(plan)
        value, mean = float(loads.max()), float(loads.mean())
        claim = Claim(
            "bottleneck",
            value,
            min(value, max(found.bound, self._least_work)),
            found.solver,
            self.keys[int(loads.argmax())],
            found.tolerance,
        )
        share = value / mean if mean else 1.0
        words = [f"{len(self.keys)} stages, the slowest {duration(value)}, {share:.3f} of the mean: {claim}"]
        if self.schedule is not None:
            run = self._simulated(self._stages(plan))
            words.append(
                f"{run.order.name} of {run.order.microbatches} microbatches: step {duration(run.seconds)}, "
                f"bubble {run.bubble:.1%}, peak {size(max(run.peaks))} on rank {run.limiting_rank}"
            )
        elif self._limited:
            peaks = self._peaks(plan)
            words.append(f"peak {size(max(peaks))} on rank {peaks.index(max(peaks))}")
        return replace(plan, note="; ".join(words), claim=claim)


@contextmanager
def bad_problems(policy: object, placing: Placing) -> Iterator[None]:
    """Say in the user's terms what a solver refuses.

    Raises:
        CostError: SK323 for prices that make no sense, SK322 for links, SK320 for devices.
    """
    codes = {"seconds": "SK323", "net_costs": "SK323", "links": "SK322", "kind": "SK320", "capacity": "SK320"}
    try:
        yield
    except BadProblemError as error:
        nodes = [placing.units[unit] for unit in error.units]
        who = f" (devices {', '.join(map(str, error.devices))})" if error.devices else ""
        raise CostError(
            codes.get(error.field, "SK323"),
            f"{type(policy).__name__}: {error}{listed(nodes) or who}",
            "Give every node a price of 0 seconds or more, and every two devices a link.",
            nodes,
        ) from error
