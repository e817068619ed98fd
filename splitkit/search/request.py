"""The request behind a search over a graph, and what follows from it: prices, ranks, limits, links, steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from splitkit.checks import Memory, memory_of
from splitkit.costs import Costs, Links, unit_of
from splitkit.costs.training import with_backward
from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.decoder_step import DecoderSteps
from splitkit.pipeline.inseparable_nodes import together
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import by_rank, microbatches_of, ranks_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, peaks_of_visits, run_order
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import require_parts
from splitkit.prices import Optimizer, checked
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.stages.candidate_borders import InFlight
from splitkit.units import duration, size


@dataclass(frozen=True, eq=False)
class StageRequest:
    """What a caller asks of a search for stages or parts.

    Attributes:
        policy: the policy that asks, for errors.
        flow: facts about the graph.
        costs: prices of its nodes; in training their backward is added.
        schedule: the schedule of the pipeline whose stages the parts are; ``None`` for no pipeline.
        microbatches: microbatches of a step; ``None`` for two per stage.
        memory: bytes of each rank.
        links: the links between ranks; ``None`` for free transfers.
        optimizer: the optimizer whose state each stage holds.
        cache: node -> bytes of the cache that it keeps, for inference.
        steps: the steps of the decoder that keeps it; ``None`` for no decoder, or one that only runs as captured.
        tokens: the tokens of all sequences together in that cache.
        backward: whether times include backward even without a schedule; with one they always do.
    """

    policy: object
    flow: Dataflow
    costs: Costs
    schedule: str | None = None
    microbatches: int | None = None
    memory: Memory = None
    links: Links | None = None
    optimizer: Optimizer = "adam"
    backward: bool = False
    cache: Mapping[Node, int] = field(default_factory=dict)
    steps: DecoderSteps | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", checked(self.costs))

    @property
    def training(self) -> bool:
        """Whether a load includes backward, and values come back as gradients."""
        return self.backward or self.schedule is not None

    def trained(self, costs: Costs) -> Costs:
        """Return the costs, with backward included if it counts."""
        return with_backward(costs, self.flow) if self.training else costs

    @cached_property
    def prices(self) -> Costs:
        """The costs by which parts are measured."""
        return self.trained(self.costs)

    @cached_property
    def seconds(self) -> Mapping[Node, float]:
        """Seconds of every placeable node."""
        return {node: self.prices.seconds(node) for node in self.flow.nodes}

    @property
    def inseparable(self) -> Sequence[Sequence[Node]]:
        """Sets of nodes that a pipeline must keep in one stage."""
        return self.flow.fact(together)

    @cached_property
    def stage_prices(self) -> StagePrices:
        """The costs of parts as stages."""
        divided = self.schedule is not None and schedule_named(self.schedule).divided
        return StagePrices(self.flow, self.prices, self.optimizer, divided=divided)

    def analyze(self) -> None:
        """Compute now what is computed once per graph: prices, and what autograd keeps."""
        _ = self.seconds, self.stage_prices, self._values

    def ranks(self, stages: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        return ranks_of(self.schedule, self.microbatches, stages)

    def limits(self, ranks: int) -> tuple[int | None, ...]:
        """Return the bytes of each rank, ``None`` for no limit."""
        return memory_of(self.policy, self.memory, ranks)

    def travel(self, places: Sequence[Hashable]) -> TransferTimes | None:
        """Return the transfer times between these ends of the links; ``None`` if transfers are free."""
        return None if self.links is None else TransferTimes.over(self.links, places, training=self.training)

    def run(self, stages: Sequence[StageCosts]) -> ScheduleRun:
        """Simulate a step of the schedule; of one microbatch without a schedule."""
        count = microbatches_of(self.microbatches, len(stages)) if self.schedule else 1
        return simulate_schedule(stages, self.schedule or "gpipe", count, links=self.links)

    def held(self, plan: Plan, *, captured: bool = False) -> tuple[ByteBreakdown, ...]:
        """Return the bytes of each part, in run order: of one microbatch, or of a step of a decoder with its tokens.

        With ``captured`` the decoder computes what it computes in the captured step, which is fast to ask.
        """
        keys = run_order(self.flow, plan)
        kept = dict.fromkeys(keys, 0)
        for node, nbytes in self.cache.items():
            kept[plan.home(node)] += nbytes
        stages = zip(self.stage_prices.of(plan), kept.values(), strict=True)
        found = tuple(ByteBreakdown.of_stage(stage, cache=nbytes) for stage, nbytes in stages)
        if captured or self.steps is None:
            return found
        peaks = self.steps.peaks(({n for n in self.flow.nodes if key in plan[n]} for key in keys), self.tokens)
        pairs = zip(found, peaks, strict=True)
        return tuple(replace(one, activations=peak - one.weights - one.cache) for one, peak in pairs)

    def traffic(self, plan: Plan) -> int:
        """Return the bytes that cross, each value once for each part that reads it from its home."""
        crossed, places = 0, plan.places
        for maker, users, nbytes in self._values:
            readers = {key for user in users for key in places.get(user, ())}
            crossed += nbytes * len(readers.difference(places[maker]))
        return crossed

    @cached_property
    def _values(self) -> list[tuple[Node, list[Node], int]]:
        """The maker of each value, its readers and its bytes."""
        flow, nbytes = self.flow, self.costs.nbytes
        made = ((value, flow.producer(value)) for value in flow.index)
        return [(maker, [*value.users], nbytes(value)) for value, maker in made if flow.is_placeable(maker)]

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return the microbatches whose activations each stage holds for certain, from first to last."""
        return tuple(self.flights(stages, surely=True).forward.tolist())

    def flights(self, stages: int, *, surely: bool) -> InFlight:
        """Return what each stage holds in flight; see `InFlight.of`."""
        run = self.run([StageCosts(1.0, 1.0, 1.0)] * stages) if self.schedule else None
        return InFlight.of(run, stages, surely=surely)


# One score for the plans of any policy: whether they fit, and their bottleneck, simulated step, peak and traffic.


@dataclass(frozen=True)
class Score:
    """The score of a plan.

    Attributes:
        parts: the number of parts; visits of one device count as one.
        visits: whether a device is visited several times.
        load: seconds of the bottleneck part, with its transfers.
        limiting: the bottleneck part.
        step: seconds of the simulated step; 0 without a schedule.
        peak: peak bytes of the rank that holds the most; 0 where neither schedule nor memory is given.
        missing: the most bytes that a rank lacks; 0 if the plan fits.
        traffic: bytes that cross, each value once for each part that reads it.
        unit: the unit of the times.
    """

    parts: int
    visits: bool
    load: float
    limiting: PartKey
    step: float = 0.0
    peak: int = 0
    missing: int = 0
    traffic: int = 0
    unit: str = "s"

    @property
    def ties(self) -> tuple[float, int, int]:
        """Return what decides between equal loads; the smallest wins."""
        return self.step, self.peak, self.traffic

    def __str__(self) -> str:
        words = [duration(self.load, self.unit)]
        words += [f"step {duration(self.step, self.unit)}"] if self.step else []
        words += [f"peak {size(self.peak)}"] if self.peak else []
        words += [f"{size(self.missing)} too much"] if self.missing else []
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class Scoring:
    """Scores plans of one graph as the stages of one pipeline, in execution order.

    Parts ``(key, 0), (key, 3) ...``, as `splitkit.extend.refine` makes them, are visits of one device: the device's
    load is the sum over all of them.

    Attributes:
        demand: the request; its memory is that of each rank, and a plan has as many ranks as parts.
    """

    demand: StageRequest

    def of(self, plan: Plan) -> Score:
        """Return the score of a plan that gives every node a part.

        Raises:
            PlanError: SK209 when it does not; SK203 when parts depend on each other in a cycle.
            ScheduleError: SK330 when the schedule does not allow that many parts.
            NoPlanError: SK303 when memory is given for another number of ranks, when parts that are visits of one
                device would run under a schedule, or when parts have replicas.
        """
        demand = self.demand
        require_parts(demand.flow, plan)
        if any(part.replicas > 1 for part in plan.parts.values()):
            reason = "it has parts of several replicas, and plans are compared as parts of one device each"
            raise NoPlanError("SK303", reason, "Leave replicas out.")
        parts = run_order(demand.flow, plan)
        on = _devices(parts)
        devices = list(dict.fromkeys(on.values()))
        visits = len(devices) < len(parts)
        if visits and demand.schedule is not None:
            twice = ", ".join(map(str, [part for part in parts if on[part] == devices[0]][:2]))
            raise NoPlanError(
                "SK303",
                f"parts {twice} ... are visits to one device, which no schedule runs",
                "Use one part per device.",
            )
        joined = Plan.of({node: list(dict.fromkeys(on[key] for key in keys)) for node, keys in plan.items()})
        ranks = demand.ranks(len(devices))
        loads = self._placing.loads(joined, devices, [0] * len(devices), demand.travel(ranks))
        of_rank, busiest = by_rank(loads, ranks)
        step, peaks = self._run(plan, parts, on)
        return Score(
            parts=len(devices),
            visits=visits,
            load=float(of_rank.max(initial=0.0)),
            limiting=devices[busiest],
            step=step,
            peak=max(peaks, default=0),
            missing=self._missing(peaks),
            traffic=self.demand.traffic(joined),
            unit=unit_of(demand.costs),
        )

    def _run(
        self, plan: Plan, parts: Sequence[PartKey], on: Mapping[PartKey, PartKey]
    ) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of the step and the peak bytes of each rank; 0 and nothing where neither is asked for."""
        if self.demand.schedule is None and self.demand.memory is None:
            return 0.0, ()
        stages = self.demand.stage_prices.of(plan)
        if self.demand.schedule is not None:
            run = self.demand.run(stages)
            return run.seconds, run.peaks
        return 0.0, tuple(peaks_of_visits(stages, [on[part] for part in parts]).values())

    def least(self, parts: int) -> float:
        """Return a lower bound on the bottleneck of ``parts`` ranks: a fair share of the work, or one whole node."""
        seconds = self.demand.seconds.values()
        ranks = max(self.demand.ranks(parts)) + 1
        return max(sum(seconds) / ranks * (1 - 1e-12), max(seconds, default=0.0))

    @cached_property
    def _placing(self) -> PlacementModel:
        return PlacementModel(self.demand.flow, self.demand.prices, [self.demand.seconds])

    def _missing(self, peaks: Sequence[int]) -> int:
        memory = self.demand.memory
        if memory is None:
            return 0
        if isinstance(memory, Sequence) and not isinstance(memory, str) and len(memory) != len(peaks):
            raise NoPlanError(
                "SK303", f"memory is given for {len(memory)} ranks, the plan has {len(peaks)}", "Give one size."
            )
        limits = self.demand.limits(len(peaks))
        return max(0, *(0 if limit is None else peak - limit for peak, limit in zip(peaks, limits, strict=True)))


def _devices(parts: Sequence[PartKey]) -> dict[PartKey, PartKey]:
    """Return part -> the device that it is a visit of, or the part itself where each device has one part."""
    visited = {key: key[0] if isinstance(key, tuple) and len(key) == 2 else key for key in parts}
    return visited if len(set(visited.values())) < len(parts) else {key: key for key in parts}
