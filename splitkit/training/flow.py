"""The dataflow of joint graphs: which nodes belong to forward, to backward, or may run in both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

import torch
from torch.fx import Node

from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.joint_marks import is_marked_backward, mark_of
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune, rematerialize
from splitkit.short_repr import brief
from splitkit.training.joint_storages import JointStorages

FORWARD = "forward"
BACKWARD = "backward"
"""The two parts of a plan for a joint graph."""


@dataclass(frozen=True)
class JointFlow(Dataflow):
    """Facts about a joint graph.

    Attributes:
        backward_inputs: the inputs of backward in order, gradients of outputs first. All other inputs are forward's.
        forward_outputs: the number of outputs that are forward's; the others are backward's.
        updated: inputs that hold another value when backward runs, because the graph writes to them, or AOTAutograd
            does after forward.
        input_gradients: the outputs of backward that are gradients of inputs of the model, not of its parameters.
    """

    backward_inputs: tuple[Node, ...]
    forward_outputs: int
    updated: tuple[Node, ...]
    input_gradients: tuple[Node, ...] = ()

    __repr__ = brief

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        backward_inputs: Iterable[Node],
        forward_outputs: int,
        updated: Iterable[Node],
        input_gradients: Iterable[Node] = (),
    ) -> JointFlow:
        """Make the facts of a joint graph: nodes that read an updated input may run only once."""
        written = (w for e in flow.effects.values() for w in e.writes if w.op == "placeholder")
        updated = tuple(dict.fromkeys([*updated, *written]))
        known = {field.name: getattr(flow, field.name) for field in fields(Dataflow)}
        known["once"] = MappingProxyType({**_readers_of_memory(flow, updated), **flow.once})
        return cls(
            **known,
            backward_inputs=tuple(backward_inputs),
            forward_outputs=forward_outputs,
            updated=updated,
            input_gradients=tuple(input_gradients),
        )

    @property
    def outputs(self) -> tuple[object, ...]:
        """The outputs of forward, nodes or constants."""
        return tuple(self.graph.output_node().args[0][: self.forward_outputs])  # type: ignore[index, arg-type]

    @property
    def gradients(self) -> tuple[object, ...]:
        """The outputs of backward, nodes or ``None``."""
        return tuple(self.graph.output_node().args[0][self.forward_outputs :])  # type: ignore[index, arg-type]

    @cached_property
    def save_all(self) -> Plan:
        """The plan of `save_all_plan`."""
        return _save_all(self)

    @cached_property
    def storages(self) -> JointStorages:
        """The storages that nodes make and share."""
        return JointStorages.of(self)


def _readers_of_memory(flow: Dataflow, inputs: Collection[Node]) -> dict[Node, str]:
    """Return the nodes that read these inputs or views of them, with the reason why they may run only once."""
    shared, found = set(inputs), dict[Node, str]()
    for node in flow.index:
        if node.op != "output" and any(read in shared for read in node.all_input_nodes):
            found[node] = "it reads an input that is updated before backward runs"
            if any(alias in shared for alias in flow.effects[node].aliases):
                shared.add(node)
    return found


def as_joint(policy: object, flow: Dataflow) -> JointFlow:
    """Return the facts of a joint graph for ``policy``; raise SK302 if the graph is not joint."""
    if isinstance(flow, JointFlow):
        return flow
    raise PolicyError(
        "SK302",
        f"{type(policy).__name__} splits forward from backward, and this is not a joint graph",
        "Use it with splitkit.capture_joint(model, *inputs).split(policy), partition_fn, backend or apply; "
        "on the command line with `splitkit plan MODEL --what fwd-bwd`.",
    )


def save_all_plan(flow: JointFlow) -> Plan:
    """Return the plan with every node where eager autograd runs it: save all, recompute nothing.

    Backward has the nodes that depend on the gradient of an output, and those that AOTAutograd traced during backward
    unless forward needs them. Sizes belong to forward: saving an int is cheaper than saving the tensor it measures.
    """
    return flow.save_all


def _save_all(flow: JointFlow) -> Plan:
    late, needed = _after_tangents(flow), _needed_by_forward(flow)
    places: dict[Node, tuple[str, ...]] = {}
    for node in reversed(flow.nodes):
        readers = {places[flow.producer(user)] for user in _readers(flow, node)}
        if node in late:
            places[node] = (BACKWARD,)
        elif node in needed or is_size(node) or (FORWARD,) in readers:
            places[node] = (FORWARD,)
        else:
            left = is_marked_backward(node) or (mark_of(node) is None and readers)
            places[node] = (BACKWARD,) if left else (FORWARD,)
    return Plan({n: places[n] for n in flow.nodes}, {FORWARD: Part(FORWARD), BACKWARD: Part(BACKWARD)})


def _readers(flow: JointFlow, node: Node) -> Iterator[Node]:
    """Yield the placeable nodes that read ``node`` or a member of its tuple."""
    for user in node.users:
        if user in flow.followers:
            yield from _readers(flow, user)
        elif flow.is_placeable(user):
            yield user


def _after_tangents(flow: JointFlow) -> set[Node]:
    """Return the nodes that depend on an input of backward, or write memory in backward."""
    late = set(flow.backward_inputs)
    for node in flow.index:
        writes = node in flow.effects and bool(flow.effects[node].writes)
        late_write = is_pinned(node) or (writes and mark_of(node) == "is_backward")
        if node.op != "output" and (late_write or any(read in late for read in node.all_input_nodes)):
            late.add(node)
    return late


def _needed_by_forward(flow: JointFlow) -> set[Node]:
    stack = [*output_nodes(flow.outputs)]
    stack += [n for n in flow.once if mark_of(n) == "is_forward"]
    stack += [n for n in flow.nodes if mark_of(n) == "must_be_in_forward"]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed |= {node, flow.producer(node)}
            stack += node.all_input_nodes
    return needed


def recompute(flow: JointFlow, plan: Plan, keep: Collection[Node]) -> Plan:
    """Let backward recompute what it reads from forward, down to inputs, ``keep`` and nodes that may run only once."""
    sizes = [n for n in flow.nodes if is_size(n)]
    return prune(flow, rematerialize(flow, plan, BACKWARD, [*keep, *sizes]))


def with_inputs(flow: JointFlow, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """Return the plan in which forward also computes what ``nodes`` need, where only backward did."""
    added: dict[Node, tuple[PartKey, ...]] = {}
    stack = [read for node in nodes for read in flow.inputs(node)]
    while stack:
        node = stack.pop()
        if node not in added and FORWARD not in plan.get(node, (FORWARD,)):
            added[node] = (FORWARD, *plan[node])
            stack += flow.inputs(node)
    return plan.place(added)


def unrepeatable(flow: JointFlow) -> Mapping[Node, str]:
    """Return forward's nodes that backward may not recompute -> the reason.

    These are random ops without an RNG state of their own, collectives, effects, readers of updated inputs, and sizes,
    for which backward would need the tensor.
    """
    sizes = {n: "it is a size" for n in flow.nodes if is_size(n)}
    plan = save_all_plan(flow)
    return {n: why for n, why in {**sizes, **flow.once}.items() if plan.home(n) == FORWARD}


def is_size(node: Node) -> bool:
    """Return whether a node yields a symbolic number, which AOTAutograd passes to backward apart from tensors."""
    return isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_pinned(node: Node) -> bool:
    """Return whether AOTAutograd says that only backward may run the node."""
    return mark_of(node) == "must_be_in_backward"


def output_nodes(values: Iterable[object]) -> Iterator[Node]:
    """Yield the nodes among outputs; the others are constants."""
    return (value for value in values if isinstance(value, Node))
