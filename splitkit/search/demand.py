"""What a search is asked of a graph, and what follows for everybody: prices, ranks, limits, links, a simulated step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from splitkit.checks import Memory, memory_of
from splitkit.costs import Costs, Links
from splitkit.costs.training import with_backward
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.defaults import microbatches_of, ranks_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.pipeline.stageprices import Optimizer, StagePrices
from splitkit.pipeline.together import together
from splitkit.pipeline.torch_orders import divides
from splitkit.plans.record import Plan
from splitkit.prices import checked
from splitkit.search.flights import Flights
from splitkit.search.placing import Travel


@dataclass(frozen=True, eq=False)
class Demand:
    """What a search is asked.

    Attributes:
        policy: on whose behalf, for errors.
        flow: facts about the graph.
        costs: of its nodes; where it is trained their backward is added.
        schedule: of a pipeline of which the parts are stages; ``None`` for no pipeline.
        microbatches: of a step of the schedule; ``None``: two for each stage.
        memory: bytes of each rank.
        links: between the ranks; ``None``: values cross for nothing.
        optimizer: whose state is held.
        backward: whether times are of training without a schedule too; with one they are.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", checked(self.costs))

    @property
    def training(self) -> bool:
        """Whether a load is forward and backward, and values come back as gradients."""
        return self.backward or self.schedule is not None

    def trained(self, costs: Costs) -> Costs:
        """The costs, with their backward if that counts."""
        return with_backward(costs, self.flow) if self.training else costs

    @cached_property
    def prices(self) -> Costs:
        """The costs by which parts are measured."""
        return self.trained(self.costs)

    @cached_property
    def seconds(self) -> Mapping[Node, float]:
        """The prices of all nodes to place."""
        return {node: self.prices.seconds(node) for node in self.flow.nodes}

    @property
    def inseparable(self) -> Sequence[Sequence[Node]]:
        """Sets of nodes each of which a pipeline must have in one stage."""
        return self.flow.fact(together)

    @cached_property
    def stage_prices(self) -> StagePrices:
        """What parts cost as stages."""
        divided = self.schedule is not None and divides(self.schedule)
        return StagePrices(self.flow, self.prices, self.optimizer, divided=divided)

    def analyze(self) -> None:
        """Find out now what is known of the graph but once: prices, and what autograd keeps."""
        _ = self.seconds, self.stage_prices, self._values

    def ranks(self, stages: int) -> tuple[int, ...]:
        """The rank of each of so many stages."""
        return ranks_of(self.schedule, self.microbatches, stages)

    def limits(self, ranks: int) -> tuple[int | None, ...]:
        """Bytes of each of so many ranks, ``None`` for no limit."""
        return memory_of(self.policy, self.memory, ranks)

    def travel(self, places: Sequence[Hashable]) -> Travel | None:
        """What values cost between these ends of the links; ``None`` if nothing."""
        return None if self.links is None else Travel.over(self.links, places, training=self.training)

    def run(self, stages: Sequence[StageCosts]) -> ScheduleRun:
        """A step of the schedule, simulated; of one microbatch without a schedule."""
        count = microbatches_of(self.microbatches, len(stages)) if self.schedule else 1
        return simulate_schedule(stages, self.schedule or "gpipe", count, links=self.links)

    def traffic(self, plan: Plan) -> int:
        """Bytes that cross, each value once for each part that reads it from its home."""
        crossed, places = 0, plan.places
        for maker, users, nbytes in self._values:
            readers = {key for user in users for key in places.get(user, ())}
            crossed += nbytes * len(readers.difference(places[maker]))
        return crossed

    @cached_property
    def _values(self) -> list[tuple[Node, list[Node], int]]:
        """Who makes each value, who reads it, and its bytes."""
        flow, nbytes = self.flow, self.costs.nbytes
        made = ((value, flow.producer(value)) for value in flow.index)
        return [(maker, [*value.users], nbytes(value)) for value, maker in made if flow.is_placeable(maker)]

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Microbatches whose activations each of so many stages holds for certain, from first to last."""
        return tuple(self.flights(stages, surely=True).forward.tolist())

    def flights(self, stages: int, *, surely: bool) -> Flights:
        """What each of so many stages holds in flight, see `Flights.of`."""
        run = self.run([StageCosts(1.0, 1.0, 1.0)] * stages) if self.schedule else None
        return Flights.of(run, stages, surely=surely)
