"""Divide a graph by a complete plan: find the nodes, inputs and outputs of each part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.plans.part_order import Crossing, crossings, part_order
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.short_repr import brief


@dataclass(frozen=True)
class Subgraph:
    """The nodes, inputs and outputs of one part; no graph is written yet.

    Inputs and outputs are in graph order, so that two parts agree on the order of the values they exchange. (For
    `split_module` they are in the order of first use, as torch has them.)

    Attributes:
        key: the key of the part.
        nodes: the nodes that it computes, attributes included, in graph order.
        inputs: the values that it takes from other parts or the parent.
        outputs: the values that other parts or the parent take from it.
    """

    key: PartKey
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    __repr__ = brief


def extract_subgraphs(flow: Dataflow, plan: Plan, as_met: bool = False) -> tuple[Subgraph | Node, ...]:
    """Return the subgraphs, and the parent's own nodes between them, in the order in which the parent runs them.

    With a value cross the symbols of its sizes, if its home or an input of the graph provides them.

    Args:
        flow: facts about the graph.
        plan: a complete plan.
        as_met: order inputs by first use and outputs by first crossing, instead of by the graph.

    Raises:
        CycleError: SK203 if parts depend on each other in a cycle.
    """
    crossing = crossings(plan.places)
    borders = _Borders(flow, plan, crossing)
    steps = part_order(flow, plan, crossing)
    if plan.routing == "relay":
        borders.relay([key for key, node in steps if node is None])

    def subgraph(key: PartKey) -> Subgraph:
        sides = (borders.inputs.get(key, ()), borders.outputs.get(key, ()))
        inputs, outputs = (tuple(s if as_met else sorted(s, key=flow.index.__getitem__)) for s in sides)
        return Subgraph(key, tuple(borders.nodes[key]), inputs, outputs)

    return tuple(subgraph(key) if node is None else node for key, node in steps)


class _Borders:
    """The nodes of each part and the values that cross its border, in the order of first use."""

    def __init__(self, flow: Dataflow, plan: Plan, crossing: Mapping[Node, list[Crossing]]) -> None:
        self.nodes: dict[PartKey, list[Node]] = defaultdict(list)
        self.inputs: dict[PartKey, dict[Node, None]] = defaultdict(dict)
        self.outputs: dict[PartKey, dict[Node, None]] = defaultdict(dict)
        self._flow, self._places = flow, plan.places
        self._symbols: dict[Node, tuple[Node, ...]] = {}
        for node, keys in plan.places.items():
            for key in keys:
                self.nodes[key].append(node)
        for node, reads in crossing.items():
            for value, home, sources in reads:
                for key in plan.places[node]:
                    if key not in sources:
                        self._cross(value, home, key)

    def _cross(self, value: Node, source: PartKey, reader: PartKey) -> None:
        self.outputs[source][value] = None
        if value in self.inputs[reader]:
            return
        self.inputs[reader][value] = None
        if reader is not PARENT:
            for symbol in self._symbols_of(value):
                self._bring(symbol, source, reader)

    def _symbols_of(self, value: Node) -> tuple[Node, ...]:
        """Return `Dataflow.symbols` of a value, computed once for all of its readers."""
        if value not in self._symbols:
            self._symbols[value] = self._flow.symbols(value)
        return self._symbols[value]

    def _bring(self, symbol: Node, source: PartKey, reader: PartKey) -> None:
        """Pass a symbol to a part, unless the part would have to wait for another part to get it."""
        keys = self._places[symbol]
        if reader in keys or not (symbol.op == "placeholder" or keys[:1] == (source,) != (PARENT,)):
            return
        self.outputs[keys[0]][symbol] = None
        self.inputs[reader][symbol] = None

    def relay(self, chain: list[PartKey]) -> None:
        """Forward values to their readers through all parts in between, inputs of the graph from the first part on::

        part 0 ──a──> part 2     ==>     part 0 ──a──> part 1 ──a──> part 2
        """
        position = {key: i for i, key in enumerate(chain)}
        last: dict[Node, int] = {}
        for key in (*chain, PARENT):
            for value in self.inputs.get(key, ()):
                if value.op != "get_attr":  # the parent passes its attributes to each part directly
                    last[value] = max(position.get(key, len(chain)), last.get(value, 0))
        # A value is live at every border from its home (-1: the parent) to its last reader, or to the end of the chain.
        for value, end in last.items():
            home = position.get(self._places[value][0], -1)
            for i in range(home + 1, min(end + 1, len(chain))):
                self.inputs[chain[i]][value] = None
                self.outputs[chain[i - 1] if i else PARENT][value] = None
            if end == len(chain) and home >= 0:
                self.outputs[chain[-1]][value] = None
