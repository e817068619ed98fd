"""The request behind a search over a graph, and what follows from it: prices, ranks, limits, links, steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch.fx import Node

from splitkit.checks import Memory, memory_of
from splitkit.costs import Costs, Links
from splitkit.costs.training import with_backward
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.decoder_step import DecoderSteps
from splitkit.pipeline.inseparable_nodes import together
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import microbatches_of, ranks_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer, checked
from splitkit.search.placement_model import TransferTimes
from splitkit.search.stages.candidate_borders import InFlight
from splitkit.solvers.placement.problem import Floats


@dataclass(frozen=True, eq=False)
class StageRequest:
    """What a caller asks of a search for stages or parts.

    Attributes:
        policy: the policy that asks, for errors.
        flow: facts about the graph.
        costs: prices of its nodes; in training their backward is added.
        schedule: the schedule of the pipeline whose stages the parts are; ``None`` for no pipeline.
        microbatches: microbatches of a step; ``None`` for two per stage.
        memory: bytes of each rank, that is, of each of its replicas.
        links: the links between ranks; ``None`` for free transfers.
        optimizer: the optimizer whose state each stage holds.
        cache: node -> bytes of the cache that it keeps, for inference.
        steps: the steps of the decoder that keeps it; ``None`` for no decoder, or one that only runs as captured.
        tokens: the tokens of all sequences together in that cache.
        backward: whether times include backward even without a schedule; with one they always do.
        replicas: the number of devices of each stage, which stand in a row; times and bytes are of one of them.
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
    replicas: int = 1

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
        """Seconds of every placeable node on each device that runs it."""
        return {node: self.prices.seconds(node) / self.replicas for node in self.flow.nodes}

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
        if self.replicas > 1:
            return self.travel_of_replicas([self.replicas] * len(places))
        return None if self.links is None else TransferTimes.over(self.links, places, training=self.training)

    def travel_of_replicas(self, replicas: Sequence[int]) -> TransferTimes | None:
        """Return the transfer times between stages on so many devices each; ``None`` if transfers are free."""
        if self.links is None:
            return None
        return TransferTimes.over(self.links, range(sum(replicas)), training=self.training).grouped(replicas)

    def run(self, stages: Sequence[StageCosts]) -> ScheduleRun:
        """Simulate a step of the schedule; of one microbatch without a schedule."""
        count = microbatches_of(self.microbatches, len(stages)) if self.schedule else 1
        return simulate_schedule(stages, self.schedule or "gpipe", count, links=self.links)

    def held(
        self,
        plan: Plan,
        devices: Iterable[PartKey] = (),
        device_of: Callable[[PartKey], PartKey] | None = None,
        *,
        captured: bool = False,
    ) -> tuple[ByteBreakdown, ...]:
        """Return the bytes of each device: of one microbatch, or of a step of a decoder with its tokens.

        Args:
            plan: the plan.
            devices: the devices; by default one for each part, in run order.
            device_of: part -> its device; all that its parts hold counts, and the most that one takes at a time.
            captured: whether a decoder computes what it computes in the captured step, which is fast to ask.
        """
        keys = run_order(self.flow, plan)
        on = {key: key if device_of is None else device_of(key) for key in keys}
        visits: dict[PartKey, list[StageCosts]] = {device: [] for device in devices or keys}
        for key, stage in zip(keys, self.stage_prices.of(plan), strict=True):
            visits[on[key]].append(stage)
        kept = dict.fromkeys(visits, 0)
        for node, nbytes in self.cache.items():
            kept[on[plan.home(node)]] += nbytes
        found = tuple(ByteBreakdown.of_visits(own, cache=kept[device]) for device, own in visits.items())
        if captured or device_of is not None or self.steps is None:
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


def with_all_reduce(loads: Floats, run: ScheduleRun) -> Floats:
    """Return the loads with a microbatch's share of the all-reduce of gradients, which replicas run once a step."""
    total: Floats = loads + np.array(run.syncs or (0.0,)) / run.order.microbatches
    return total
