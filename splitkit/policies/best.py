"""The policy `Best`: run several policies, measure all plans alike, and return the best."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

from splitkit.checks import Memory, count, is_whole, memory_of, seconds, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import as_links
from splitkit.errors import NoPlanError, PlanError, PolicyError, ScheduleError, SplitError
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.purpose import counted_optimizer, ranks_of, require_schedule
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.plans.parts import Claim
from splitkit.plans.policy import PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.policies.expert import Expert
from splitkit.policies.stages import Stages
from splitkit.prices import Optimizer, unit_of
from splitkit.search.plan_figures import Scoring, StageFigures
from splitkit.search.request import StageRequest
from splitkit.short_repr import options
from splitkit.units import duration, size

_NEAR = 1e-9  # relative: loads that are equal but for rounding


@dataclass(frozen=True)
class Best:
    """Return the best plan of several policies, all measured in the same way; a policy that finds no plan is skipped.

    A plan is scored as a pipeline of its parts, in the order in which they run (visits to one device count together). A
    plan that does not fit ``memory`` is rejected. The lowest bottleneck wins, then the shortest simulated step (with a
    schedule), the lowest peak (with a schedule or memory), the least traffic, and the policy that is listed first.
    Policies get the prices that score the plans: with a schedule, prices of forward and backward.

    Policies run in the given order until the time limit. The first one always runs, and none is interrupted. The note
    lists the result of each. The plan is reproducible if the time suffices.

    The claim is the load of the winner; its bound is the best bound that any of the policies proves for the same
    problem.

    Attributes:
        policies: the policies, or anything else that `splitkit.plan` accepts (functions, mappings, plans). A number
            ``n`` stands for ``Stages(n)`` and ``Expert(n)`` with the same links, memory and schedule.
        seconds: the time after which no further policy is started.
        schedule: the schedule of the pipeline, as in `Stages`.
        microbatches: the number of microbatches in a step, two per part by default.
        memory: the bytes of each rank, as in `Stages`.
        links: the links between the ranks ``0, 1 ...``, as in `Stages`.
        optimizer: the optimizer whose state counts, as in `Stages`.
    """

    policies: int | Sequence[PolicyLike]
    seconds: float = 60.0
    schedule: str | None = None
    microbatches: int | None = None
    memory: Memory = None
    links: str | Links | None = None
    optimizer: Optimizer = None

    def __post_init__(self) -> None:
        if is_whole(self.policies):
            settle(self, "policies", count)
        policies: object = self.policies
        if isinstance(policies, str) or not isinstance(policies, int | Sequence) or policies in ((), []):
            raise PolicyError(
                "SK302", f"Best: policies is {policies!r}", "List at least one, or give a number of stages."
            )
        seconds(self, "seconds", self.seconds, zero=True)
        as_links(self.links)
        check_stage_optimizer(self.optimizer)
        if isinstance(policies, int):
            self._portfolio()
        else:  # the number of stages is known only once there are plans
            several = isinstance(self.memory, Sequence) and not isinstance(self.memory, str | bytes)
            memory_of(self, self.memory, len(self.memory) if several else 1)  # type: ignore[arg-type]
            require_schedule(self, self.schedule, self.microbatches if self.schedule is None else None, 2)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return the winner's plan, with its own part keys.

        Raises:
            NoPlanError: SK303 if every policy refuses or exceeds the memory; it lists the reasons.
        """
        links = as_links(self.links)
        optimizer = counted_optimizer(self.optimizer, self.schedule, costs)
        scoring = Scoring(
            StageRequest(self, flow, costs, self.schedule, self.microbatches, self.memory, links, optimizer)
        )
        entries: list[_Entry] = []
        start = time.monotonic()
        for policy in self._portfolio():
            late = bool(entries) and time.monotonic() - start >= self.seconds
            entries.append(_Entry(policy, scoring) if late else _tried(policy, scoring))
        fitting = [entry for entry in entries if entry.fits]
        if not fitting:
            raise self._nothing(entries)
        least = min(entry.made[1].value for entry in fitting) * (1 + _NEAR)
        winner = min((entry for entry in fitting if entry.made[1].value <= least), key=lambda entry: entry.ties)
        return self._described(winner, entries)

    def _portfolio(self) -> Sequence[PolicyLike]:
        n = self.policies
        if not isinstance(n, int):
            return n
        stages = Stages(n, self.schedule, self.microbatches, self.memory, self.links, self.optimizer, tolerance=0)
        return stages, Expert(n)

    def _described(self, winner: _Entry, entries: Sequence[_Entry]) -> Plan:
        plan, figures = winner.made
        proofs = [(claim.bound, claim.tolerance, entry) for entry in entries if (claim := self._shared(entry, winner))]
        bound, tolerance, prover = max(
            proofs, key=lambda proof: (proof[0], proof[2] is winner), default=(0.0, _NEAR, winner)
        )
        least = winner.scoring.least(len(figures.loads))
        if least >= bound:
            bound, tolerance, prover = least, _NEAR, winner
        solver = winner.solver if prover is winner else f"{winner.solver}; {prover.solver}"
        claim = Claim("bottleneck", figures.value, min(bound, figures.value), solver, figures.limiting, tolerance)
        listed = "; ".join(map(str, entries))
        return replace(plan, note=f"best of {len(entries)}. {claim}; {listed}", claim=claim)

    def _shared(self, entry: _Entry, winner: _Entry) -> Claim | None:
        """Return a policy's claim if its bound holds for the winner: same number of convex parts, no other constraints.

        A problem with fewer constraints (no links, no memory, forward only) is a relaxation, so its bound holds too.
        """
        policy, claim = entry.policy, entry.plan.claim if entry.plan is not None else None
        if claim is None or claim.objective != "bottleneck" or not isinstance(policy, Stages):
            return None
        plan, figures = winner.made
        if not policy.n == len(figures.loads) == len(plan.parts):  # a device with several parts has no convex one
            return None
        if as_links(policy.links) not in (None, as_links(self.links)):
            return None
        if policy.schedule not in (None, self.schedule):
            return None
        if policy.links is not None and (
            ranks_of(policy.schedule, None, policy.n) != ranks_of(self.schedule, None, policy.n)
        ):
            return None  # messages between stages of one rank are free
        if policy.memory is not None:
            optimizer = counted_optimizer(policy.optimizer, policy.schedule, entry.scoring.demand.prices)
            held = (policy.memory, policy.microbatches, optimizer)
            if held != (self.memory, self.microbatches, entry.scoring.demand.optimizer):
                return None
        return claim

    def _nothing(self, entries: Sequence[_Entry]) -> NoPlanError:
        reasons = "; ".join(map(str, entries))
        remedy = next((entry.remedy for entry in entries if entry.remedy), "")
        return NoPlanError("SK303", f"Best: none of {len(entries)} policies has a plan: {reasons}", remedy)


@dataclass(frozen=True, eq=False)
class _Entry:
    """A policy and its result: a plan, an error, or neither if the time was over.

    Attributes:
        policy: the policy as given.
        scoring: the common measure.
        plan: the plan that it made.
        figures: what the plan costs by the common measure.
        error: the error if it made no plan.
    """

    policy: PolicyLike
    scoring: Scoring
    plan: Plan | None = None
    figures: StageFigures | None = None
    error: SplitError | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits the memory."""
        return self.figures is not None and not self.scoring.missing(self.figures)

    @property
    def made(self) -> tuple[Plan, StageFigures]:
        """The plan and what it costs."""
        assert self.plan is not None and self.figures is not None
        return self.plan, self.figures

    @property
    def ties(self) -> tuple[float, int, int]:
        """Simulated step, peak and traffic, which decide between equal loads."""
        figures = self.made[1]
        return figures.step or 0.0, max(figures.peaks, default=0), figures.traffic

    @property
    def solver(self) -> str:
        """The policy, and the solver that its claim names."""
        claim = self.plan.claim if self.plan is not None else None
        return _name(self.policy) if claim is None else f"{_name(self.policy)} by {claim.solver}"

    @property
    def remedy(self) -> str:
        """What would help if there is no plan that fits."""
        if self.figures is not None:
            peak = max(self.figures.peaks)
            return f"Give each rank {peak} bytes ({size(peak)}): the plan of {_name(self.policy)} then fits."
        return self.error.remedy if self.error is not None else ""

    def __str__(self) -> str:
        if self.error is not None:
            return f"{_name(self.policy)}: {self.error.code}, {self.error.reason}"
        if self.figures is None:
            return f"{_name(self.policy)}: skipped, the time was over"
        step, peak, _ = self.ties
        unit, missing = unit_of(self.scoring.demand.costs), self.scoring.missing(self.figures)
        words = [duration(self.figures.value, unit)]
        words += [f"step {duration(step, unit)}"] if step else []
        words += [f"peak {size(peak)}"] if peak else []
        words += [f"{size(missing)} too much"] if missing else []
        return f"{_name(self.policy)}: {', '.join(words)}"


def _tried(policy: PolicyLike, scoring: Scoring) -> _Entry:
    try:
        plan = as_plan(policy, scoring.demand.flow, scoring.demand.prices)
        return _Entry(policy, scoring, plan, scoring.of(plan))
    except (NoPlanError, PlanError, ScheduleError) as error:
        return _Entry(policy, scoring, error=error)


def _name(policy: object) -> str:
    """Return the policy with the arguments that are not defaults: ``Stages(4, links='nvlink4')``."""
    if isinstance(policy, Mapping):
        return "a plan" if isinstance(policy, Plan) else "a mapping"
    if not is_dataclass(policy) or isinstance(policy, type):
        return str(getattr(policy, "__name__", type(policy).__name__))
    given = ", ".join(options(policy))
    first = next((field.name for field in fields(policy)), "")
    return f"{type(policy).__name__}({given.removeprefix(f'{first}=')})"
