"""The policy `Stages`: pipeline stages whose slowest is as fast as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from splitkit.checks import Memory, count, degrees, fraction, is_word, memory_of, seconds, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import as_links
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.pipeline.purpose import counted_optimizer, microbatches_of, ranks_of, require_replicas, require_schedule
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.plans.parts import PlanRequest
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer
from splitkit.search.request import StageRequest
from splitkit.search.stages.cache_options import CacheOptions, cache_of, check_cache
from splitkit.search.stages.stage_search import StagePlanner, best_replicas
from splitkit.search.stages.token_search import InferenceStages
from splitkit.solvers.clock import Clock

# The share of `seconds` that is turned into a number of solver steps. The rest is room for the other searches of a
# plan, and for slower machines, which need longer for the same steps.
_COUNTED = 0.04  # with a memory limit, to which several searches fit the stages
_ONCE = 0.25  # without a memory limit, so that one search suffices
_ALONE = 0.1  # without links and schedule, where the steps of proofs are quicker


@dataclass(frozen=True)
class Stages:
    """Make ``n`` stages, each a convex set of nodes, whose slowest is as fast as possible over all topological orders.

    Among plans whose slowest stage is within ``tolerance`` of the fastest that was found, the most even one is chosen
    (the least sum of squared loads); among plans that are equally even within the tolerance, the one with the least
    traffic::

        GPT-2 in 8, shares of the work    0 /  0 / 19 / 23 / 23 /  4 / 31 /  0 %    the head, 31 %, is the slowest
        the plan that is chosen           8 / 12 / 12 / 10 / 12 /  8 / 10 / 31 %    it still is, the others are even

    Without links, memory and schedule a stage's load is the work of its nodes. With ``links`` a stage also pays for
    each value that it sends or receives, once (twice in training, since gradients come back). Values that need no
    gradient and depend on the inputs alone are recomputed if that is cheaper than sending them.

    In training the load is forward and backward. With a ``schedule``, ``memory`` must hold the microbatches that are in
    flight in each stage. The shortest simulated step is preferred before evenness; among equally even plans, the lowest
    peak. If ranks have several stages, the step comes first, unless the tolerance is 0, and it is no longer than with
    cuts between blocks.

    Nodes that share written memory, or a value that cannot be sent, are in the same stage, since no runtime could
    separate them. What only counts or records, such as the counter of a batch norm, is in the stage of its module
    (`splitkit.pipeline.inseparable_nodes`).

    With ``replicas``, each stage may run on several devices in data parallel, all stages on equally many. Each of the d
    devices has all parameters of the stage, and 1/d of every microbatch, of the time, of the activations and of the
    messages. The parts of the plan say how many devices they use (`Part.replicas`). Loads are per device. With links
    and a schedule, a ring all-reduce sums the gradients once per step; it moves 2 (d - 1) / d of their bytes, and each
    microbatch bears an equal share. Stages are planned for each number that is allowed. With a schedule, the shortest
    simulated step decides, since a pipeline with fewer stages fills sooner::

        Stages(8, schedule="1f1b", links="nvlink4", replicas=(1, 2, 4))

    For inference, each stage keeps the KV cache of its own attention layers. ``objective="tokens"`` finds the stages
    that leave room for the largest cache besides weights and activations, and the fastest among these.
    ``objective="throughput"`` finds the fastest stages with room for ``tokens``, the tokens of all requests in flight
    together. With at least as many requests in flight as stages, a step takes as long as the slowest stage::

        Stages(4, objective="tokens", memory=["24GiB", "24GiB", "16GiB", "16GiB"])
        Stages(4, objective="throughput", tokens=8 * 4096, memory="24GiB", links="pcie4")

    The plan's claim says how good it is: its value, a lower bound for all plans that compute each node once, the proof
    of the bound, and the evenness of the loads. If one op makes further stages useless, the note names it.

    Attributes:
        n: the number of stages, at most the number of nodes.
        schedule: the schedule of the pipeline, as in `splitkit.simulate_schedule`: ``"1f1b"``, ``"gpipe"`` ...
        microbatches: the microbatches in a step, ``2 n`` by default. The graph was captured with the inputs of one.
        memory: the bytes of each rank: a number or a text (``"80GiB"``) for all ranks, or a sequence with one for each.
            A rank runs one stage, or two if the schedule says so. ``"least"``: the fastest plan among those with the
            lowest peak (the greatest over the ranks); among all plans if the graph has at most 400 possible borders,
            else among those found.
        links: the links between the ranks ``0, 1 ...``: `splitkit.costs.Links`, or the name of a preset
            (``"nvlink4"``).
        optimizer: the optimizer whose state counts in training: ``"adam"``, ``"momentum"``, ``"sgd"``. ``None``:
            inference; with a schedule, or costs that include backward, ``"adam"``, since these train.
        seconds: the CPU time of this thread after which the search ends, as soon as it has a plan. The analysis of the
            graph, which is done once per graph, does not count. Usually the search ends much earlier, after a number of
            steps in proportion to these seconds, so a slower machine finds the same plan. If the time limit ended it,
            the note says so.
        tolerance: relative, from 0 to 1: how much slower the slowest stage may be than the best that was found if that
            makes stages more even, and how much less even stages may be if that reduces traffic.
        replicas: the numbers of devices that each stage may use, such as ``(1, 2, 4)``; ``n`` is then the number of
            devices, of which those stay unused that are not enough for another stage.
        objective: ``"tokens"`` or ``"throughput"``, for inference; ``None``: the slowest stage, without a cache.
        tokens: with ``objective="throughput"``, the tokens of all requests in flight, whose cache must fit.
        cache: node, or its name -> bytes of cache per token; by default the result of `splitkit.extend.cache_bytes`.
        chunk: with an objective and the graph of `splitkit.capture_decoder`, the most new tokens of a step, of all
            sequences together, but at least one of each: a chunk of a prompt takes more memory than one token does.
    """

    n: int
    schedule: str | None = None
    microbatches: int | None = None
    memory: Memory = None
    links: str | Links | None = None
    optimizer: Optimizer = None
    seconds: float = 10.0
    tolerance: float = 0.01
    replicas: int | Sequence[int] = (1,)
    objective: str | None = None
    tokens: int = 0
    cache: Mapping[str | Node, int] | None = None
    chunk: int = 1

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
        as_links(self.links)
        check_stage_optimizer(self.optimizer)
        settle(self, "chunk", count)
        seconds(self, "seconds", self.seconds, endless=False)
        fraction(self, "tolerance", self.tolerance)
        replicas = self.replicas if self._replicated else None
        training = {"schedule": self.schedule, "optimizer": self.optimizer, "replicas": replicas}
        check_cache(self._cached, self.memory, {name: one for name, one in training.items() if one is not None})

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the stages ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 if fewer than ``n`` nodes can be separated, or no stages fit the memory; it says what
                would fit.
        """
        if self._replicated:
            return self._with_replicas(flow, costs)
        enough_nodes(flow, self.n)
        staging = self._staging(flow, costs)
        if self.objective is not None:
            cache = cache_of(self._cached, flow, costs)
            return InferenceStages(staging, cache, self.tokens, self.chunk).plan(self.objective)
        return staging.least() if is_word(self.memory, "least") else staging.plan()

    def retold(self, plan: Plan, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan of another such policy, whose schedule alone differs, as this one's: it has the same loads."""
        return replace(self._staging(flow, costs).retold(plan), request=PlanRequest(), policy="")

    def _staging(self, flow: Dataflow, costs: Costs, replicas: int = 1) -> StagePlanner:
        memory = None if is_word(self.memory, "least") else self.memory
        links = as_links(self.links)
        optimizer = counted_optimizer(self.optimizer, self.schedule, costs)
        asked = self.schedule, self.microbatches, memory, links, optimizer
        demand = StageRequest(self, flow, costs, *asked, backward=optimizer is not None, replicas=replicas)
        if self.schedule is not None or self.memory is not None:
            demand.analyze()
        counted = _ALONE if self.schedule is None and links is None else _ONCE if self.memory is None else _COUNTED
        return StagePlanner(
            demand, tuple(range(self.n)), counted * self.seconds, self.tolerance, clock=Clock(self.seconds)
        )

    @property
    def _cached(self) -> CacheOptions:
        return CacheOptions("Stages", self.objective, self.tokens, self.cache)

    @property
    def _degrees(self) -> tuple[int, ...]:
        assert isinstance(self.replicas, tuple)
        return self.replicas

    @property
    def _replicated(self) -> bool:
        return self._degrees != (1,)

    def _with_replicas(self, flow: Dataflow, costs: Costs) -> Plan:
        """Plan stages of each number of replicas on at most ``n`` devices, and return the best of these plans."""
        each = [count for count in self._degrees if self.n // count <= len(flow.nodes)]
        enough_nodes(flow, self.n // (each or self._degrees)[-1])
        return best_replicas([self._of_replicas(count)._staging(flow, costs, count) for count in each])

    def _of_replicas(self, replicas: int) -> Stages:
        """Return the policy for stages on so many devices each, with its part of the time."""
        stages, sizes = self.n // replicas, memory_of(self, self.memory, self.n)
        groups = (sizes[stage * replicas : (stage + 1) * replicas] for stage in range(stages))
        least = [min((one for one in group if one is not None), default=None) for group in groups]
        return replace(
            self,
            n=stages,
            replicas=(1,),
            microbatches=microbatches_of(self.microbatches, self.n) if self.schedule else None,
            memory=None if self.memory is None else least,
            seconds=self.seconds / len(self._degrees),
        )
