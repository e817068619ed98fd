"""Moves nodes of a stage to a neighbour stage, with all that must go along, and prices the plan that results.

Moved to the next stage, a node takes along what reads it in its own stage; moved to the stage before, what it reads
there. Nodes that must be in one stage go together. So every move leaves a plan that runs::

    stage 1:  a -> b -> c        b to stage 2: b and c;  b to stage 0: a and b
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Node

from splitkit.graph.dataflow import crossing_values, waits_for
from splitkit.pipeline.inseparable_nodes import together_because
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.search.devices.device_request import DeviceRequest
from splitkit.search.placement_model import PlacementModel
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.studies.explanation.folded_names import folded_modules

_PRICED = 24
"""How many of the moves are priced exactly: those that look best by the work of both stages and what crosses."""
_EACH = 3  # of one border in one direction


@dataclass(frozen=True)
class StageMove:
    """Nodes that move to a neighbour stage, and what the plan then costs.

    Attributes:
        nodes: the names of the nodes, in graph order.
        modules: the modules that compute them, folded.
        source: the part that they leave.
        target: the part that they go to.
        before: the figures of the plan.
        after: the figures of the plan with the move, priced from scratch.
        excess: the bytes by which a rank then exceeds its memory; 0 if the plan fits.
    """

    nodes: tuple[str, ...]
    modules: str
    source: PartKey
    target: PartKey
    before: StageFigures
    after: StageFigures
    excess: int

    @property
    def matters(self) -> bool:
        """Whether any figure changes."""
        before, after = self.before, self.after
        return (before.rank_loads, before.traffic, before.peaks) != (after.rank_loads, after.traffic, after.peaks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``change`` is what the move adds to each figure."""
        before, after = self.before, self.after
        return {
            "nodes": list(self.nodes),
            "modules": self.modules,
            "from": str(self.source),
            "to": str(self.target),
            "after": after.to_dict(),
            "change": {
                "bottleneck": after.value - before.value,
                "step": None if after.step is None or before.step is None else after.step - before.step,
                "traffic": after.traffic - before.traffic,
                "peak": max(after.peaks, default=0) - max(before.peaks, default=0),
            },
            "excess": self.excess,
        }


class _Shift(NamedTuple):
    """A shift of a border along the graph's order, with an estimate of what it costs.

    Attributes:
        seconds: about the bottleneck that results, without the change of transfers.
        nbytes: the bytes that cross the border then.
        leaving: how many nodes leave their part.
        at: the place of that part in the line of parts.
        step: 1 if the last nodes go to the next part, -1 if the first go to the part before.
    """

    seconds: float
    nbytes: float
    leaving: int
    at: int
    step: int


@dataclass(frozen=True, eq=False)
class StageMoves:
    """The moves between neighbour stages of a plan.

    Attributes:
        pricing: what prices plans.
        plan: the plan, whose parts run one after another.
        figures: its figures.
        by_traffic: whether bytes that cross decide between moves before the bottleneck.
    """

    pricing: StagePricing
    plan: Plan
    figures: StageFigures
    by_traffic: bool = False

    @cached_property
    def keys(self) -> list[PartKey]:
        """The parts in the order in which they run."""
        return self.pricing.parts_of(self.plan)

    @cached_property
    def members(self) -> dict[PartKey, list[Node]]:
        """Part -> the nodes that may move, in graph order: those that it alone computes."""
        found: dict[PartKey, list[Node]] = {key: [] for key in self.keys}
        for node in self.pricing.flow.nodes:
            if self.is_movable(node):
                found[self.plan.home(node)].append(node)
        return found

    def is_movable(self, node: Node) -> bool:
        """Whether one part computes a node; copies follow the nodes that read them."""
        places = self.plan.places.get(node, ())
        return len(places) == 1 and places[0] is not PARENT and node not in self.shared

    @cached_property
    def shared(self) -> frozenset[Node]:
        """The nodes that each part computes for itself where it reads them."""
        return frozenset(() if self._model is None else self._model.shared)

    @cached_property
    def _model(self) -> PlacementModel | None:
        """The model whose labels the plan is, in which shared nodes follow their readers; ``None`` if it is not."""
        request = self.pricing.request
        if all(len(self.plan.places.get(node, ())) == 1 for node in request.flow.nodes):
            return None
        model = PlacementModel(
            request.flow, request.prices, [request.seconds], repeat=True, together=request.inseparable
        )
        return model if self._labels(model, self.plan) == self._places(self.plan) else None

    def _labels(self, model: PlacementModel, plan: Plan) -> dict[Node, tuple[PartKey, ...]]:
        """Return the places of all nodes if units stay at their home in a plan."""
        number = {key: i for i, key in enumerate(self.keys)}
        homes = [plan.home(unit) for unit in model.units]
        if PARENT in homes:
            return {}
        labels = model.labels(np.array([number[key] for key in homes], np.int64), self.keys)
        return {n: tuple(keys) if isinstance(keys, list) else (keys,) for n, keys in labels.items()}

    def _places(self, plan: Plan) -> dict[Node, tuple[PartKey, ...]]:
        return {n: plan.places.get(n, ()) for n in self.pricing.flow.nodes}

    @cached_property
    def together(self) -> dict[Node, list[tuple[tuple[Node, ...], str]]]:
        """Node -> the sets that must be in one stage, with the reason; only sets that the plan keeps together."""
        found: dict[Node, list[tuple[tuple[Node, ...], str]]] = {}
        for nodes, why in self.pricing.flow.fact(together_because):
            if len({self.plan.places.get(node, ()) for node in nodes}) == 1:
                for node in nodes:
                    found.setdefault(node, []).append((nodes, why))
        return found

    @cached_property
    def readers(self) -> dict[Node, list[Node]]:
        """Node -> the placeable nodes that must run after it."""
        found: dict[Node, list[Node]] = {node: [] for node in self.pricing.flow.nodes}
        for node in self.pricing.flow.nodes:
            for read in waits_for(self.pricing.flow, node):
                found[read].append(node)
        return found

    def neighbour(self, key: PartKey, step: int) -> PartKey | None:
        """Return the part that runs next (1) or before (-1); ``None`` at the end of the line."""
        at = self.keys.index(key) + step
        return self.keys[at] if 0 <= at < len(self.keys) else None

    def closure(self, nodes: Sequence[Node], step: int) -> list[Node]:
        """Return what moves if some nodes of a part move to the next part (1) or the one before (-1)."""
        own, flow = self.plan.home(nodes[0]), self.pricing.flow
        found, stack = dict.fromkeys(nodes), list(nodes)
        while stack:
            node = stack.pop()
            beside = self.readers[node] if step > 0 else waits_for(flow, node)
            for other in (*beside, *(n for group, _ in self.together.get(node, ()) for n in group)):
                if other not in found and self.plan.home(other) == own and self.is_movable(other):
                    found[other] = None
                    stack.append(other)
        return sorted(found, key=flow.index.__getitem__)

    def reach(self, node: Node, step: int) -> set[Node]:
        """Return a node with all that must run after it (1), or before it (-1), in whatever part."""
        found, stack = {node}, [node]
        while stack:
            last = stack.pop()
            new = [
                n for n in (self.readers[last] if step > 0 else waits_for(self.pricing.flow, last)) if n not in found
            ]
            found.update(new)
            stack += new
        return found

    @property
    def orders_stages(self) -> bool:
        """Whether the stages have a fixed order on devices that are alike."""
        return not isinstance(self.pricing.request, DeviceRequest)

    def moved(self, nodes: Sequence[Node], target: PartKey) -> Plan:
        """Return the plan with the nodes in another part; copies of shared nodes follow their readers."""
        plan = self.plan.place(dict.fromkeys(nodes, (target,)))
        return plan if self._model is None else replace(plan, places=self._labels(self._model, plan))

    def move(self, node: Node, step: int) -> StageMove | None:
        """Return the move of a node to the neighbour part, with all that goes along.

        ``None`` if there is no such part, or nothing would be left in the node's own part.
        """
        source = self.plan.home(node)
        target = self.neighbour(source, step)
        if target is None or not self.is_movable(node):
            return None
        nodes = self.closure([node], step)
        return None if len(nodes) == len(self.members[source]) else self.priced(nodes, target)

    def priced(self, nodes: Sequence[Node], target: PartKey) -> StageMove:
        """Return a move with its price."""
        after = self.pricing.figures(self.moved(nodes, target))
        modules = folded_modules(nodes, self.pricing.flow)
        source = self.plan.home(nodes[0])
        excess = self.pricing.excess(after)
        return StageMove(tuple(n.name for n in nodes), modules, source, target, self.figures, after, excess)

    @cached_property
    def found(self) -> list[StageMove]:
        """The best moves, the best first: shifts of a border along the graph's own order, priced exactly.

        All shifts are looked at; those that look best are priced. Moves that change no figure, as those of views, are
        left out, and so is all of a plan that is not a line of stages of one device each.
        """
        if not self.are_stages:
            return []
        taken: dict[tuple[PartKey, ...], list[Node]] = {}
        counts: dict[tuple[PartKey, PartKey], int] = {}
        for shift in sorted(self._shifts()):
            source, target = self.keys[shift.at], self.keys[shift.at + shift.step]
            if counts.get((source, target), 0) == _EACH or len(taken) == _PRICED:
                continue
            own = self.members[source]
            whole = self.closure(own[-shift.leaving :] if shift.step > 0 else own[: shift.leaving], shift.step)
            if (source, target, *whole) not in taken and len(whole) < len(own):
                counts[source, target] = counts.get((source, target), 0) + 1
                taken[source, target, *whole] = whole
        moves = (self.priced(nodes, key[1]) for key, nodes in taken.items())
        return sorted((move for move in moves if move.matters), key=self._rank)

    def _rank(self, move: StageMove) -> tuple[float, ...]:
        """Return what decides between moves: the objective, the step, the squares of the loads, the traffic."""
        after = move.after
        squares = sum(load**2 for load in after.rank_loads)
        first = (after.traffic, after.value) if self.by_traffic else (after.value, after.step or 0.0)
        return bool(move.excess), *first, squares, after.traffic

    @cached_property
    def are_stages(self) -> bool:
        """Whether each part is a stage on one device and every node is in a part, so that moves can be priced."""
        pricing, nodes = self.pricing, self.pricing.flow.nodes
        placed = all(self.plan.places.get(node) and PARENT not in self.plan.places[node] for node in nodes)
        return placed and not pricing.replicated and len(pricing.devices_of(self.plan)) >= len(self.keys) > 1

    def _shifts(self) -> Iterator[_Shift]:
        """Yield the shifts of each border, in time linear in the graph."""
        pricing = self.pricing
        work = dict(zip(pricing.model.units, pricing.model.seconds[0].tolist(), strict=True))
        line = [node for key in self.keys for node in self.members[key]]
        crossing = crossing_values(pricing.flow, pricing.request.costs, line)[1].tolist()
        loads = [self.figures.loads.get(pricing.row_of(pricing.device_of(key)), 0.0) for key in self.keys]
        high = sorted(range(len(loads)), key=loads.__getitem__)[-3:]
        start = 0
        for at, key in enumerate(self.keys):
            nodes = self.members[key]
            for step in (1, -1):
                if not 0 <= at + step < len(self.keys):
                    continue
                others = max((loads[i] for i in high if i not in (at, at + step)), default=0.0)
                shifted = 0.0
                for count in range(1, len(nodes)):
                    shifted += work[nodes[-count if step > 0 else count - 1]]
                    border = start + (len(nodes) - count if step > 0 else count)
                    worst = max(others, loads[at] - shifted, loads[at + step] + shifted)
                    yield _Shift(worst, crossing[border], count, at, step)
            start += len(nodes)
