"""Keep state ops where the graph has them, for torch's passes that split a graph at its state ops and read the parts.

``torch.export`` splits at each ``_set_grad_enabled`` and expects it at the head of a part, once and unchanged
(torch/_export/passes/replace_set_grad_with_hop_pass.py). This is correct if the parts are segments of the graph and
run in its order: each part begins in the state in which the one before it ended::

    set_grad(False)                part 1: set_grad(False), sin      (elsewhere: before = is_grad_enabled(),
    sin                      ==>                                      set_grad(False), sin, set_grad(before))
    set_grad(True)                 part 2: set_grad(True), tan
    tan

A region that spans several parts is opened at the head of each and closed at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.subgraphs import Subgraph
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.scope import Scope, is_state_op, states_before
from splitkit.plans.parts import PARENT, Part, PartKey
from splitkit.plans.record import Plan

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
