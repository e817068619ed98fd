"""The policy `MemoryBudget`: the fewest parts that fit the memory of their devices, with the least traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitkit._gc import paused_collector
from splitkit.checks import count, memory_of, settle
from splitkit.costs import Costs
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, enough_nodes, module_path
from splitkit.pipeline.purpose import counted_optimizer, purpose
from splitkit.pipeline.schedules import schedule_named, words_of
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer
from splitkit.search.memory_search import MemoryParts, MemorySearch
from splitkit.search.request import StageRequest
from splitkit.short_repr import options
from splitkit.units import size


@dataclass(frozen=True)
class MemoryBudget:
    """Make the fewest consecutive parts whose peaks fit the memory of their devices.

    The peak of a part is what `splitkit.stage_costs` computes: parameters, their gradients and the optimizer's state,
    saved bytes times the microbatches in flight, and the largest amount that forward or backward hold in addition. In
    the 1F1B schedule of n stages the first stage holds n microbatches and the last stage one. Without an optimizer, the
    peak consists of parameters and activations.

    In the graph's own order, the fewest parts are found exactly, and among these plans the one with the least traffic
    (forward and back). Eight more topological orders are tried (fewer for graphs of more than 2,000 nodes), and the
    best plan wins; the peaks of its parts are computed again, each in the graph's own order. For graphs of up to 40
    nodes, all cuts of all orders are tried if there are at most a few thousand parts: then the fewest parts (with
    ``parts``, the least traffic) are proven. Otherwise the bound holds for any order: all bytes that must be held,
    divided by the memory of the devices. The bound on traffic is weak: the smallest value per border.

    Attributes:
        memory: the bytes of each device (an int, or ``"80GiB"``), or a sequence of sizes for devices 0, 1, ..., which
            also limits the number of parts.
        parts: the number of parts; ``None``: as few as possible.
        schedule: the schedule of the pipeline whose stages are the parts, with one stage per rank: ``"1f1b"``,
            ``"gpipe"``, ``"eager-1f1b"``. ``None``: one microbatch.
        microbatches: the microbatches in a step of the schedule; ``None``: two per part.
        optimizer: as in `Stages`: ``"adam"``, ``"momentum"``, ``"sgd"``; ``None``: inference, or Adam with a schedule.
    """

    memory: int | str | Sequence[int | str]
    parts: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    optimizer: Optimizer = None

    def __post_init__(self) -> None:
        check_stage_optimizer(self.optimizer)
        for name in ("parts", "microbatches"):
            settle(self, name, count, optional=True)
        if self.schedule is None and self.microbatches is not None:
            raise PolicyError(
                "SK302", f"MemoryBudget: microbatches={self.microbatches} without a schedule", 'Add schedule="1f1b".'
            )
        sizes = self.sizes(self.parts or 1)
        if self.parts is not None and len(sizes) < self.parts:
            raise PolicyError(
                "SK302", f"MemoryBudget: {self.parts} parts for {len(sizes)} devices", "Give a size for each part."
            )
        if self.schedule is not None:
            self._require_schedule(self.schedule)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return the bytes of the first ``count`` devices, or of all if there are fewer."""
        given: object = self.memory
        several = isinstance(given, Sequence) and not isinstance(given, str)
        known = memory_of(self, self.memory, len(self.memory) if several else count)  # type: ignore[arg-type]
        if None in known or not known:
            raise PolicyError("SK302", f"MemoryBudget(memory={given!r})", 'Give the bytes of each device, or "80GiB".')
        return tuple(nbytes for nbytes in known if nbytes is not None)[:count]

    def _require_schedule(self, schedule: str) -> None:
        if not schedule_named(schedule).is_single:
            raise PolicyError(
                "SK302",
                f"MemoryBudget: the schedule {schedule} puts several parts on one device",
                f"Use {words_of(lambda known: known.is_single)}, which put one there.",
            )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``0, 1, ...``, each on the device of the same number.

        Raises:
            NoPlanError: SK303 if no plan fits; it names what does not fit, and what would.
            CostError: SK323 for a joint graph.
            ScheduleError: SK330 if the schedule needs more microbatches.
        """
        enough_nodes(flow, self.parts or 1)
        with paused_collector():
            search = self._search(flow, costs)
            found = search.best()
            if found is None:
                raise self._no_plan(search, costs)
            return self._plan(search, found)

    def _search(self, flow: Dataflow, costs: Costs) -> MemorySearch:
        optimizer = counted_optimizer(self.optimizer, self.schedule, costs)
        demand = StageRequest(self, flow, costs, self.schedule, self.microbatches, optimizer=optimizer)
        return MemorySearch(demand, self.parts, self.sizes)

    def _plan(self, search: MemorySearch, found: MemoryParts) -> Plan:
        held = zip(found.held, found.memory, strict=True)
        full = [one.total / memory if memory else 1.0 for one, memory in held]
        limiting = full.index(max(full))
        labels = {node: part for part, nodes in enumerate(found.parts) for node in nodes}
        count = len(found.parts)
        least = search.at_least(count)
        plan = Plan.of({node: labels[node] for node in search.flow.nodes})
        note = (
            f"{parts_of(count)}, at least {least} needed; {purpose(search.optimizer)}; part {limiting} is fullest: "
            f"{found.held[limiting].told} of {size(found.memory[limiting])}; {size(search.demand.traffic(plan))} cross"
        )
        if self.parts is None:
            claim = Claim("parts", count, least, found.solver, limiting)
        else:
            note += f", which is {size(found.traffic)} over all borders, forward and back"
            claim = Claim("traffic", found.traffic, search.least_traffic(count), found.solver, limiting)
        return replace(plan, note=note, claim=claim)

    def _no_plan(self, search: MemorySearch, costs: Costs) -> NoPlanError:
        """Return the error that says what does not fit, and what would."""
        node, alone = search.largest_unit()
        best = max(self.sizes(self.parts or len(search.flow.nodes)))
        if alone > best:
            where = f" in {module_path(node)}" if module_path(node) else ""
            reason, nodes = f"{node.name}{where} takes {size(alone)} at least, and a device has {size(best)}", [node]
        elif self.parts is None and not search.tried:
            least, nodes = search.fewest_possible(), []
            there = len(self.sizes(len(search.flow.nodes)))
            reason = f"the parts together need the memory of {least} such devices at least, and there are {there}"
        else:
            count = self.parts or search.tried
            reason, nodes = (
                f"no plan of {parts_of(count, upto=self.parts is None)} was found that fits {self._limits()}",
                [],
            )
        others = "".join(f", {option}" for option in options(self, "memory", "parts"))
        ways = [
            f"MemoryBudget({need}{others}) would do for {parts_of(count)} ({size(need)})"
            for count, need in search.needs()
        ]
        ways += self._others(search, costs)
        remedy = "; ".join(ways) + "." if ways else "Give more memory."
        return NoPlanError("SK303", f"{reason}, for {purpose(search.optimizer)}", remedy, nodes)

    def _limits(self) -> str:
        shown = size(self.sizes(1)[0]) if isinstance(self.memory, int | str) else f"{len(self.memory)} devices"
        flight = f" with {self.schedule}" if self.schedule else ""
        return f"{shown}{flight}"

    def _others(self, search: MemorySearch, costs: Costs) -> list[str]:
        """Return texts about other parameters with which a plan would fit."""
        ways = []
        most = max(self.sizes(self.parts or len(search.flow.nodes)))
        if self.parts is not None or not isinstance(self.memory, int | str):
            found = replace(self, memory=most, parts=None)._search(search.flow, costs).best()
            if found is not None and len(found.parts) > len(self.sizes(self.parts or len(search.flow.nodes))):
                ways.append(f"{parts_of(len(found.parts))} of {size(most)} would fit")
        if self.schedule is not None:
            other = replace(self, schedule=None, microbatches=None, optimizer=search.optimizer)
            if (found := other._search(search.flow, costs).best()) is not None:
                ways.append(f"one microbatch at a time would fit in {parts_of(len(found.parts))}")
        if search.optimizer is not None:
            other = replace(self, optimizer=None, schedule=None, microbatches=None)
            if (found := other._search(search.flow, costs).best()) is not None:
                ways.append(f"inference, without optimizer and schedule, would fit in {parts_of(len(found.parts))}")
        return ways


def parts_of(count: int, upto: bool = False) -> str:
    """Return ``1 part``, ``2 parts`` or ``up to 3 parts``."""
    most = "up to " if upto and count > 1 else ""
    return f"{most}{count} part{'s' if count > 1 else ''}"
