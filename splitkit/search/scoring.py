"""One score for the plans of any policy: whether they fit, and their bottleneck, simulated step, peak and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from splitkit.costs import unit_of
from splitkit.errors import NoPlanError
from splitkit.pipeline.defaults import by_rank
from splitkit.pipeline.stage_prices import peaks_of_visits, run_order
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import require_parts
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest
from splitkit.units import duration, size


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
