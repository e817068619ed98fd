"""The policy `Pipeline`: the cuts of a joint graph into stages and what each stage saves, decided together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitkit.checks import Memory, count, memory_of, settle, shown
from splitkit.costs import Costs, Links, unit_of
from splitkit.costs.links import HostLink, Offload, as_links, require_offload, require_seconds, room_of_host
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.purpose import counted_optimizer, microbatches_of
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.plans.parts import Claim, Offloaded
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer, checked
from splitkit.search.pipelines.cut_scoring import ScoredCuts
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.joint_positions import JointPositions, PlannedPipeline, staged_plan
from splitkit.search.pipelines.offload_cut_search import OffloadCutSearch, StageTransfers
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.short_repr import options
from splitkit.training.choices import Choice
from splitkit.training.flow import JointFlow, as_joint
from splitkit.units import duration, in_words, size

_ROUNDING = 2e-5  # of the integer programs that prove bounds


@dataclass(frozen=True)
class Pipeline:
    """Cut a joint graph into ``n`` stages, and choose what each stage saves, for the shortest simulated step.

    A stage that holds more microbatches must recompute more, and so should have fewer layers. Cutting first and
    choosing recompute later misses that, and so does one recompute rule for all stages. This policy decides both
    together, within the memory of each rank::

        joint = splitkit.capture_joint(model, *inputs_of_one_microbatch)
        costs = splitkit.costs.roofline(joint.graph_module, "h100")
        step = joint.split(Pipeline(4, "1f1b", microbatches=32, memory="80GiB", links="nvlink4"), costs)

    A stage is an interval of the order in which forward computes its nodes; cuts may fall inside blocks. The backward
    of a node is in the same stage as the node. Until its backward, a stage holds its saved activations and, as in
    torch's runtime, received and sent values. Ranks hold weights, gradients, optimizer state, the saved activations of
    all microbatches in flight, messages, and the temporary memory of the stage that runs.

    The claim has the simulated step and a lower bound for all plans with these positions of cuts. With one stage on
    each rank the bound is the least ``max_j (m t_j + sum of t_i before j)`` over all cuts, where no stage takes less
    time than the hull of its exact frontier says. With several stages on a rank it is the longest path through the
    schedule's order of actions, made as short as mixtures of cuts can within the memory at each moment of that order.
    If there are few ways to cut (two stages of a small graph), all are looked at, and of small stages all choices. The
    memory that a refusal names is the lowest peak that was found; it is enough, and so is more. At most 200 positions
    are looked at, the ones that send the fewest bytes; the note says how many of how many.

    ``Pipeline(4, memory="80GiB", offload="pcie5")`` may also move saved activations to the host while other
    microbatches run. A value leaves during its stage's forward and the rank's next action, and returns during the
    action before the stage's backward. Each rank copies one value at a time in each direction, and the simulated step
    includes the time that ranks wait for copies. The step is never longer than without offload, nor than offloading the
    largest values first with the cuts that were considered. Prices must be in seconds.

    Attributes:
        n: the number of stages.
        schedule: the schedule, as in `splitkit.simulate_schedule`. If it divides backward, recompute is in the input
            part, and the values that the weight part reads wait for it.
        microbatches: the microbatches in a step, ``2 n`` by default. The graph was captured with the inputs of one.
        memory: the bytes of each rank: a number or a text (``"80GiB"``) for all ranks, or a sequence with one for each.
        links: the links between the ranks ``0, 1 ...``, or the name of a preset (``"nvlink4"``).
        recompute: whether stages may recompute.
        optimizer: the optimizer whose state counts: ``"adam"`` by default, ``"momentum"``, ``"sgd"``.
        ranks: the number of ranks, for schedules that put any number of stages on each; by default as many as the
            schedule usually has (`splitkit.simulate_schedule`).
        offload: the link of each rank to its host, as in `splitkit.policies.Budget`; ``None`` offloads nothing.
        host: with ``offload``: the bytes that each rank may have on the host; ``None`` for any number.
    """

    n: int
    schedule: str = "1f1b"
    microbatches: int | None = None
    memory: Memory = None
    links: str | Links | None = None
    recompute: bool = True
    optimizer: Optimizer = None
    ranks: int | None = None
    offload: Offload = None
    host: int | str | None = None

    def __post_init__(self) -> None:
        settle(self, "n", count)
        settle(self, "ranks", count, optional=True)
        schedule_named(self.schedule)
        memory_of(self, self.memory, len(self._order.ranks))
        as_links(self.links)
        check_stage_optimizer(self.optimizer)
        require_offload(self, self.offload, self.host, f"Pipeline({self.n}, ")
        if not isinstance(self.recompute, bool):
            raise PolicyError("SK302", f"Pipeline has recompute={shown(self.recompute)}", "Use True or False.")

    @property
    def _order(self) -> PipelineOrder:
        return pipeline_order(self.schedule, self.n, microbatches_of(self.microbatches, self.n), self.ranks)

    @property
    def _limits(self) -> tuple[int | None, ...]:
        return memory_of(self, self.memory, len(self._order.ranks))

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``("forward", s)`` and ``("backward", s)``.

        Raises:
            PolicyError: SK302 for a graph that is not a joint graph.
            NoPlanError: SK303 if fewer than ``n`` stages can be cut, or no plan was found within the memory; it says
                what would fit.
        """
        joint = as_joint(self, flow)
        return self.found(self.problems(joint, costs)).plan

    def problems(self, flow: JointFlow, costs: Costs) -> StageProblems:
        """Return the problems of all stages of a joint graph, for `found`."""
        optimizer = counted_optimizer(self.optimizer, self.schedule, checked(costs))
        divided = schedule_named(self.schedule).divided
        return StageProblems(JointPositions(flow), costs, optimizer, divided, recompute=self.recompute)

    def found(self, problems: StageProblems) -> PlannedPipeline:
        """Return the plan with its simulated step. Errors as in `assign`.

        Args:
            problems: those of the graph, by a policy with the same optimizer, recompute and kind of schedule.
        """
        enough_nodes(problems.flow, self.n)
        search = self._search(StageFrontiers(problems), self._limits)
        most = len(search.cuts) - 1
        if most < self.n:
            reason = f"{self.n} stages were asked for, and the graph can be cut into {most} at most"
            raise NoPlanError("SK303", reason, f"Ask for at most {most}.")
        best, bound = search.run()
        if best is None:
            raise self._infeasible(search, bound)
        again = tuple(point.seconds for point in best.points)
        return PlannedPipeline(self._plan(search, best, bound), best.run, self._limits, again)

    def _search(self, frontiers: StageFrontiers, limits: Sequence[int | None]) -> CutSearch:
        given = frontiers, self._order, as_links(self.links), limits
        if self.offload is None:
            return CutSearch(*given)
        require_seconds(frontiers.problems.costs)
        link, host = HostLink.of(self.offload), room_of_host(self, self.host)
        return OffloadCutSearch(*given, StageTransfers(frontiers.problems, link, host))

    def _plan(self, search: CutSearch, best: ScoredCuts, bound: float) -> Plan:
        frontiers = search.frontiers
        choices = [frontiers.choice(*span, point) for span, point in zip(best.spans, best.points, strict=True)]
        run = best.run
        stages = [s for s, rank in enumerate(run.order.rank_of) if rank == run.busiest_rank]
        limiting = max(stages, key=lambda s: run.stages[s].forward + run.stages[s].backward)
        solver = "dynamic program, minimum cuts" if search.single else "local search, minimum cuts"
        claim = Claim("step", best.seconds, min(bound, best.seconds), solver, ("forward", limiting), _ROUNDING)
        note = self._note(search, best, claim)
        plan = staged_plan(frontiers.problems.members, best.ends, choices, note)
        return replace(plan, offloaded=_offloaded(frontiers, best, choices), claim=claim)

    def _note(self, search: CutSearch, best: ScoredCuts, claim: Claim) -> str:
        run, problems, (some, all_) = best.run, search.problems, search.looked_at
        unit, tried = unit_of(problems.costs), len(search.scoring.tried)
        again = [f"{duration(p.seconds, unit)} in stage {s}" for s, p in enumerate(best.points) if p.seconds]
        said = [
            f"{self.n} stages. {run.told}{', if SplitBackward divides backward' if problems.divided else ''}",
            claim.proof,
            run.fullest(self._limits),
            f"Backward recomputes {f'for {in_words(again)}' if again else 'nothing'}",
            *_on_host(best),
            f"Looked at {some} of {all_} positions of cuts; simulated {tried} candidates",
        ]
        return ". ".join(said)

    def _infeasible(self, search: CutSearch, bound: float) -> NoPlanError:
        """Return the refusal; the memory that it names is the peak of a plan, which is found with it."""
        limits, enough = self._limits, search.smallest
        least = min(limit for limit in limits if limit is not None)
        peak = max(enough.run.peaks)
        count = "" if self.microbatches is None else f", {self.microbatches}"
        others = options(self, "n", "schedule", "microbatches", "memory")
        fits = f"Pipeline({', '.join([f'{self.n}, {self.schedule!r}{count}, memory={peak}', *others])}) fits"
        proven = ": no cuts can fit" if bound == float("inf") else ""
        error = NoPlanError(
            "SK303",
            f"no {self.n} stages under {schedule_named(self.schedule).name} were found that fit {size(least)} for each "
            f"rank{proven}",
            f"{fits}: {size(peak)} for each rank. Or: use more stages, a smaller microbatch, or an optimizer with less "
            "state.",
        )
        error.nearest, error.excess = self._plan(search, enough, 0.0), peak - least
        return error


def _offloaded(frontiers: StageFrontiers, best: ScoredCuts, choices: Sequence[Choice]) -> tuple[Offloaded, ...]:
    """Return the values that stages move, in the order of the graph."""
    values = []
    for span, choice, storages in zip(best.spans, choices, best.moved, strict=bool(best.moved)):
        savings = frontiers.problem(*span).savings
        saved = np.flatnonzero(choice.saved).tolist()
        values += [savings.values[v] for v in saved if int(savings.storage[v]) in storages]
    order = frontiers.problems.flow.index
    return tuple(Offloaded(value) for value in sorted(values, key=order.__getitem__))


def _on_host(best: ScoredCuts) -> list[str]:
    moved = ((stage, costs.copies) for stage, costs in enumerate(best.run.stages))
    told = [f"{size(copies.nbytes)} of stage {stage}" for stage, copies in moved if copies is not None]
    most = size(max(best.run.host_peaks))
    return [f"Of each microbatch, {in_words(told)} wait on the host, where a rank has {most} at most"] if told else []
