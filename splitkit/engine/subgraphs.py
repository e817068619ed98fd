"""Divide a graph by a complete plan: find the nodes, inputs and outputs of each part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product, takewhile
from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import listed
from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.node_values import tensor_bytes, value_bytes
from splitkit.graph.scope import Scope, is_state_op, states_before
from splitkit.plans.part_order import Crossing, crossings, part_order
from splitkit.plans.parts import PARENT, Part, PartKey
from splitkit.plans.record import Plan
from splitkit.short_repr import brief
from splitkit.units import size

if TYPE_CHECKING:
    from networkx import DiGraph


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
        self._places = plan.places
        self._symbols = cache(flow.symbols)  # once for all readers of a value
        for node, keys in plan.places.items():
            for key in keys:
                self.nodes[key].append(node)
        for node, taken in crossing.items():
            for value, home, sources in taken:
                for key in plan.places[node]:
                    if key not in sources:
                        self._cross(value, home, key)

    def _cross(self, value: Node, source: PartKey, reader: PartKey) -> None:
        self.outputs[source][value] = None
        if value in self.inputs[reader]:
            return
        self.inputs[reader][value] = None
        if reader is not PARENT:
            for symbol in self._symbols(value):
                self._bring(symbol, source, reader)

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


# Describe a part of a split in one line: its ops, parameters, inputs and outputs.


NAMED = 2  # how many values a line names


def part_summary(name: str, sub: Subgraph, flow: Dataflow, plan: Plan) -> str:
    """Return ``submod_0: 12 ops, 1.50 MiB of parameters; takes x (256 B); gives add, mul and 3 more (2.00 KiB)``."""
    device = plan.parts[sub.key].device
    ops = sum(flow.is_placeable(n) for n in sub.nodes)
    held = size(sum(map(tensor_bytes, (t for t in flow.owned(*sub.nodes) if isinstance(t, nn.Parameter)))))
    head = f"{name}{f' on {device}' if device else ''}: {ops} ops, {held} of parameters"
    return f"{head}; takes {_values(sub.inputs)}; gives {_values(sub.outputs)}"


def _values(nodes: Sequence[Node]) -> str:
    """Return the first names, how many more there are, and the bytes of all values whose size is known."""
    if not nodes:
        return "nothing"
    nbytes = sum(map(value_bytes, nodes))
    return f"{listed(nodes, NAMED)}{f' ({size(nbytes)})' if nbytes else ''}"


# Keep state ops where the graph has them, for torch's passes that split a graph at its state ops and read the parts.
#
# ``torch.export`` splits at each ``_set_grad_enabled`` and expects it at the head of a part, once and unchanged
# (torch/_export/passes/replace_set_grad_with_hop_pass.py). This is correct if the parts are segments of the graph and
# run in its order: each part begins in the state in which the one before it ended::
#
#     set_grad(False)                part 1: set_grad(False), sin      (elsewhere: before = is_grad_enabled(),
#     sin                      ==>                                      set_grad(False), sin, set_grad(before))
#     set_grad(True)                 part 2: set_grad(True), tan
#     tan
#
# A region that spans several parts is opened at the head of each and closed at its end.


_HEADS = (
    _torch.ENTER_AUTOCAST,
    _torch.EXIT_AUTOCAST,
    _torch.SET_GRAD,
)  # known to split_module


@dataclass(frozen=True)
class SegmentStateOps:
    """The state ops of a part that is a segment of the graph.

    Attributes:
        before: the state in which the segment begins.
        start: the state after its leading state ops; ``None`` if it has no other nodes.
        leading: the state ops that it begins with.
        state_ops: its other state ops, in graph order.
    """

    before: Scope
    start: Scope | None
    leading: tuple[Node, ...]
    state_ops: tuple[Node, ...]


def segments_of(flow: Dataflow, plan: Plan, labels: Mapping[Node, PartKey]) -> Mapping[PartKey, SegmentStateOps]:
    """Return the state ops of each part, in graph order; empty if parts are not segments or there are no state ops.

    Args:
        flow: facts about the graph.
        plan: the complete plan, which may have copied nodes into other segments.
        labels: the part of each node except inputs, attributes and the output; state ops included.
    """
    state_ops = [n for n in labels if is_state_op(n)]
    if not all(map(_is_plain, state_ops)):
        return {}
    groups = [(key, list(nodes)) for key, nodes in groupby(labels, key=labels.__getitem__)]
    keys = [key for key, _ in groups]
    if not state_ops or PARENT in keys or len(set(keys)) < len(keys) or not _nest(state_ops):
        return {}
    before = states_before(flow.graph)
    segments = {key: _segment(nodes, before) for key, nodes in groups}
    moved = ((n, key) for n in flow.nodes for key in plan.places[n] if key != labels[n])
    if any(segments[key].start != flow.scope[n] for n, key in moved):  # copies go to the start of a segment
        return {}
    return segments


def _nest(state_ops: list[Node]) -> bool:
    """Whether all regions are closed, each before those around it."""
    opened: list[Node] = []
    for node in state_ops:
        if node.target is _torch.ENTER_AUTOCAST:
            opened.append(node)
        elif node.target is _torch.EXIT_AUTOCAST and opened.pop() is not node.args[0]:
            return False
    return not opened


def _is_plain(state_op: Node) -> bool:
    """Whether torch's split_module handles the state op: a known target, with constants by position."""
    if state_op.target not in _HEADS or state_op.kwargs:
        return False
    return state_op.target is not _torch.SET_GRAD or type(state_op.args[0]) is bool


def _segment(nodes: list[Node], before: Mapping[Node, Scope]) -> SegmentStateOps:
    leading = tuple(takewhile(is_state_op, nodes))
    rest = nodes[len(leading) :]
    start = before[rest[0]] if rest else None
    return SegmentStateOps(before[nodes[0]], start, leading, tuple(n for n in rest if is_state_op(n)))


def with_empty_segments(
    plan: Plan, steps: tuple[Subgraph | Node, ...], segments: Mapping[PartKey, SegmentStateOps]
) -> tuple[Plan, tuple[Subgraph | Node, ...]]:
    """Add the parts that hold only state ops, and put all steps into graph order."""
    made = {s.key: s for s in steps if isinstance(s, Subgraph)}
    parts = [made.get(key) or Subgraph(key, (), (), ()) for key in segments]
    own = [s for s in steps if isinstance(s, Node)]
    output = [s for s in own if s.op == "output"]
    known = {**{key: Part(key) for key in segments}, **plan.parts}
    return replace(plan, parts=known), (*(s for s in own if s.op != "output"), *parts, *output)


class SegmentGraph:
    """A graph under construction that keeps the state ops of its segment; others use `ScopedGraph`."""

    def __init__(self, segment: SegmentStateOps, graph: fx.Graph) -> None:
        self.graph = graph
        self.segment = segment
        self._handles: dict[Node, Node] = {}  # enter of an open region -> its copy

    def begin(self) -> None:
        """Write the head: first the grad mode, which export looks for, then the regions, which it does not affect."""
        leading, before = self.segment.leading, self.segment.before
        modes = [n for n in leading if n.target is _torch.SET_GRAD]
        for node in modes:
            self.graph.node_copy(node)
        if before.grad is not None and not modes:
            self.graph.call_function(_torch.SET_GRAD, (before.grad,))
        closed = [n.args[0] for n in leading]
        for enter in (*before.regions, *leading):
            if enter.target is _torch.ENTER_AUTOCAST and enter not in closed:
                self.pass_by(enter)

    def pass_by(self, state_op: Node) -> None:
        """Copy a state op."""
        copied = self.graph.node_copy(state_op, self._handles.__getitem__)
        if state_op.target is _torch.ENTER_AUTOCAST:
            self._handles[state_op] = copied
        elif state_op.target is _torch.EXIT_AUTOCAST:
            del self._handles[state_op.all_input_nodes[0]]

    def end(self) -> None:
        """Close the regions that are open."""
        for enter, handle in reversed(self._handles.items()):
            leave = self.graph.call_function(_torch.EXIT_AUTOCAST, (handle,))
            leave.meta.update(next((user.meta for user in enter.users), {}))


# Reduces a graph to the nodes that some of its values need.


def reduce_to(graph: fx.Graph, wanted: tuple[Node, ...]) -> None:
    """Let a graph return these values only, and erase what they do not need, inputs too; in place."""
    output = graph.output_node()
    output.args = (wanted,)
    needed = {output}
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= {*node.all_input_nodes}
        else:
            graph.erase_node(node)


# Make a networkx graph of the parts of a split: the values that they exchange, and the effects that order them.


def part_graph(
    flow: Dataflow,
    plan: Plan,
    subgraphs: Mapping[PartKey, Subgraph],
    names: Mapping[PartKey, str],
    own: Iterable[Node],
) -> DiGraph[Any]:
    """Return the graph that `splitkit.engine.split.Split.to_networkx` documents.

    Args:
        flow: facts about the original graph.
        plan: the complete plan.
        subgraphs: the parts, in the order of execution.
        names: part -> the name of its module.
        own: the nodes that the parent computes itself.
    """
    from networkx import DiGraph

    graph: DiGraph[Any] = DiGraph()
    own = sorted(own, key=flow.index.__getitem__)
    for node in own:
        if flow.is_placeable(node):
            _add(graph, node, kind=node.op, name=node.name, nodes=1, device=None)
    for key, sub in subgraphs.items():
        _add(graph, key, kind="part", name=names[key], nodes=len(sub.nodes), device=plan.parts[key].device)
    # value -> the vertex that it comes from: its home, or the part before in a relay
    holder: dict[Node, Any] = {node: flow.producer(node) for node in own}
    for key, sub in subgraphs.items():
        for value in sub.inputs:
            _carry(graph, holder[value], key, value)
        holder |= dict.fromkeys(sub.outputs, key)
    for node in own:
        for value in reads(node):
            _carry(graph, holder[value], flow.producer(node), value)
    for node in flow.scope:
        for earlier in flow.after[node]:
            for edge in product(_vertices(earlier, plan), _vertices(node, plan)):
                if edge[0] != edge[1] and edge[0] in graph and edge[1] in graph and not graph.has_edge(*edge):
                    graph.add_edge(*edge, values=(), bytes=0, effect=True)
    return graph


def _add(graph: DiGraph[Any], vertex: Any, **attributes: Any) -> None:
    graph.add_node(vertex, **attributes, inputs=(), input_bytes=0, outputs=(), output_bytes=0)


def _carry(graph: DiGraph[Any], source: Any, reader: Any, value: Node) -> None:
    """Record a value on the edge from ``source`` to ``reader``, or on the one of them that is in the graph."""
    if source == reader:
        return
    if source not in graph or reader not in graph:
        vertex, field, total = (
            (reader, "inputs", "input_bytes") if reader in graph else (source, "outputs", "output_bytes")
        )
        if vertex in graph:
            graph.nodes[vertex][field] += (value.name,)
            graph.nodes[vertex][total] += value_bytes(value)
        return
    if not graph.has_edge(source, reader):
        graph.add_edge(source, reader, values=(), bytes=0, effect=False)
    edge = graph.edges[source, reader]
    edge["values"] += (value.name,)
    edge["bytes"] += value_bytes(value)


def _vertices(node: Node, plan: Plan) -> list[Any]:
    return [node if key is PARENT else key for key in plan[node]]
