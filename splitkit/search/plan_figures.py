"""Prices any plan of a graph by what one plan was asked for: the same links, schedule, optimizer and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.costs.links import links_of
from splitkit.errors import GraphError, NoPlanError, PlanError, SplitError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import cache_bytes
from splitkit.pipeline.decoder_step import DecoderSteps
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.placed_prices import rerun_seconds
from splitkit.pipeline.purpose import by_rank, microbatches_of, request_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import run_order
from splitkit.plans.parts import PARENT, UNSAID, PartKey, PlanRequest
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import require_parts
from splitkit.prices import unit_of
from splitkit.search.device_search import DeviceRequest
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest, with_all_reduce


@dataclass(frozen=True)
class StageFigures:
    """What a plan costs.

    Attributes:
        loads: device (the part, unless a device has several) -> seconds for a microbatch, with its transfers.
        work: device -> seconds of these that are computation.
        rank_loads: the same loads by rank, where ranks have several stages.
        value: the greatest load of a rank.
        limiting: the device with that load; the most loaded of its rank.
        step: seconds of the simulated step; ``None`` without a schedule.
        traffic: bytes that cross, each value once for each part that reads it from its home.
        held: the bytes of each rank or device at its peak; empty if some node is in no part, or the graph has no sizes.
    """

    loads: Mapping[PartKey, float]
    work: Mapping[PartKey, float]
    rank_loads: tuple[float, ...]
    value: float
    limiting: PartKey
    step: float | None
    traffic: int
    held: tuple[ByteBreakdown, ...]

    @property
    def peaks(self) -> tuple[int, ...]:
        """The peak bytes of each rank or device."""
        return tuple(one.total for one in self.held)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "bottleneck": self.value,
            "limiting": str(self.limiting),
            "step": self.step,
            "traffic": self.traffic,
            "peaks": list(self.peaks),
            "loads": {str(key): load for key, load in self.loads.items()},
        }


@dataclass(frozen=True, eq=False)
class StagePricing:
    """Prices plans of one graph alike.

    Attributes:
        request: the graph, its prices, and what was asked for.
        replicated: whether some part runs on several devices, so that a load is what one of them does.
        visits: whether parts ``(key, 0), (key, 3) ...`` are visits of one device, as `splitkit.extend.refine` makes
            them.
        on: part -> the device that it was planned for.
        assumed: that the purpose is assumed, in words, if the plan does not say what it is for.
    """

    request: StageRequest
    replicated: bool = False
    visits: bool = False
    on: Mapping[PartKey, PartKey] = field(default_factory=dict)
    assumed: str = ""

    @classmethod
    def of(
        cls, flow: Dataflow, plan: Plan, costs: Costs, policy: object = None, request: PlanRequest | None = None
    ) -> StagePricing:
        """Return the pricing of a plan.

        Args:
            flow: facts about its graph.
            plan: the plan.
            costs: the prices, as `splitkit.pipeline.placed_prices.costs_of_plan` returns them. Where the devices of
                the plan differ, each has the prices of its roofline.
            policy: the policy that made the plan, if it is known.
            request: what the plan is priced for; by default what the policy asks for, or the plan's own request.
        """
        asked = (plan.request if policy is None else request_of(policy, costs)) if request is None else request
        replicated = any(part.replicas > 1 for part in plan.parts.values())
        common: dict[str, Any] = {
            "memory": asked.memory,
            "links": links_of(asked.links),
            "optimizer": asked.counted,
            "cache": _cache(flow, asked),
            "tokens": asked.tokens,
            "backward": asked.purpose == "training",
        }
        if asked.devices:
            devices = asked.devices
            on = {key: part.planned_on for key, part in plan.parts.items() if part.planned_on in devices}
            options: dict[str, Any] = {"devices": devices, "together": asked.together, "only": asked.only}
            return cls(DeviceRequest(policy, flow, costs, **common, **options), on=on)
        steps = DecoderSteps.of(flow, costs, asked.chunk) if asked.chunk and asked.cache is None else None
        staged = StageRequest(policy, flow, costs, asked.schedule, asked.microbatches, steps=steps, **common)
        assumed = "" if asked.purpose else f" ({UNSAID})"
        return cls(staged, replicated, _are_visits(plan) and asked.schedule is None, assumed=assumed)

    @property
    def flow(self) -> Dataflow:
        """Facts about the graph."""
        return self.request.flow

    @property
    def unit(self) -> str:
        """The unit of the times: seconds where devices differ, as each has the prices of its roofline."""
        request = self.request
        return unit_of(request.kind_prices[0] if isinstance(request, DeviceRequest) else request.costs)

    @cached_property
    def model(self) -> PlacementModel:
        """The graph as a placement problem in which every node is computed once."""
        request = self.request
        if isinstance(request, DeviceRequest):
            return PlacementModel(request.flow, request.kind_prices[0], request.kind_seconds)
        return PlacementModel(request.flow, request.prices, [request.seconds])

    def device_of(self, key: PartKey) -> PartKey:
        """Return the device of a part: the one that it was planned for; of ``("cuda:0", 1)``, a visit, ``"cuda:0"``."""
        if key in self.on:
            return self.on[key]
        if isinstance(self.request, DeviceRequest):
            while key not in self.request.keys and isinstance(key, tuple):
                key = key[0]
        return key[0] if self.visits and isinstance(key, tuple) else key

    def row_of(self, device: PartKey) -> PartKey:
        """Return the name of a device in figures: the part that it runs if that is one, else the device."""
        parts = [key for key, on in self.on.items() if on == device]
        return parts[0] if len(parts) == 1 else device

    def parts_of(self, plan: Plan) -> list[PartKey]:
        """Return the parts in the order in which they run."""
        return run_order(self.flow, plan)

    def devices_of(self, plan: Plan) -> list[PartKey]:
        """Return the devices of a plan: all that were asked for, or the parts in the order in which they run."""
        if isinstance(self.request, DeviceRequest):
            return list(self.request.keys)
        return list(dict.fromkeys(map(self.device_of, self.parts_of(plan))))

    def limits(self, count: int) -> tuple[int | None, ...]:
        """Return the memory limits of so many ranks or devices."""
        request = self.request
        if isinstance(request, DeviceRequest):
            return request.capacities
        several = isinstance(request.memory, Sequence) and not isinstance(request.memory, str)
        if several and len(request.memory) != count:  # type: ignore[arg-type]
            found = request.limits(len(request.memory))  # type: ignore[arg-type]
            return (*found, *[None] * count)[:count]
        return request.limits(count)

    def figures(self, plan: Plan) -> StageFigures:
        """Return what a plan costs, from scratch.

        Raises:
            CycleError: SK203 if parts wait for each other in a cycle.
        """
        devices = self.devices_of(plan)
        nodes = [n for n in self.flow.nodes if plan.places.get(n)]  # also of a complete plan, which places all others
        joined = Plan.of({n: list(dict.fromkeys(map(self._place, plan.places[n]))) for n in nodes})
        stages = self.stages(plan)
        ranks = self._ranks(len(devices))
        work, loads = self._loads(joined, devices, ranks, stages)
        again = self._rerun(plan, devices, stages)
        work, loads = (work if self.replicated else work + again), loads + again  # shared work has it already
        of_rank, busiest = by_rank(loads, ranks) if len(loads) else (loads, 0)
        run, names = self.run(stages), list(map(self.row_of, devices))
        return StageFigures(
            dict(zip(names, loads.tolist(), strict=True)),
            dict(zip(names, work.tolist(), strict=True)),
            tuple(of_rank.tolist()),
            float(of_rank.max(initial=0.0)),
            names[busiest] if names else PARENT,
            None if run is None else run.seconds,
            self.request.traffic(joined.place({n: (PARENT,) for n in self.flow.nodes if n not in joined.places})),
            self._held(plan, stages, run),
        )

    def _place(self, key: PartKey) -> PartKey:
        return key if key is PARENT else self.device_of(key)

    def _ranks(self, devices: int) -> tuple[int, ...]:
        if isinstance(self.request, DeviceRequest) or self.replicated:
            return tuple(range(devices))
        return self.request.ranks(devices)

    def _loads(self, plan: Plan, devices: Sequence[PartKey], ranks: Sequence[int], stages: Any) -> tuple[Any, Any]:
        """Return (d,) seconds of work, and with transfers."""
        request, model = self.request, self.model
        if self.replicated:  # each device has its share of the microbatch
            own = np.array([stage.forward + stage.backward for stage in stages or ()], np.float64)
            return own, self._shared_loads(plan, devices, stages or ())
        if isinstance(request, DeviceRequest):
            kinds, travel, cpus = request.kinds, request.travel(request.keys), request.cpus
            return model.loads(plan, devices, kinds, None), model.loads(plan, devices, kinds, travel, cpus)
        travel = request.travel(ranks)
        alone = model.loads(plan, devices, [0] * len(devices), None)
        return alone, alone if travel is None else model.loads(plan, devices, [0] * len(devices), travel)

    def _rerun(self, plan: Plan, devices: Sequence[PartKey], stages: Sequence[StageCosts] | None) -> Any:
        """Return (d,) seconds of the forwards that backward runs again, where loads include backward."""
        found = dict.fromkeys(devices, 0.0)
        of = dict(zip(self.parts_of(plan), stages or (), strict=False)) if self.request.training else {}
        times = ({key: stage.forward for key, stage in of.items()}, {key: stage.backward for key, stage in of.items()})
        for key, seconds in rerun_seconds(plan, *times).items():
            found[self.device_of(key)] += seconds
        return np.array(list(found.values()), np.float64)

    def _shared_loads(self, plan: Plan, devices: Sequence[PartKey], stages: Sequence[StageCosts]) -> Any:
        """Return (d,) seconds of each device of each part, with its transfers and its share of the all-reduce."""
        request, replicas = self.request, [stage.replicas for stage in stages]
        rows = [{node: s / count for node, s in request.seconds.items()} for count in replicas]
        model = PlacementModel(request.flow, request.prices, rows)
        loads = model.loads(plan, devices, range(len(rows)), request.travel_of_replicas(replicas))
        run = self.run(stages)
        return loads if run is None else with_all_reduce(loads, run)

    def stages(self, plan: Plan) -> tuple[StageCosts, ...] | None:
        """Return the costs of the parts as stages, in run order.

        ``None`` if some node is in no part, or the graph has no sizes.
        """
        try:
            return self.request.stage_prices.of(plan)
        except (PlanError, GraphError) as error:
            if error.code not in ("SK102", "SK208"):
                raise
            return None

    def stages_with_cache(self, plan: Plan) -> tuple[StageCosts, ...]:
        """Return the costs of the parts as stages that hold the cache for which the plan leaves room as weights."""
        stages = self.request.stage_prices.of(plan)
        if not self.request.cache and self.request.steps is None:
            return stages
        return tuple(
            replace(stage, parameter_bytes=held.weights + held.cache, temporary_bytes=held.activations)
            for stage, held in zip(stages, self.request.held(plan), strict=True)
        )

    def run(self, stages: Sequence[StageCosts] | None) -> ScheduleRun | None:
        """Return the simulated step; ``None`` without a schedule."""
        if stages is None or self.request.schedule is None:
            return None
        return self.request.run(stages)

    def microbatches(self, stages: int) -> int:
        """Return the microbatches of a step of so many stages; 1 without a schedule."""
        return microbatches_of(self.request.microbatches, stages) if self.request.schedule else 1

    def _held(
        self, plan: Plan, stages: tuple[StageCosts, ...] | None, run: ScheduleRun | None
    ) -> tuple[ByteBreakdown, ...]:
        if stages is None:
            return ()
        if run is not None:
            return tuple(map(ByteBreakdown.of_rank, run.memory))
        if isinstance(self.request, DeviceRequest) or self.visits:
            return self.request.held(plan, self.devices_of(plan), self.device_of)
        return self.request.held(plan)

    def excess(self, figures: StageFigures) -> int:
        """Return the most bytes by which a rank exceeds its memory; 0 if the plan fits."""
        limits = self.limits(len(figures.held))
        pairs = zip(figures.peaks, limits, strict=True)
        return max([0, *(peak - limit for peak, limit in pairs if limit is not None)])


def _are_visits(plan: Plan) -> bool:
    """Whether the keys of the parts name fewer devices than there are parts."""
    pairs = [key for key in plan.parts if isinstance(key, tuple) and len(key) == 2 and type(key[1]) is int]
    return len(pairs) == len(plan.parts) and len({key[0] for key in pairs}) < len(pairs)


def _cache(flow: Dataflow, request: PlanRequest) -> Mapping[Node, int]:
    """Return the bytes of cache for which a plan for inference leaves room."""
    if not request.tokens:
        return {}
    by_name, given = {node.name: node for node in flow.nodes}, request.cache
    try:
        known = {by_name[n]: nbytes for n, nbytes in given.items()} if given is not None else cache_bytes(flow)
    except SplitError:
        return {}
    return {node: request.tokens * nbytes for node, nbytes in known.items()}


# One measure for the plans of any policy: whether they fit, and their bottleneck, simulated step, peak and traffic.


@dataclass(frozen=True, eq=False)
class Scoring:
    """Scores plans of one graph as the stages of one pipeline, in execution order.

    Parts ``(key, 0), (key, 3) ...``, as `splitkit.extend.refine` makes them, are visits of one device: the device's
    load is the sum over all of them.

    Attributes:
        demand: the request; its memory is what each rank has, and a plan has as many ranks as parts.
    """

    demand: StageRequest

    def of(self, plan: Plan) -> StageFigures:
        """Return the figures of a plan that gives every node a part; without bytes if neither schedule nor memory is
        given.

        Raises:
            PlanError: SK209 when it does not; SK203 when parts depend on each other in a cycle.
            ScheduleError: SK330 when the schedule does not allow that many parts.
            NoPlanError: SK303 when memory is given for another number of ranks, when parts that are visits of one
                device would run under a schedule, or when parts have replicas.
        """
        demand, visits = self.demand, _are_visits(plan)
        require_parts(demand.flow, plan)
        if any(part.replicas > 1 for part in plan.parts.values()):
            reason = "it has parts of several replicas, and plans are compared as parts of one device each"
            raise NoPlanError("SK303", reason, "Leave replicas out.")
        if visits and demand.schedule is not None:
            parts = run_order(demand.flow, plan)
            twice = ", ".join(str(key) for key in parts if key[0] == parts[0][0])  # type: ignore[index]
            raise NoPlanError(
                "SK303",
                f"parts {twice} ... are visits to one device, which no schedule runs",
                "Use one part per device.",
            )
        figures, memory = StagePricing(demand, visits=visits).figures(plan), demand.memory
        if demand.schedule is None and memory is None:
            return replace(figures, held=())
        if isinstance(memory, Sequence) and not isinstance(memory, str) and len(memory) != len(figures.held):
            raise NoPlanError(
                "SK303", f"memory is given for {len(memory)} ranks, the plan has {len(figures.held)}", "Give one size."
            )
        return figures

    def missing(self, figures: StageFigures) -> int:
        """Return the most bytes that a rank lacks; 0 if the plan fits."""
        return StagePricing(self.demand).excess(figures)

    def least(self, parts: int) -> float:
        """Return a lower bound on the bottleneck of ``parts`` ranks: a fair share of the work, or one whole node."""
        seconds = self.demand.seconds.values()
        ranks = max(self.demand.ranks(parts)) + 1
        return max(sum(seconds) / ranks * (1 - 1e-12), max(seconds, default=0.0))
