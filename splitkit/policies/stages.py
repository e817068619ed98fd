"""Pipeline stages: convex parts one after the other, the slowest as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from splitkit.checks import Memory, count, degrees, fraction, is_word, memory_of, seconds, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import links_of
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.pipeline.defaults import microbatches_of, ranks_of, require_replicas, require_schedule
from splitkit.pipeline.stageprices import Optimizer, checked_optimizer
from splitkit.plans.record import Plan
from splitkit.search.demand import Demand
from splitkit.search.replicas import ReplicaSearch
from splitkit.search.replicaworth import ReplicaWorth
from splitkit.search.stages import Staging
from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.solution import ending
from splitkit.solvers.placement.stages.contiguous import contiguous

# Of the seconds: how long a solver counts its steps for. Several are asked, and there are slower machines.
_COUNTED = 0.04
_ONCE = 0.25  # where no memory is to be fitted, so that one search does
_ALONE = 0.1  # where work alone counts: the steps of proofs are quicker there


@dataclass(frozen=True)
class Stages:
    """``n`` stages, each a convex set of nodes, the slowest as fast as possible: over all orders of the graph.

    Of the stages whose slowest is within ``tolerance`` of the least, the most even are taken (the least sum of squared
    loads), and of those that are as even within the tolerance, those between which the fewest bytes cross::

        GPT-2 in 8, shares of the work    0 /  0 / 19 / 23 / 23 /  4 / 31 /  0 %    the head, 31 %, is the slowest
        what is taken instead             8 / 12 / 12 / 10 / 12 /  8 / 10 / 31 %    it still is, the others are even

    Without links, memory and schedule a stage's load is the work of its nodes. With ``links`` a stage also pays for
    each value that it sends or receives, once (twice with a schedule: gradients come back), and values that need no
    gradient and come from the inputs alone are computed again where that saves sending them.

    With a ``schedule`` the load is forward and backward, stages are held to ``memory`` with the microbatches that are
    in flight at their place, and before they are made even, those with the shortest simulated step are taken; of those
    that are as even, those with the lowest peak. Where ranks have several stages the step comes first, unless the
    tolerance is 0, and is no longer than with cuts between blocks.

    What shares memory that is written, or reads a value that cannot be sent, is in one stage: no runtime could have it
    in two (`splitkit.pipeline.together`).

    With ``replicas`` a stage may stand on several devices (data parallel): each has all of its parameters, and 1/d of
    every microbatch, of its time and its activations. The parts of the plan say how many (`Part.replicas`). The load
    is that of a device; devices are made even, not stages. A message takes 1 / min(d, e) of its time between stages on
    d and e devices. With links and a schedule a ring adds up the gradients once a step, 2 (d - 1) / d of their bytes,
    of which a load has its share for a microbatch; and the shortest simulated step decides, as fewer stages fill
    sooner. So do PipeDream (SOSP 2019), DAPPLE (PPoPP 2021) and Piper (NeurIPS 2021)::

        Stages(8, schedule="1f1b", links="nvlink4", replicas=(1, 2, 4))

    The plan's claim says how good it is: its value, what no plan can be below that computes each node once, what
    proved that, and how even the loads are. Its note names the op that keeps more stages from being faster.

    Attributes:
        n: how many stages, at most the number of nodes.
        schedule: of the pipeline, as `splitkit.simulate_schedule` knows it: ``"1f1b"``, ``"gpipe"`` ...
        microbatches: of a step, ``2 n`` by default. The graph was captured with the inputs of one microbatch.
        memory: bytes of each rank, as a number or a text (``"80GiB"``), one for all or one each; a rank runs one stage,
            or two where the schedule says so. ``"least"``: the fastest stages of those with the lowest peak, the
            greatest over the ranks: of all that there are where a graph has few borders (400) between which stages
            can lie, else of those found.
        links: between the ranks ``0, 1 ...``: `splitkit.costs.Links`, or the name of a preset (``"nvlink4"``).
        optimizer: whose state is held: ``"adam"``, ``"momentum"``, ``"sgd"``; ``None``: the model is not trained.
        seconds: of this thread's processor time, after which the search ends at the latest, as soon as it has any
            plan; the facts about the graph are not counted, which are found once a graph. Steps that are counted end
            it long before, in proportion to these seconds, so that a slower machine finds the same plan; where time
            ended it all the same, the note says so.
        tolerance: relative, from 0 to 1: how much slower the slowest stage may be than the least that was found, where
            that makes stages more even, and how much less even they may be where fewer bytes cross.
        replicas: on how many devices a stage may stand, such as ``(1, 2, 4)``; ``n`` then says how many devices there
            are, not all of which need be used.
    """

    n: int
    schedule: str | None = None
    microbatches: int | None = None
    memory: Memory = None
    links: str | Links | None = None
    optimizer: Optimizer = "adam"
    seconds: float = 10.0
    tolerance: float = 0.01
    replicas: int | Sequence[int] = (1,)

    def __post_init__(self) -> None:
        settle(self, "n", count)
        object.__setattr__(self, "replicas", degrees(self, "replicas", self.replicas, self.n, "the devices"))
        least = is_word(self.memory, "least")
        if self._replicated:
            require_replicas(self, self._degrees, self.n, self.schedule, self.microbatches, least=least)
            ranks = self.n
        else:
            require_schedule(self, self.schedule, self.microbatches, self.n)
            ranks = max(ranks_of(self.schedule, self.microbatches, self.n)) + 1
        memory_of(self, None if least else self.memory, ranks)
        links_of(self.links)
        checked_optimizer(self.optimizer)
        if self.schedule is not None and self.optimizer is None:
            raise PolicyError("SK302", "Stages: a schedule trains, and optimizer is None", "Name one, or no schedule.")
        seconds(self, "seconds", self.seconds, endless=False)
        fraction(self, "tolerance", self.tolerance)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Stages are ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 when the graph has fewer nodes that can be apart, or no stages fit the memory; says what
                would fit.
        """
        if self._replicated:
            return self._with_replicas(flow, costs)
        enough_nodes(flow, self.n)
        staging = self._staging(flow, costs)
        return staging.least() if is_word(self.memory, "least") else staging.plan()

    def _staging(self, flow: Dataflow, costs: Costs) -> Staging:
        memory = None if is_word(self.memory, "least") else self.memory
        links = links_of(self.links)
        demand = Demand(self, flow, costs, self.schedule, self.microbatches, memory, links, self.optimizer)
        solver = partial(contiguous, near=self.tolerance)
        if self.schedule is not None or self.memory is not None:
            demand.analyze()
        counted = _ALONE if self.schedule is None and links is None else _ONCE if self.memory is None else _COUNTED
        return Staging(
            demand, tuple(range(self.n)), counted * self.seconds, self.tolerance, solver, clock=Clock(self.seconds)
        )

    @property
    def _degrees(self) -> tuple[int, ...]:
        assert isinstance(self.replicas, tuple)
        return self.replicas

    @property
    def _replicated(self) -> bool:
        return self._degrees != (1,)

    def _with_replicas(self, flow: Dataflow, costs: Costs) -> Plan:
        """Stages on so many devices at most, no slower than those of one device each."""
        enough_nodes(flow, 1)
        microbatches = microbatches_of(self.microbatches, self.n) if self.schedule else None
        staging = replace(self, replicas=(1,), microbatches=microbatches)._staging(flow, costs)
        demand = replace(staging.demand, policy=self)
        worth = ReplicaWorth(demand, self.n, self._degrees, self.tolerance, demand.limits(self.n))
        single = None
        if self._degrees[0] == 1 and len(flow.nodes) >= self.n:
            with suppress(NoPlanError):
                single = staging.plan()
        return ReplicaSearch(worth, self.seconds, single, ending(staging.tries)).plan()
