"""The rows of a sweep over pipelines of a training step: each is planned by `Pipeline` and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from splitkit.checks import count, items_of, nbytes, shown
from splitkit.costs import Costs, Links
from splitkit.costs.host_room import Offload, require_offload, require_seconds
from splitkit.costs.links import as_links
from splitkit.engine.split import with_origin
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.frontends.joint.joint_capture import Joint
from splitkit.pipeline.schedules import schedule_named
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.policies.pipeline import Pipeline
from splitkit.prices import Optimizer, require_costs
from splitkit.search.pipelines.planned_pipeline import PlannedPipeline
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.studies.sweep_rows import Sweep, SweepRow
from splitkit.units import size


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
class TrainingSweeper:
    """Plans the rows of one joint graph.

    Every row is the plan that `Pipeline` makes for it alone.

    Attributes:
        joint: the joint graph, captured with the inputs of one microbatch.
        costs: the prices of its nodes.
        memory: the bytes of each rank.
        links: the links between ranks.
        optimizer: the optimizer whose state counts.
        recompute: whether stages may recompute.
        offload: the link of each rank to its host; ``None`` offloads nothing.
        host: the bytes that each rank may have there.
    """

    joint: Joint
    costs: Costs
    memory: int | str | None = None
    links: str | Links | None = None
    optimizer: Optimizer = "adam"
    recompute: bool = True
    offload: Offload = None
    host: int | str | None = None
    _problems: dict[bool, StageProblems] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require_costs(self.costs)
        as_links(self.links)
        check_stage_optimizer(self.optimizer)
        if self.optimizer is None:
            raise PolicyError(
                "SK302", "sweep: the optimizer is None", "These schedules are for training: name an optimizer."
            )
        require_offload("sweep", self.offload, self.host, "sweep(joint, costs, ")
        if self.offload is not None:
            require_seconds(self.costs)
        _ = self._limit  # raises if the memory makes no sense

    @cached_property
    def _limit(self) -> int | None:
        return None if self.memory is None else nbytes("sweep", "memory", self.memory)

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
        plan = with_origin(found.plan, policy, self.joint.flow, self.costs)
        fits = None if self._limit is None else True
        return SweepRow(stages, microbatches, schedule, plan, found.run, fits, "", chunks, policy, _decides(found))

    def sweep(self, rows: Sequence[SweepRow]) -> Sweep:
        """Return a sweep of the given rows."""
        return Sweep(tuple(rows), self._limit, getattr(self.costs, "note", ""))

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
            self._problems[divided] = policy.problems(self.joint.flow, self.costs)
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
