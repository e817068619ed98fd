"""Cut a complete plan into subgraphs: which nodes each part computes, what it takes and what it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.brief import brief
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.order import Crossing, crossings, part_order
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class Subgraph:
    """One part cut out: data, no fx surgery yet.

    Inputs and outputs are in graph order, so that any two parts agree on the order of what they exchange (or, for
    `split_module`, in the order in which they are met, as torch has them).

    Attributes:
        key: the part.
        nodes: what it computes, attributes included, in graph order.
        inputs: values that it takes from other parts or the host.
        outputs: values that other parts or the host take from it.
    """

    key: PartKey
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    __repr__ = brief


def cut(flow: Dataflow, plan: Plan, as_met: bool = False) -> tuple[Subgraph | Node, ...]:
    """The subgraphs, and the host's own nodes between them, in the order in which the parent runs them.

    A value brings the symbols of its sizes along, where its home or an input of the graph has them.

    Args:
        flow: facts about the graph.
        plan: a complete plan.
        as_met: order inputs by first use and outputs by first crossing, instead of both by the graph.

    Raises:
        CycleError: SK203 when parts depend on each other in a cycle.
    """
    crossing = crossings(plan.places)
    borders = _Borders(flow, plan, crossing)
    units = part_order(flow, plan, crossing)
    if plan.routing == "relay":
        borders.relay([key for key, node in units if node is None])

    def subgraph(key: PartKey) -> Subgraph:
        sides = (borders.inputs.get(key, ()), borders.outputs.get(key, ()))
        inputs, outputs = (tuple(s if as_met else sorted(s, key=flow.index.__getitem__)) for s in sides)
        return Subgraph(key, tuple(borders.nodes[key]), inputs, outputs)

    return tuple(subgraph(key) if node is None else node for key, node in units)


class _Borders:
    """What each part computes, and what crosses its border, in the order in which it is met."""

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
        if reader is not HOST:
            for symbol in self._symbols_of(value):
                self._bring(symbol, source, reader)

    def _symbols_of(self, value: Node) -> tuple[Node, ...]:
        """As `Dataflow.symbols`, found once for all readers."""
        if value not in self._symbols:
            self._symbols[value] = self._flow.symbols(value)
        return self._symbols[value]

    def _bring(self, symbol: Node, source: PartKey, reader: PartKey) -> None:
        """Let a part have a symbol, if that makes it wait for nobody else."""
        keys = self._places[symbol]
        if reader in keys or not (symbol.op == "placeholder" or keys[:1] == (source,) != (HOST,)):
            return
        self.outputs[keys[0]][symbol] = None
        self.inputs[reader][symbol] = None

    def relay(self, chain: list[PartKey]) -> None:
        """Let values reach their readers through all parts in between, inputs of the graph from the first part on::

        part 0 ──a──> part 2     ==>     part 0 ──a──> part 1 ──a──> part 2
        """
        position = {key: i for i, key in enumerate(chain)}
        last: dict[Node, int] = {}
        for key in (*chain, HOST):
            for value in self.inputs.get(key, ()):
                if value.op != "get_attr":  # what the host holds it hands to each part itself
                    last[value] = max(position.get(key, len(chain)), last.get(value, 0))
        for value, end in last.items():
            home = position.get(self._places[value][0], -1)
            for i in range(home + 1, min(end + 1, len(chain))):
                self.inputs[chain[i]][value] = None
                self.outputs[chain[i - 1] if i else HOST][value] = None
            if end == len(chain) and home >= 0:
                self.outputs[chain[-1]][value] = None
