"""Stages x microbatches x schedules: each pipeline planned and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal

from torch import fx

from splitkit.checks import count, items_of, nbytes, shown
from splitkit.costs import Costs, Links
from splitkit.costs.links import links_of
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.graph.dataflow import Dataflow, analyze, require_graph
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.pipeline.stageprices import StagePrices, checked_optimizer
from splitkit.pipeline.torch_orders import pipeline_order
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.prices import require_costs
from splitkit.studies.sweeprows import Sweep, SweepRow
from splitkit.units import size

__all__ = ["MICROBATCHES", "SCHEDULES", "STAGES", "Sweep", "SweepRow", "Sweeper", "combinations", "sweep"]

STAGES, MICROBATCHES = (2, 4, 8), (4, 8, 16)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")


def sweep(
    gm: fx.GraphModule,
    costs: Costs,
    *,
    stages: Sequence[int] = STAGES,
    microbatches: Sequence[int] = MICROBATCHES,
    schedules: Sequence[str] = SCHEDULES,
    memory: int | str | None = None,
    links: str | Links | None = None,
    optimizer: Literal["adam", "momentum", "sgd"] = "adam",
) -> Sweep:
    """Plan and simulate a training step of every combination.

    ::

        found = splitkit.sweep(gm, splitkit.costs.roofline(gm, "h200"), memory="80GiB", links="nvlink4")
        split = splitkit.split(gm, found.pareto[0].plan)

    Stages are those of `splitkit.policies.Stages`, found once for all schedules that put one stage on each rank, and
    for each combination where ranks have several. Where they do not fit the memory, they are found again for that
    schedule within it, unless the ranks hold more than that on average. A combination that a schedule refuses is a row
    that says why.

    Args:
        gm: a forward graph, captured with the inputs of one microbatch.
        costs: prices of its nodes.
        stages: numbers of stages. GPipe and 1F1B have a rank for each, the other schedules one for two.
        microbatches: numbers of microbatches of a step.
        schedules: as `splitkit.simulate_schedule` knows them.
        memory: bytes of each rank, as a number or a text (``"80GiB"``).
        links: between the ranks, or the name of a preset (``"nvlink4"``).
        optimizer: whose state is held.

    Raises:
        ScheduleError: SK330 for a schedule that is not known.
        PolicyError: SK302 for numbers that make no sense.
        CostError: SK322 for links that are not known.
    """
    sweeper = Sweeper(gm, costs, memory, links, optimizer)
    return sweeper.sweep([sweeper.row(*each) for each in combinations(stages, microbatches, schedules)])


def combinations(
    stages: Sequence[int], microbatches: Sequence[int], schedules: Sequence[str]
) -> list[tuple[int, str, int]]:
    """Stages, schedule and microbatches of each row.

    Raises:
        ScheduleError: SK330 for a schedule that is not known.
        PolicyError: SK302 for what is no whole number above zero, and where there is nothing to combine.
    """
    stages, microbatches = _counts("stages", stages), _counts("microbatches", microbatches)
    if not items_of(schedules):
        raise PolicyError("SK302", f"sweep: schedules={shown(schedules)}", f"Give several: {SCHEDULES!r}.")
    for schedule in schedules:
        pipeline_order(schedule, 2, 2)  # all go with these
    return list(dict.fromkeys(product(stages, schedules, microbatches)))


def _counts(what: str, numbers: Sequence[int]) -> list[int]:
    if not items_of(numbers):
        raise PolicyError("SK302", f"sweep: {what}={shown(numbers)}", "Give whole numbers >= 1: (2, 4, 8).")
    return [count("sweep", what, number) for number in numbers]


@dataclass(frozen=True, eq=False)
class Sweeper:
    """Makes the rows of one graph, and makes stages once.

    Attributes:
        gm: as in `sweep`, like all that follow.
        costs: of its nodes.
        memory: of each rank.
        links: between ranks.
        optimizer: whose state is held.
    """

    gm: fx.GraphModule
    costs: Costs
    memory: int | str | None = None
    links: str | Links | None = None
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    _known: dict[object, tuple[Plan, tuple[StageCosts, ...]]] = field(default_factory=dict, init=False, repr=False)
    _fitted: dict[object, Plan | str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require_graph(self.gm)
        require_costs(self.costs)
        links_of(self.links)
        _ = self._limit  # checked
        checked_optimizer(self.optimizer)
        if self.optimizer is None:
            raise PolicyError("SK302", "sweep: the optimizer is None", "These schedules train: name an optimizer.")

    def row(self, stages: int, schedule: str, microbatches: int) -> SweepRow:
        """One combination."""
        try:
            plan, costs = self._common(stages, schedule, microbatches)
        except (ScheduleError, NoPlanError) as error:
            return SweepRow(stages, microbatches, schedule, why=f"{error.reason}. {error.remedy}")
        run = self._run(costs, schedule, microbatches)
        if self._limit is None or max(run.peaks) <= self._limit:
            return SweepRow(stages, microbatches, schedule, plan, run, None if self._limit is None else True)
        if sum(run.peaks) > self._limit * run.ranks:
            why = f"{size(sum(run.peaks) / run.ranks)} a rank on average"
            return SweepRow(stages, microbatches, schedule, plan, run, False, why)
        within = self._within(stages, schedule, microbatches, run)
        if isinstance(within, str):
            return SweepRow(stages, microbatches, schedule, plan, run, False, within)
        run = self._run(self._prices.of(within), schedule, microbatches)
        return SweepRow(stages, microbatches, schedule, within, run, True)

    def sweep(self, rows: Sequence[SweepRow]) -> Sweep:
        """Rows together."""
        return Sweep(tuple(rows), self._limit, getattr(self.costs, "note", ""))

    @cached_property
    def _flow(self) -> Dataflow:
        return analyze(self.gm)

    @cached_property
    def _prices(self) -> StagePrices:
        return StagePrices(self._flow, self.costs, self.optimizer)

    @cached_property
    def _limit(self) -> int | None:
        return None if self.memory is None else nbytes("sweep", "memory", self.memory)

    def _common(self, stages: int, schedule: str, microbatches: int) -> tuple[Plan, tuple[StageCosts, ...]]:
        """Stages without a limit.

        Where a rank has one stage, they depend on the ranks alone, and without links not even on these. Where it has
        several, the simulated step decides.
        """
        ranks = pipeline_order(schedule, stages, microbatches).rank_of
        several = len({*ranks}) < len(ranks)
        key = (stages, schedule, microbatches) if several else (stages, None if self.links is None else ranks)
        if key not in self._known:
            plan = self._plan(stages, schedule, microbatches, None)
            self._known[key] = plan, self._prices.of(plan)
        return self._known[key]

    def _within(self, stages: int, schedule: str, microbatches: int, run: ScheduleRun) -> Plan | str:
        """Stages that fit the memory, or why there are none; the same for as much in flight."""
        key = (stages, schedule, run.peaks)
        if key not in self._fitted:
            try:
                self._fitted[key] = self._plan(stages, schedule, microbatches, self._limit)
            except NoPlanError as error:
                self._fitted[key] = error.reason.removeprefix("Stages: ")
        return self._fitted[key]

    def _plan(self, stages: int, schedule: str, microbatches: int, memory: int | None) -> Plan:
        policy = Stages(stages, schedule, microbatches, memory, self.links, self.optimizer)
        return policy.assign(self._flow, self.costs)

    def _run(self, costs: Sequence[StageCosts], schedule: str, microbatches: int) -> ScheduleRun:
        return simulate_schedule(costs, schedule, microbatches, links=links_of(self.links))
