"""State ops where the graph has them: for torch's passes that split a graph at its state ops and then read the parts.

``torch.export`` splits at each ``_set_grad_enabled`` and wants to find it at the head of a part, once and as it was.
Where parts are consecutive runs of the graph, asked for in their original order, that is right as well: each part
begins in the state in which the one before it ended::

    set_grad(False)                part 1: set_grad(False), sin      (elsewhere: before = is_grad_enabled(),
    sin                      ==>                                      set_grad(False), sin, set_grad(before))
    set_grad(True)                 part 2: set_grad(True), tan
    tan

A region that spans parts is opened again at the head of each, and closed at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.cut import Subgraph
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.scope import Scope, is_state_op, states_before
from splitkit.plans.parts import HOST, Part, PartKey
from splitkit.plans.record import Plan

_HEADS = (_torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST, _torch.SET_GRAD)  # what torch's split_module knows


@dataclass(frozen=True)
class StateRun:
    """The state ops of a part that is a consecutive run of the graph.

    Attributes:
        before: the state in which it begins.
        start: the state after its leading state ops, if it has anything else.
        leading: the state ops that it begins with.
        state_ops: the others, in graph order.
    """

    before: Scope
    start: Scope | None
    leading: tuple[Node, ...]
    state_ops: tuple[Node, ...]


def runs_of(flow: Dataflow, plan: Plan, labels: Mapping[Node, PartKey]) -> Mapping[PartKey, StateRun]:
    """The runs that parts are, in graph order; none if they are no runs, or if there is nothing to keep.

    Args:
        flow: facts about the graph.
        plan: the complete plan, which may have copied nodes into other runs.
        labels: the part of each node but inputs, attributes and the output, state ops included.
    """
    state_ops = [n for n in labels if is_state_op(n)]
    if not all(map(_is_plain, state_ops)):
        return {}
    groups = [(key, list(nodes)) for key, nodes in groupby(labels, key=labels.__getitem__)]
    keys = [key for key, _ in groups]
    if not state_ops or HOST in keys or len(set(keys)) < len(keys) or not _nest(state_ops):
        return {}
    before = states_before(flow.graph)
    runs = {key: _run(nodes, before) for key, nodes in groups}
    moved = ((n, key) for n in flow.nodes for key in plan.places[n] if key != labels[n])
    if any(runs[key].start != flow.scope[n] for n, key in moved):  # copies stand at the start of their run
        return {}
    return runs


def _nest(state_ops: list[Node]) -> bool:
    """Whether each region is closed, and before those around it."""
    opened: list[Node] = []
    for node in state_ops:
        if node.target is _torch.ENTER_AUTOCAST:
            opened.append(node)
        elif node.target is _torch.EXIT_AUTOCAST and opened.pop() is not node.args[0]:
            return False
    return not opened


def _is_plain(state_op: Node) -> bool:
    """Is it one that torch's split_module knows, with constants by position?"""
    if state_op.target not in _HEADS or state_op.kwargs:
        return False
    return state_op.target is not _torch.SET_GRAD or type(state_op.args[0]) is bool


def _run(nodes: list[Node], before: Mapping[Node, Scope]) -> StateRun:
    leading = tuple(takewhile(is_state_op, nodes))
    rest = nodes[len(leading) :]
    start = before[rest[0]] if rest else None
    return StateRun(before[nodes[0]], start, leading, tuple(n for n in rest if is_state_op(n)))


def with_bare_runs(
    plan: Plan, units: tuple[Subgraph | Node, ...], runs: Mapping[PartKey, StateRun]
) -> tuple[Plan, tuple[Subgraph | Node, ...]]:
    """Add the parts that hold nothing but state ops, and put all in the order of the graph."""
    made = {u.key: u for u in units if isinstance(u, Subgraph)}
    parts = [made.get(key) or Subgraph(key, (), (), ()) for key in runs]
    own = [u for u in units if isinstance(u, Node)]
    output = [u for u in own if u.op == "output"]
    known = {**{key: Part(key) for key in runs}, **plan.parts}
    return replace(plan, parts=known), (*(u for u in own if u.op != "output"), *parts, *output)


class RunGraph:
    """A graph under construction that keeps the state ops of a run; what `ScopedGraph` is elsewhere."""

    def __init__(self, run: StateRun, graph: fx.Graph) -> None:
        self.graph = graph
        self.run = run
        self._handles: dict[Node, Node] = {}  # of the regions that are open

    def begin(self) -> None:
        """Write the head: first the grad mode, which export looks for, then the regions; they do not interfere."""
        leading, before = self.run.leading, self.run.before
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
        """Close what is open."""
        for enter, handle in reversed(self._handles.items()):
            leave = self.graph.call_function(_torch.EXIT_AUTOCAST, (handle,))
            leave.meta.update(next((user.meta for user in enter.users), {}))
