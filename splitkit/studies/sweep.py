"""Sweep over pipelines: plan and simulate every combination of stages, microbatches and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal

from torch import fx

from splitkit.checks import count, items_of, nbytes, shown
from splitkit.costs import Costs, Links
from splitkit.costs.host_room import Offload
from splitkit.costs.links import as_links
from splitkit.engine.split import with_origin
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.frontends.joint.joint_capture import Joint
from splitkit.graph.dataflow import Dataflow, analyze, require_graph
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, check_stage_optimizer
from splitkit.plans.checkpointed import checkpointed
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.prices import require_costs
from splitkit.studies.sweep_rows import Sweep, SweepRow
from splitkit.studies.sweep_training import TrainingSweeper, stages_a_rank
from splitkit.units import size

__all__ = ["MICROBATCHES", "STAGES", "Sweep", "SweepRow", "Sweeper", "combinations", "sweep"]

STAGES, MICROBATCHES = (2, 4, 8), (4, 8, 16)


def sweep(
    gm: fx.GraphModule | Joint,
    costs: Costs,
    *,
    stages: Sequence[int] = STAGES,
    microbatches: Sequence[int] = MICROBATCHES,
    schedules: Sequence[str] | None = None,
    memory: int | str | None = None,
    links: str | Links | None = None,
    optimizer: Literal["adam", "momentum", "sgd"] = "adam",
    recompute: bool | None = None,
    chunks: Sequence[int] | None = None,
    offload: Offload = None,
    host: int | str | None = None,
) -> Sweep:
    """Plan and simulate a training step for every combination of stages, microbatches and schedules.

    ::

        found = splitkit.sweep(gm, splitkit.costs.roofline(gm, "h200"), memory="80GiB", links="nvlink4")
        split = splitkit.split(gm, found.pareto[0].plan)

    `splitkit.policies.Stages` makes the stages: once for all schedules with one stage per rank, and again for each
    combination if ranks have several. Stages that exceed the memory limit are planned again for that schedule within
    the limit, unless the ranks need more than that on average. If a schedule does not support a combination, its row
    says why.

    For a joint graph, `splitkit.policies.Pipeline` makes each row: stages, and what each of them saves and recomputes,
    within the memory limit. Its rows also have the gap to a proven bound, and say which rank decides::

        joint = splitkit.capture_joint(model, *inputs_of_one_microbatch)
        found = splitkit.sweep(joint, splitkit.costs.roofline(joint.graph_module, "h100"), memory="80GiB")
        step = joint.split(found.pareto[0].plan)

    Args:
        gm: a forward graph or a joint graph, captured with the inputs of one microbatch.
        costs: the prices of its nodes.
        stages: the numbers of stages. Schedules with one stage per rank have as many ranks, others half as many.
        microbatches: the numbers of microbatches in a step.
        schedules: schedules as in `splitkit.simulate_schedule`. ``None``: those whose entry says so
            (`splitkit.pipeline.schedule.Schedule.swept`).
        memory: the bytes of each rank, as a number or a text (``"80GiB"``).
        links: the links between the ranks, or the name of a preset (``"nvlink4"``).
        optimizer: the optimizer whose state counts.
        recompute: whether all parts are recomputed in backward (``Part.call="checkpoint"``). The stages are planned
            without recompute, and not planned again for the memory limit. For a joint graph: whether stages may
            recompute what the memory limit requires, which is the default.
        chunks: of a joint graph, the numbers of stages on each rank. A schedule tries those that it takes; ``None``:
            one or two, as it usually has.
        offload: of a joint graph, the link of each rank to its host, over which stages may move saved values
            (``"pcie5"``); ``None`` offloads nothing.
        host: with ``offload``: the bytes that each rank may have on the host; ``None`` for any number.

    Raises:
        ScheduleError: SK330 for an unknown schedule.
        PlanError: SK207 for recompute of parts with effects.
        PolicyError: SK302 for invalid numbers.
        CostError: SK322 for unknown links.
    """
    if recompute is not None and not isinstance(recompute, bool):
        raise PolicyError("SK302", f"sweep: recompute={shown(recompute)}", "Use True or False.")
    if isinstance(gm, Joint):
        trainer = TrainingSweeper(gm, costs, memory, links, optimizer, recompute is not False, offload, host)
        rows = training_combinations(stages, microbatches, schedules, chunks)
        return trainer.sweep([trainer.row(*each) for each in rows])
    for name, given in {"chunks": chunks, "offload": offload, "host": host}.items():
        if given is not None:
            remedy = "Give the joint graph that splitkit.capture_joint returns."
            raise PolicyError("SK302", f"sweep: {name}={shown(given)} of a forward graph", remedy)
    sweeper = Sweeper(gm, costs, memory, links, optimizer, bool(recompute))
    return sweeper.sweep([sweeper.row(*each) for each in combinations(stages, microbatches, schedules)])


def combinations(
    stages: Sequence[int], microbatches: Sequence[int], schedules: Sequence[str] | None = None
) -> list[tuple[int, str, int]]:
    """Return stages, schedule and microbatches of each row.

    Raises:
        ScheduleError: SK330 for an unknown schedule.
        PolicyError: SK302 for numbers that are not whole or not positive, and if there is nothing to combine.
    """
    stages, microbatches = _counts("stages", stages), _counts("microbatches", microbatches)
    usual = tuple(schedule.word for schedule in known_schedules() if schedule.swept)
    schedules = usual if schedules is None else schedules
    if not items_of(schedules):
        raise PolicyError("SK302", f"sweep: schedules={shown(schedules)}", f"Give several: {usual!r}.")
    for schedule in schedules:
        schedule_named(schedule)
    return list(dict.fromkeys(product(stages, schedules, microbatches)))


def training_combinations(
    stages: Sequence[int],
    microbatches: Sequence[int],
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
) -> list[tuple[int, str, int, int | None]]:
    """Return stages, schedule, microbatches and stages on each rank of each row; errors as in `combinations`."""
    each = combinations(stages, microbatches, schedules)
    return [(*one, here) for one in each for here in stages_a_rank(one[1], chunks)]


def _counts(what: str, numbers: Sequence[int]) -> list[int]:
    if not items_of(numbers):
        raise PolicyError("SK302", f"sweep: {what}={shown(numbers)}", "Give whole numbers >= 1: (2, 4, 8).")
    return [count("sweep", what, number) for number in numbers]


@dataclass(frozen=True, eq=False)
class Sweeper:
    """Computes the rows of one graph, and reuses stages between rows.

    Attributes:
        gm: the graph. All attributes are as in `sweep`.
        costs: the prices of its nodes.
        memory: the bytes of each rank.
        links: the links between ranks.
        optimizer: the optimizer whose state counts.
        recompute: whether backward runs all parts again.
    """

    gm: fx.GraphModule
    costs: Costs
    memory: int | str | None = None
    links: str | Links | None = None
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    recompute: bool = False
    _known: dict[object, tuple[Plan, tuple[StageCosts, ...]]] = field(default_factory=dict, init=False, repr=False)
    _fitted: dict[object, Plan | str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require_graph(self.gm)
        require_costs(self.costs)
        as_links(self.links)
        _ = self._limit  # raises if the memory makes no sense
        check_stage_optimizer(self.optimizer)
        if self.optimizer is None:
            raise PolicyError(
                "SK302", "sweep: the optimizer is None", "These schedules are for training: name an optimizer."
            )

    def row(self, stages: int, schedule: str, microbatches: int) -> SweepRow:
        """Plan and simulate one combination."""
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
        if self.recompute:
            return SweepRow(stages, microbatches, schedule, plan, run, False, f"{size(max(run.peaks))} on a rank")
        within = self._within(stages, schedule, microbatches, run)
        if isinstance(within, str):
            return SweepRow(stages, microbatches, schedule, plan, run, False, within)
        run = self._run(self._prices.of(within), schedule, microbatches)
        return SweepRow(stages, microbatches, schedule, within, run, True)

    def sweep(self, rows: Sequence[SweepRow]) -> Sweep:
        """Return a sweep of the given rows."""
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
        """Return stages without a memory limit.

        With one stage per rank they depend only on the number of stages and, with links, on the ranks, so they are
        reused. With several, the simulated step decides, so they depend on the whole combination.
        """
        ranks = pipeline_order(schedule, stages, microbatches).rank_of
        several = len({*ranks}) < len(ranks)
        key = (stages, schedule, microbatches) if several else (stages, None if self.links is None else ranks)
        known = self._known.get(key)
        made = self._made(known and known[0], stages, schedule, microbatches, None)
        plan = checkpointed(made) if self.recompute else made
        if known is None:
            known = self._known[key] = made, self._prices.of(plan)
        return plan, known[1]

    def _within(self, stages: int, schedule: str, microbatches: int, run: ScheduleRun) -> Plan | str:
        """Return stages that fit the memory, or why there are none; reused for runs with the same peaks."""
        key = (stages, schedule, run.peaks)
        known = self._fitted.get(key)
        if isinstance(known, str):
            return known
        try:
            self._fitted[key] = self._made(known, stages, schedule, microbatches, self._limit)
        except NoPlanError as error:
            self._fitted[key] = error.reason.removeprefix("Stages: ")
        return self._fitted[key]

    def _made(self, known: Plan | None, stages: int, schedule: str, microbatches: int, memory: int | None) -> Plan:
        """Return a plan for a schedule: the stages of the known one, if there is one."""
        policy = Stages(stages, schedule, microbatches, memory, self.links, self.optimizer)
        flow, costs = self._flow, self.costs
        found = policy.assign(flow, costs) if known is None else policy.retold(known, flow, costs)
        return with_origin(found, policy, flow, costs)

    def _run(self, costs: Sequence[StageCosts], schedule: str, microbatches: int) -> ScheduleRun:
        return simulate_schedule(costs, schedule, microbatches, links=as_links(self.links))
