"""The score of a plan with replicated stages: loads, step, peaks, the order of preferences, and its claim in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from torch.fx import Node

from splitkit.costs import Links, unit_of
from splitkit.pipeline.memory import ByteBreakdown, ring_seconds
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.plans.parts import Claim, above_mean, evenness
from splitkit.plans.record import Plan
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.request import StageRequest
from splitkit.search.stages.memory_fit import named
from splitkit.search.stages.stage_search import NEAR, preferred
from splitkit.solvers.placement.problem import Floats
from splitkit.units import duration, size


def replicas_of(plan: Plan) -> list[int]:
    """Return the replicas of each stage, from first to last."""
    return [plan.parts[key].replicas for key in sorted(plan.parts)]  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class ReplicaScoring:
    """Scores many plans whose stages are called ``0 ..``.

    Attributes:
        demand: the request; with a schedule it says how many microbatches.
        devices: how many devices there are; stages take them in a row, the first stage the first ones.
        degrees: the allowed numbers of replicas of a stage, increasing.
        tolerance: relative; how much slower than the best the bottleneck may be where that balances the devices, or how
            much less balanced where fewer bytes cross.
        limits: bytes of each device, None for no limit.
    """

    demand: StageRequest
    devices: int
    degrees: tuple[int, ...]
    tolerance: float
    limits: tuple[int | None, ...]

    @cached_property
    def links(self) -> ReplicaLinks | None:
        """The links between all devices; None where transfers are free."""
        links, training = self.demand.links, self.demand.training
        return None if links is None else ReplicaLinks.over(links, range(self.devices), training=training)

    @cached_property
    def placing(self) -> PlacementModel:
        """The units, each computed once; one row of prices for one device, and one for each number of replicas."""
        whole = self.demand.seconds
        rows = [whole, *({node: s / degree for node, s in whole.items()} for degree in self.degrees)]
        return PlacementModel(self.demand.flow, self.demand.prices, rows, together=self.demand.inseparable)

    def room(self, before: int, replicas: int) -> float:
        """Return the bytes of each device of a stage behind ``before`` devices; infinite for no limit."""
        given = (limit for limit in self.limits[before : before + replicas] if limit is not None)
        return float(min(given, default=np.inf))

    def loads(self, plan: Plan) -> Floats:
        """Return (k,) seconds of each device of each stage for its share of a microbatch: work, transfers, and with a
        schedule the all-reduce of gradients divided by the microbatches of a step.
        """
        replicas = replicas_of(plan)
        kinds = [1 + self.degrees.index(count) for count in replicas]
        travel = None if self.links is None else self.links.travel(replicas)
        total = self.placing.loads(plan, range(len(replicas)), kinds, travel)
        if self.links is None or self.demand.schedule is None or max(replicas) == 1:
            return total
        for stage, (end, costs) in enumerate(zip(accumulate(replicas), self._costs(plan), strict=True)):
            if replicas[stage] > 1 and costs.gradient_bytes:
                nbytes = np.array([costs.gradient_bytes], np.float64)
                ring = self.links.ring(end - replicas[stage], replicas[stage], nbytes)
                total[stage] += float(ring[0]) / self.microbatches
        return total

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; 1 without a schedule."""
        return self.demand.microbatches or 1

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        """Return the peak bytes of each device of each stage; without a schedule of one microbatch."""
        if self.demand.schedule is not None:
            return self._run(plan).peaks
        return tuple(ByteBreakdown.of_stage(costs).total for costs in self._costs(plan))

    def over(self, plan: Plan) -> float:
        """Return the most bytes that a device lacks; 0 or less if every limited device is large enough."""
        if not self.limited:
            return -np.inf
        replicas = replicas_of(plan)
        befores = [end - count for end, count in zip(accumulate(replicas), replicas, strict=True)]
        rooms = map(self.room, befores, replicas)
        return max(peak - room for peak, room in zip(self.peaks(plan), rooms, strict=True))

    @property
    def limited(self) -> bool:
        """Whether any device has a limit."""
        return any(limit is not None for limit in self.limits)

    def preferred(self, plans: Sequence[Plan]) -> Plan:
        """Return the best of several plans: those near the minimum of each measure in turn, then the first."""
        near = min(self.tolerance, NEAR)
        tolerances = (self.tolerance,) * 2 if self.demand.schedule is None else (near, self.tolerance, near)
        return plans[preferred([self._measures(plan) for plan in plans], tolerances)]

    def _measures(self, plan: Plan) -> tuple[float, ...]:
        """Return what to minimise, the most important first.

        The measures are the largest load of a device, the sum of squared loads, and the traffic. With a schedule the
        step replaces the load as the first measure, since fewer stages fill sooner; the peak comes before the traffic.
        """
        loads, replicas = self.loads(plan), np.array(replicas_of(plan))
        squares = float((replicas * np.square(loads)).sum())
        if self.demand.schedule is None:
            return float(loads.max()), squares, self._traffic(plan)
        run = self._run(plan)
        return run.seconds, squares, float(max(run.peaks)), self._traffic(plan)

    def _traffic(self, plan: Plan) -> float:
        """Return the bytes that cross per microbatch, with its share of the gradient all-reduce in training."""
        crossed = float(self.demand.traffic(plan))
        if self.demand.schedule is not None:
            costs = self._costs(plan)
            crossed += sum(2 * (c.replicas - 1) * c.gradient_bytes for c in costs) / self.microbatches
        return crossed

    def described(self, plan: Plan, bound: float) -> Plan:
        """Return the plan with its claim and a note."""
        loads, replicas = self.loads(plan), replicas_of(plan)
        busiest, used = int(loads.argmax()), sum(replicas)
        value = float(loads[busiest])
        of_devices = [*np.repeat(loads, replicas).tolist(), *[0.0] * (self.devices - used)]
        solver, even = "replicated chains", evenness(of_devices)
        claim = Claim("bottleneck", value, min(value, bound), solver, busiest, max(1e-9, self.tolerance), even)
        load = duration(value, unit_of(self.demand.costs))
        where = f"{_stages(replicas)} on {used} of {self.devices} devices"
        words = [f"{where}. {claim.told(load, above_mean(value, sum(of_devices) / self.devices))}"]
        words += _limits(self.demand.seconds, self.devices, self.degrees[-1])
        if len(set(replicas)) > 1:
            runs = f"replicas=({min(replicas)},) gives a plan that they run"
            words.append(f"ranks refuse stages with different numbers of replicas (SK330): {runs}")
        if self.demand.schedule is not None:
            run = self._run(plan)
            words.append(f"{run.order.name} of {run.order.microbatches} microbatches: {run.figures}")
        elif self.limited:
            peaks = self.peaks(plan)
            words.append(f"peak {size(max(peaks))} on each device of stage {peaks.index(max(peaks))}")
        return replace(plan, note="; ".join(words), claim=claim)

    def _run(self, plan: Plan) -> ScheduleRun:
        return self.demand.run(self._costs(plan))

    def _costs(self, plan: Plan) -> tuple[StageCosts, ...]:
        return self.demand.stage_prices.of(plan)


def _stages(replicas: Sequence[int]) -> str:
    """Return text such as ``3 stages (2 x1, 1 x4)``."""
    counts = ", ".join(f"{count} x{degree}" for degree, count in sorted(Counter(replicas).items()))
    return f"{len(replicas)} stage{'s' * (len(replicas) > 1)} ({counts})"


def _limits(seconds: Mapping[Node, float], devices: int, most: int) -> Iterator[str]:
    """Name the op that keeps so many devices from being faster than fewer."""
    heaviest, total = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    share = seconds[heaviest] / total if total else 0.0
    if share / most * devices > 1 + NEAR:
        yield f"{named(heaviest)}, one op, takes {share:.0%}: with more replicas than {most} it would be faster"


# The price of links for replicated stages: transfers of values, and the all-reduce of gradients.


@dataclass(frozen=True, eq=False)
class ReplicaLinks:
    """Links between devices that are assigned to stages in a row.

    A message between stages of a and b replicas takes as long as the largest share that one device sends or receives,
    1 / min(a, b), over the slowest link between the two stages; a ring runs at the pace of its slowest link.

    Attributes:
        latency: (n, n) seconds.
        bandwidth: (n, n) bytes per second; infinite on the diagonal.
        again: how often a value crosses: twice in training.
    """

    latency: Floats
    bandwidth: Floats
    again: int = 1

    @classmethod
    def over(cls, links: Links, devices: Sequence[Hashable], *, training: bool) -> ReplicaLinks:
        """Return the links between these devices (SK322 if two have none)."""
        return cls(*links.to_arrays(devices), 2 if training else 1)

    def seconds(self, messages: Floats, before: int, left: int, right: int) -> Floats:
        """Return (p,) seconds of (2, p) message counts and bytes over a border behind ``before`` devices, between
        stages with ``left`` and ``right`` replicas.
        """
        here, there = slice(before - left, before), slice(before, before + right)
        wait, speed = self._slowest(here, there, min(left, right))
        total: Floats = self.again * (wait * messages[0] + messages[1] / speed)
        return total

    def ring(self, before: int, replicas: int, nbytes: Floats) -> Floats:
        """Return the seconds in which the replicas of a stage behind ``before`` devices all-reduce ``nbytes`` each."""
        own = np.arange(before, before + replicas)
        ahead = np.roll(own, -1)
        slowest = float(self.latency[own, ahead].max()), float(self.bandwidth[own, ahead].min())
        return np.array([ring_seconds(float(n), replicas, *slowest) for n in nbytes.tolist()])

    def travel(self, replicas: Sequence[int]) -> TransferTimes:
        """Return the price of values between stages with these replicas, as if all took turns on one link."""
        ends = list(accumulate(replicas))
        places = [slice(end - count, end) for end, count in zip(ends, replicas, strict=True)]
        latency, bandwidth = np.zeros((len(ends),) * 2), np.full((len(ends),) * 2, np.inf)
        for i, here in enumerate(places):
            for j, there in enumerate(places):
                if i != j:
                    pair = self._slowest(here, there, min(replicas[i], replicas[j]))
                    latency[i, j], bandwidth[i, j] = pair
        return TransferTimes(latency, bandwidth, self.again)

    def _slowest(self, here: slice, there: slice, shares: int) -> tuple[float, float]:
        return float(self.latency[here, there].max()), float(self.bandwidth[here, there].min()) * shares
