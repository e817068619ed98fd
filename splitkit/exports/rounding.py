"""Round a plan to cuts that a format can name: an exact dynamic program over these cuts, and what the rounding costs.

The objective is the plan's own: the load of the slowest stage, with the same prices and links; of the plans that reach
it, the one with the least sum of squared loads. Where memory is given, a stage that turns out not to fit, by its
simulated peak, is excluded at its place, and the program runs again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from splitkit.checks import nbytes, shown
from splitkit.costs import Costs
from splitkit.errors import CostError, NoPlanError, PlanError
from splitkit.exports.carried_plan import LayerSequence
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.purpose import counted_optimizer
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_prices import check_stage_optimizer, run_order
from splitkit.plans.parts import Part
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer, require_costs
from splitkit.search.device_search import DeviceRequest
from splitkit.search.placement_model import PlacementModel
from splitkit.search.plan_figures import StagePricing
from splitkit.search.request import StageRequest
from splitkit.solvers.line.path_bound import least_sum
from splitkit.units import duration, size

_SLACK = 1e-9  # relative: two sums of the same prices in another order


@dataclass(frozen=True)
class PlanPrice:
    """What a plan costs, simulated.

    Attributes:
        load: seconds of the slowest rank, with its transfers, per microbatch.
        peak: bytes of the fullest rank.
        step: seconds of the step; 0 without a schedule.
        traffic: bytes that cross, each value once for each stage that reads it.
        unit: the unit of the times.
        fits: whether all ranks are within the memory that was given.
    """

    load: float
    peak: int
    step: float
    traffic: int
    unit: str = "s"
    fits: bool = True

    def __str__(self) -> str:
        step = f", step {duration(self.step, self.unit)}" if self.step else ""
        return (
            f"slowest stage {duration(self.load, self.unit)}{step}, peak {size(self.peak)}, {size(self.traffic)} sent"
        )


@dataclass(frozen=True)
class Rounding:
    """The price of rounding a plan.

    Attributes:
        before: the plan as it was made.
        after: the plan that the format carries.
        moved: how many nodes change their stage; 0 if the plan already cuts where the format can.
        assumed: for what the peaks are, in words, if the plan does not say what it is for.
    """

    before: PlanPrice
    after: PlanPrice
    moved: int
    assumed: str = ""

    @property
    def ratio(self) -> float:
        """The slowest stage after rounding, as a multiple of the slowest before."""
        return self.after.load / self.before.load if self.before.load else 1.0

    def __str__(self) -> str:
        if not self.moved:
            return f"the plan already cuts where the format can: {self.after}{self.assumed}"
        low, unit = self.before, self.before.unit
        lines = [
            f"slowest stage {duration(low.load, unit)} -> {duration(self.after.load, unit)} ({self.ratio - 1:+.1%})"
        ]
        if low.step:
            lines.append(f"step {duration(low.step, unit)} -> {duration(self.after.step, unit)}")
        lines.append(f"peak {size(low.peak)} -> {size(self.after.peak)}")
        lines.append(f"sent {size(low.traffic)} -> {size(self.after.traffic)}")
        nodes = "node moves" if self.moved == 1 else "nodes move"
        return f"rounded to modules, {self.moved} {nodes}: {', '.join(lines)}{self.assumed}"


@dataclass(frozen=True, eq=False)
class PlanPricing:
    """Prices plans of one graph alike.

    Attributes:
        pricing: the graph, its prices, the schedule, the links and the devices, with the memory that they had.
        order: the order of actions; ``None`` without a schedule.
        parts: the plan's parts in the order in which they run, which are the stages.
        memory: the bytes that each rank may take; ``None``: no limit.
    """

    pricing: StagePricing
    order: PipelineOrder | None = None
    parts: tuple[Part, ...] = ()
    memory: int | None = None

    @property
    def request(self) -> StageRequest:
        """The graph, its prices, the schedule and the links."""
        return self.pricing.request

    def price(self, plan: Plan) -> PlanPrice:
        """Return the price of a plan."""
        return self.priced(plan)[0]

    def priced(self, plan: Plan) -> tuple[PlanPrice, tuple[int, ...]]:
        """Return the price of a plan, and the peak of each rank; its stages have the devices of the plan's own."""
        request, keys = self.request, run_order(self.request.flow, plan)
        on = {key: part.planned_on for key, part in zip(keys, self.parts, strict=False) if part.planned_on is not None}
        figures = replace(self.pricing, on=on).figures(plan)
        step, peaks = 0.0, figures.peaks
        if self.order is not None:
            stages = request.stage_prices.of(plan)
            run = simulate_schedule(stages, self.order, self.order.microbatches, links=request.links)
            step, peaks = run.seconds, run.peaks
        fits = self.memory is None or max(peaks) <= self.memory
        unit = self.pricing.unit
        return PlanPrice(figures.value, max(peaks), step, figures.traffic, unit, fits), peaks


def pricing_of(
    flow: Dataflow,
    plan: Plan,
    costs: Costs,
    order: PipelineOrder | None = None,
    memory: int | str | None = None,
    links: str | None = None,
    optimizer: Optimizer = None,
) -> PlanPricing:
    """Return the way in which a plan and its rounding are priced alike: for what the plan was made, if not said here.

    As everywhere, a schedule or prices of backward mean training.
    """
    check_stage_optimizer(optimizer)
    if links is not None and not isinstance(links, str):
        raise CostError(
            "SK322", f"links are {shown(links)}", "Name a preset, such as nvlink4: exports assume equal links."
        )
    limit = None if memory is None else nbytes("export", "memory", memory, 1)
    require_costs(costs)
    asked, known = plan.request, schedule_of(order) if order is not None else None
    held = counted_optimizer(optimizer or asked.optimizer, None if order is None else order.name, costs)
    asked = replace(
        asked,
        purpose="training" if held else "inference",
        optimizer=held,
        schedule=known.name if known is not None else None,
        microbatches=order.microbatches if order is not None and known is not None else None,
        links=links or asked.links,
    )
    made = StagePricing.of(flow, plan, costs, request=asked)
    back = order is not None or held is not None
    parts = tuple(plan.parts[key] for key in run_order(flow, plan))
    return PlanPricing(replace(made, request=replace(made.request, backward=back)), order, parts, limit)


def round_plan(pricing: PlanPricing, sequence: LayerSequence, plan: Plan, keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the cuts of a sequence that come nearest to a plan: the numbers of layers before each cut.

    Args:
        pricing: prices, memory and schedule.
        sequence: the layers between which cuts may fall.
        plan: the plan; if it cuts between layers already, and fits, these cuts are returned.
        keys: its parts in the order in which they run.

    Raises:
        PlanError: SK522 if there are fewer places for a cut than the plan needs.
        NoPlanError: SK303 if no plan of whole modules fits the memory.
    """
    own = sequence.cuts_of(plan, keys)
    if own is not None and pricing.price(plan).fits:
        return own
    return best_cuts(pricing, sequence, len(keys))


def best_cuts(pricing: PlanPricing, sequence: LayerSequence, stages: int) -> tuple[int, ...]:
    """Return the cuts into this many stages whose slowest stage is fastest, within the memory; errors as above."""
    if len(sequence.borders) < stages - 1:
        raise PlanError(
            "SK522",
            f"the plan has {stages} stages, and the model can be cut into {len(sequence.borders) + 1} between modules",
            f"Plan with at most {len(sequence.borders) + 1} stages, or export to a format that cuts inside layers.",
        )
    loads = loads_on_devices(sequence, pricing, stages)
    while True:
        cuts = cheapest_cuts(loads, sequence.borders)
        if cuts is None:
            raise NoPlanError(
                "SK303",
                f"no {stages} stages of whole modules fit {size(pricing.memory or 0)} for each rank",
                "Give more memory, or plan with more stages.",
            )
        too_large = _too_large(pricing, sequence, cuts)
        if not too_large:
            return cuts
        ends = [0, *cuts, len(sequence.layers)]
        for stage in too_large:
            loads[stage, ends[stage], ends[stage + 1]] = np.inf


def loads_on_devices(sequence: LayerSequence, pricing: PlanPricing, stages: int) -> Floats:
    """Return (stages, n + 1, n + 1) seconds of each stage from layer i to layer j, on that stage's device."""
    request = pricing.request
    if not isinstance(request, DeviceRequest):
        return np.stack([interval_loads(sequence, request, request.seconds)] * stages)
    known = [interval_loads(sequence, request, seconds) for seconds in request.kind_seconds]
    kinds = dict(zip(request.keys, request.kinds, strict=True))
    return np.stack([known[kinds[part.planned_on]] for part in pricing.parts])


def _too_large(pricing: PlanPricing, sequence: LayerSequence, cuts: Sequence[int]) -> list[int]:
    """Return the stages whose rank does not fit its memory."""
    limit = pricing.memory
    if limit is None:
        return []
    price, peaks = pricing.priced(sequence.plan(cuts, ""))
    if price.fits:
        return []
    if pricing.order is not None and len(pricing.order.ranks) < len(pricing.order.rank_of):
        raise NoPlanError(
            "SK303",
            f"the plan of whole modules with the fastest slowest stage takes {size(price.peak)}, and {size(limit)} are "
            "given; ranks have several stages under this schedule, and no other plan is searched",
            "Give more memory, plan with more stages, or use a schedule with one stage on each rank.",
        )
    return [rank for rank, peak in enumerate(peaks) if peak > limit]


def cheapest_cuts(loads: Floats, borders: Sequence[int]) -> tuple[int, ...] | None:
    """Return the cuts with the least greatest load, and among these with the least sum of squares; None if none exist.

    Args:
        loads: (stages, n + 1, n + 1) seconds of each stage from layer i to layer j, infinite where it must not be; none
            is empty.
        borders: where cuts may fall, increasing.
    """
    ends = np.array([0, *borders, loads.shape[1] - 1])
    between, free = loads[:, ends][:, :, ends], np.zeros(len(ends))
    known = np.unique(between[np.isfinite(between)])
    least = bisect_left(known, True, key=lambda most: np.isfinite(least_sum(between, free, most).value))
    if least == len(known):
        return None
    found = least_sum((between / (known[least] or 1.0)) ** 2, free, (1 + _SLACK) ** 2)
    return tuple(int(ends[i]) for i in found.ends[:-1])


# The load of every run of consecutive layers as a stage: its work, and the values that it sends and receives.


Floats = npt.NDArray[np.float64]


def interval_loads(sequence: LayerSequence, request: StageRequest, seconds: Mapping[Node, float]) -> Floats:
    """Return (n + 1, n + 1) seconds of the layers from i to j, exclusive, as one stage; infinite unless i < j.

    A load is the work of the nodes, the work of the shared nodes that the stage needs, and each value that crosses the
    stage's borders once. Links that are not alike count as the one between the first two devices.

    Args:
        sequence: the layers.
        request: the links, and whether gradients come back.
        seconds: the price of each node on the stage's device.
    """
    count = len(sequence.layers)
    work = np.concatenate([[0.0], np.cumsum([sum(seconds[n] for n in layer.nodes) for layer in sequence.layers])])
    total = np.array(work[None, :] - work[:, None])
    for node, layers in sequence.readers.items():
        _add(total, layers, seconds[node], whole=True)
    ends = list(request.keys) if isinstance(request, DeviceRequest) else list(range(2))
    travel = request.travel(ends[:2])
    if travel is not None:
        model = PlacementModel(sequence.flow, request.costs, [seconds])
        prices = travel.seconds(model.value_bytes)
        for (_, pins), price in zip(model.values, prices.tolist(), strict=True):
            maker = model.units[pins[0]]
            if maker in sequence.number:  # a shared value never crosses
                nodes: Any = (model.units[pin] for pin in pins)
                _add(total, {sequence.number[n] for n in nodes if n in sequence.number}, price, whole=False)
    inside = np.arange(count + 1)
    return np.where(inside[:, None] < inside[None, :], total, np.inf)


def _add(total: Floats, pins: Iterable[int], price: float, *, whole: bool) -> None:
    """Add a price to the runs that have some of the pins; without ``whole`` only if they do not have all.

    A run from i to j has none of the pins if two neighbouring pins p and q enclose it: i > p and j <= q.
    """
    ordered, last = sorted(pins), len(total) - 1
    total += price
    for before, after in zip([-1, *ordered], [*ordered, last], strict=True):
        total[before + 1 : after + 1, : after + 1] -= price
    if not whole and ordered:
        total[: ordered[0] + 1, ordered[-1] + 1 :] -= price
