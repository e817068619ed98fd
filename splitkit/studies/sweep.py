"""Sweep over pipelines: plan and simulate every combination of stages, microbatches and schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

from splitkit.checks import count, items_of, nbytes, shown
from splitkit.costs import Costs, Links
from splitkit.costs.links import Offload, as_links, require_offload, require_seconds
from splitkit.display import Shown
from splitkit.engine.split import with_origin
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.frontends.joint_capture import Joint
from splitkit.graph.dataflow import Dataflow, analyze, require_graph
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, check_stage_optimizer
from splitkit.plans.record import Plan, checkpointed
from splitkit.policies import Stages
from splitkit.policies.pipeline import Pipeline
from splitkit.prices import require_costs
from splitkit.search.pipelines.joint_positions import PlannedPipeline
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.short_repr import brief
from splitkit.units import duration, measure, size
from splitkit.view.renderers import Picture, pictured
from splitkit.view.svg.scatter import ScatterDrawing, ScatterPoint
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


__all__ = ["MICROBATCHES", "STAGES", "Sweep", "SweepRow", "Sweeper", "combinations", "sweep"]

STAGES, MICROBATCHES = (2, 4, 8), (4, 8, 16)  # that a sweep tries unless told otherwise


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
class RowPlanner:
    """What a sweep plans its rows by.

    Attributes:
        gm: the graph, or the joint graph. All attributes are as in `sweep`.
        costs: the prices of its nodes.
        memory: the bytes of each rank.
        links: the links between ranks.
        optimizer: the optimizer whose state counts.
        recompute: whether backward runs all parts again, or of a joint graph whether stages may recompute.
    """

    gm: Any
    costs: Costs
    memory: int | str | None = None
    links: str | Links | None = None
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    recompute: bool = False

    def __post_init__(self) -> None:
        require_costs(self.costs)
        as_links(self.links)
        _ = self._limit  # raises if the memory makes no sense
        check_stage_optimizer(self.optimizer)
        if self.optimizer is None:
            raise PolicyError(
                "SK302", "sweep: the optimizer is None", "These schedules are for training: name an optimizer."
            )

    def sweep(self, rows: Sequence[SweepRow]) -> Sweep:
        """Return a sweep of the given rows."""
        return Sweep(tuple(rows), self._limit, getattr(self.costs, "note", ""))

    @cached_property
    def _limit(self) -> int | None:
        return None if self.memory is None else nbytes("sweep", "memory", self.memory)


@dataclass(frozen=True, eq=False)
class Sweeper(RowPlanner):
    """Computes the rows of one graph, and reuses stages between rows."""

    _known: dict[object, tuple[Plan, tuple[StageCosts, ...]]] = field(default_factory=dict, init=False, repr=False)
    _fitted: dict[object, Plan | str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require_graph(self.gm)
        super().__post_init__()

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

    @cached_property
    def _flow(self) -> Dataflow:
        return analyze(self.gm)

    @cached_property
    def _prices(self) -> StagePrices:
        return StagePrices(self._flow, self.costs, self.optimizer)

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


# The rows of a sweep over pipelines of a training step: each is planned by `Pipeline` and simulated.


def stages_a_rank(schedule: str, chunks: Sequence[int] | None) -> list[int | None]:
    """Return those numbers of stages on a rank that a schedule takes; ``None`` for its usual one.

    If it takes none of ``chunks``, all of them are returned, and their rows say why they are refused.

    Raises:
        ScheduleError: SK330 for an unknown schedule.
        PolicyError: SK302 for numbers that are not whole or not positive.
    """
    own = schedule_named(schedule).stages_per_rank
    if chunks is None:
        return [None]
    if not items_of(chunks):
        raise PolicyError("SK302", f"sweep: chunks={shown(chunks)}", "Give whole numbers >= 1: (1, 2).")
    given = list(dict.fromkeys(count("sweep", "chunks", number) for number in chunks))
    return [own] if own in given else [*given]


@dataclass(frozen=True, eq=False)
class TrainingSweeper(RowPlanner):
    """Plans the rows of one joint graph, which was captured with the inputs of one microbatch.

    Every row is the plan that `Pipeline` makes for it alone.

    Attributes:
        offload: the link of each rank to its host; ``None`` offloads nothing.
        host: the bytes that each rank may have there.
    """

    recompute: bool = True
    offload: Offload = None
    host: int | str | None = None
    _problems: dict[bool, StageProblems] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_offload("sweep", self.offload, self.host, "sweep(joint, costs, ")
        if self.offload is not None:
            require_seconds(self.costs)

    def row(self, stages: int, schedule: str, microbatches: int, chunks: int | None = None) -> SweepRow:
        """Plan and simulate one combination.

        Args:
            stages: the number of stages.
            schedule: the name of the schedule.
            microbatches: of a step.
            chunks: the number of stages on each rank; ``None``: as the schedule usually has.
        """
        try:
            policy = self._policy(stages, schedule, microbatches, chunks)
            found = policy.found(self._problems_of(policy))
        except (ScheduleError, NoPlanError) as error:
            excess = getattr(error, "excess", 0)
            needs = None if not excess or self._limit is None else self._limit + excess
            why, fits = f"{error.reason}. {error.remedy}", None if needs is None else False
            return SweepRow(stages, microbatches, schedule, None, None, fits, why, chunks, needs=needs)
        plan = with_origin(found.plan, policy, self.gm.flow, self.costs)
        fits = None if self._limit is None else True
        return SweepRow(stages, microbatches, schedule, plan, found.run, fits, "", chunks, policy, _decides(found))

    def _policy(self, stages: int, schedule: str, microbatches: int, chunks: int | None) -> Pipeline:
        own = schedule_named(schedule).stages_per_rank
        ranks = None if chunks in (None, own) else -(-stages // (chunks or 1))
        if ranks is not None and ranks * (chunks or 1) != stages:
            text = f"{stages} stages are not {chunks} on each rank"
            raise ScheduleError("SK330", text, f"Use a multiple of {chunks} stages.")
        given = self.memory, self.links, self.recompute, self.optimizer
        return Pipeline(stages, schedule, microbatches, *given, ranks, self.offload, self.host)

    def _problems_of(self, policy: Pipeline) -> StageProblems:
        """Return the problems of all stages, which rows share; they depend on how backward is divided alone."""
        divided = schedule_named(policy.schedule).divided
        if divided not in self._problems:
            self._problems[divided] = policy.problems(self.gm.flow, self.costs)
        return self._problems[divided]


def _decides(found: PlannedPipeline) -> str:
    """Return which rank paces the step, and whose memory makes stages recompute or offload, if any does."""
    run, limits = found.run, found.limits
    text = f"rank {run.busiest_rank}"
    if not any(found.recompute) and not found.plan.offloaded:
        return text
    full = max(range(run.ranks), key=lambda rank: run.peaks[rank] / (limits[rank] or max(run.peaks) * 2))
    limit = limits[full]
    return text if limit is None else f"{text}; memory of rank {full}: {size(run.peaks[full])} of {size(limit)}"


# The rows of a sweep over pipelines, the best of them, and their table and picture.


_MOST_PLANS = 24
"""The most plans that a page of a sweep draws, the best first: each takes 10 to 50 KB."""

_TITLES = ("stages", "ranks", "schedule", "microbatches", "each", "bubble", "peak", "fits", "best")
_TRAINING_TITLES = (*_TITLES[:7], "gap", "decides", *_TITLES[7:])


@dataclass(frozen=True, eq=False)
class SweepRow:
    """One combination of stages, microbatches and schedule.

    Attributes:
        stages: the number of stages.
        microbatches: the number of microbatches in a step.
        schedule: the name of the schedule, as it was given.
        plan: the stages; ``None`` if there is no such pipeline.
        run: the simulated step; ``None`` if there is no such pipeline.
        fits: whether the peak of every rank is within the memory; ``None`` without a limit, or without a pipeline.
        why: the reason against the combination: the schedule, the graph or the memory.
        chunks: the number of stages on each rank, if it was asked for.
        policy: of a training step in stages, the `Pipeline` that makes the plan.
        decides: of a training step in stages, the rank that paces the step, and the memory that makes it recompute.
        needs: of a training step in stages that does not fit: bytes of each rank for which a plan was found.
    """

    stages: int
    microbatches: int
    schedule: str
    plan: Plan | None = None
    run: ScheduleRun | None = None
    fits: bool | None = None
    why: str = ""
    chunks: int | None = None
    policy: Pipeline | None = None
    decides: str = ""
    needs: int | None = None

    __repr__ = brief

    @property
    def gap(self) -> float | None:
        """The part of the step by which a better plan could be shorter, as far as is proven; of a training step."""
        return None if self.policy is None or self.plan is None or self.plan.claim is None else self.plan.claim.gap

    @property
    def numbers(self) -> tuple[float, int, int]:
        """The three numbers to minimise: seconds per microbatch, peak of the fullest rank, ranks.

        Seconds are rounded to nine digits, so that rounding in sums does not decide.
        """
        if self.run is None:
            raise ValueError(f"nothing runs: {self.why}")
        return float(f"{self.run.seconds / self.microbatches:.9g}"), max(self.run.peaks), self.run.ranks

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, without its plan and timeline."""
        of = self.run
        each, peak, ranks = (None, None, None) if of is None else self.numbers
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "ranks": ranks,
            "seconds": of and of.seconds,
            "seconds_per_microbatch": each,
            "bubble": of and of.bubble,
            "peak": peak,
            "limiting_rank": of and of.limiting_rank,
            "fits": self.fits,
            "why": self.why,
            **self._proven(),
        }

    def _proven(self) -> dict[str, Any]:
        claim = self.plan.claim if self.policy is not None and self.plan is not None else None
        if claim is None:
            return {"chunks": self.chunks, "needs": self.needs} if self.chunks or self.needs else {}
        on_host = max(self.run.host_peaks) if self.run is not None else 0
        told = {"chunks": self.chunks, "bound": claim.bound, "gap": claim.gap, "decides": self.decides}
        return told | ({"host": on_host} if self.policy is not None and self.policy.offload is not None else {})


@dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """All combinations; in a notebook, a picture of peak against time and a table.

    Attributes:
        rows: the rows, in the order of stages, schedules, microbatches.
        memory: the bytes of every rank; ``None`` for no limit.
        note: the note of the prices.
    """

    rows: tuple[SweepRow, ...]
    memory: int | None = None
    note: str = ""

    __repr__ = brief

    @cached_property
    def pareto(self) -> tuple[SweepRow, ...]:
        """The rows that fit and are not dominated in time per microbatch, peak and ranks; the fastest comes first.

        Of equal rows only the first is here.
        """
        fine = {row.numbers: row for row in reversed(self.rows) if row.run is not None and row.fits is not False}
        return tuple(fine[one] for one in sorted(fine) if not any(_beats(other, one) for other in fine))

    def to_dict(self) -> dict[str, Any]:
        """Return all rows as plain data; ``pareto`` marks the best."""
        best = set(self.pareto)
        rows = [row.to_dict() | {"pareto": row in best} for row in self.rows]
        return {"prices": self.note, "memory": self.memory, "rows": rows}

    @property
    def refused(self) -> tuple[str, ...]:
        """The reasons against rows, each once, with its first row."""
        reasons = {row.why: row for row in reversed(self.rows) if row.why}
        return tuple(
            f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches: {why}"
            for why, row in reversed(reasons.items())
        )

    def table(self) -> Table:
        """Return all rows as a table for `rich`; ``each`` is the time per microbatch."""
        limit = f"{size(self.memory)} a rank" if self.memory is not None else ""
        titles = _TRAINING_TITLES if self.trains else _TITLES
        right = [title for title in titles if title not in ("schedule", "decides", "fits", "best")]
        note = "; ".join(filter(None, (self.note, limit)))
        return table(
            titles, self._cells(), right, note, least=dict.fromkeys(titles, 1), spare=("bubble", "ranks", "decides")
        )

    @property
    def trains(self) -> bool:
        """Whether the rows are of a training step in stages."""
        return any(row.policy is not None or row.needs is not None for row in self.rows)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        best = set(self.pareto)
        for row in self.rows:
            head = (str(row.stages), "-", row.schedule, str(row.microbatches))
            if row.run is None:
                yield (*head, *["-"] * (5 if self.trains else 3), "-" if row.fits is None else "no", "")
                continue
            each, peak, ranks = row.numbers
            times: tuple[str, ...] = (duration(each, row.run.unit), f"{row.run.bubble:.1%}", size(peak))
            if self.trains:
                times = (*times, "-" if row.gap is None else f"{row.gap:.1%}", row.decides)
            fits = "" if row.fits is None else "yes" if row.fits else "no"
            yield (head[0], str(ranks), *head[2:], *times, fits, "best" if row in best else "")

    def __str__(self) -> str:
        from splitkit.view.console import to_text

        return "\n".join([to_text(self.table()), *self.refused])


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@pictured.register
def _sweep(sweep: Sweep) -> Picture:
    ran = [row for row in sweep.rows if row.run is not None]
    best = sweep.pareto
    unit = next((row.run.unit for row in ran if row.run), "s")
    schedules = list(dict.fromkeys(row.schedule for row in ran))

    plans = [] if sweep.trains else _drawn_plans([*best, *ran])
    anchors = {id(plan.places): f"plan-{number}" for number, plan in enumerate(plans)}

    def spot(row: SweepRow, links: bool = False) -> ScatterPoint:
        each, peak, ranks = row.numbers
        told = f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches on {ranks} "
        told += f"rank{'s' if ranks > 1 else ''}: {duration(each, unit)} a microbatch, peak {size(peak)}"
        link = anchors.get(id(row.plan.places), "") if links and row.plan is not None else ""
        name = _short_name(row) if row in best else ""
        return ScatterPoint(peak, each, name, told, row in best, schedules.index(row.schedule), link)

    def svg(links: bool = False) -> str:
        found = "the best are named: schedule, stages×microbatches" if best else "none fits the memory"
        title = f"{len(ran)} pipelines; {found}"
        axes = "peak of the fullest rank (bytes)", f"{measure(unit)} of a microbatch"
        spots = [spot(row, links) for row in ran]
        return ScatterDrawing(title, axes, [], spots, unit, schedules, sweep.memory).to_svg()

    def page() -> tuple[str, str]:
        return svg(True), "".join(_section(plan, anchors[id(plan.places)], ran) for plan in plans)

    return Picture("sweep", svg, lambda: [sweep.table()], notes=sweep.refused, page=page)


def _drawn_plans(rows: Sequence[SweepRow]) -> list[Plan]:
    """Return the plans that a page draws below the picture, the best first; several rows may have the same stages."""
    found: dict[int, Plan] = {}
    for row in rows:
        if row.plan is not None:
            found.setdefault(id(row.plan.places), row.plan)
    return list(found.values())[:_MOST_PLANS]


def _short_name(row: SweepRow) -> str:
    return f"{row.schedule} {row.stages}×{row.microbatches}"


def _section(plan: Plan, anchor: str, rows: Sequence[SweepRow]) -> str:
    """Return the picture of a plan, which the dots of its rows link to."""
    told = ", ".join(_short_name(row) for row in rows if row.plan is not None and row.plan.places is plan.places)
    return f'<section id="{anchor}">{pictured(plan).inside(told)}</section>'
