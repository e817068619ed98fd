"""Divide a joint graph into forward and backward modules by a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.display import Shown
from splitkit.engine.codegen.part_modules import pickle_by_nodes
from splitkit.engine.complete import check_plan
from splitkit.engine.split import with_origin
from splitkit.errors import CycleError, PlanError
from splitkit.graph.node_values import storage_bytes
from splitkit.graph.storages import storages_shown, value_of
from splitkit.memory.kernels.kernel_results import ARRIVED, TO_DEVICE, TO_HOST, host_value
from splitkit.plans.parts import Offloaded, PartKey
from splitkit.plans.policy import Policy, PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.short_repr import brief
from splitkit.training.emission_order import EmissionOrder, saved_for_backward
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, SavedValue, is_size, output_nodes, save_all_plan
from splitkit.training.offload_timeline import why_not_moved
from splitkit.training.peaks import apply_checkpoints

if TYPE_CHECKING:
    from splitkit.files import PathLike


_SHOWN = 5  # how many saved values a pair prints


@dataclass(frozen=True)
class Pair(Shown):
    """The two halves of a training step, in AOTAutograd's calling convention::

        forward(*primals)                    ->  (*outputs, *saved, *sizes)
        backward(*sizes, *saved, *tangents)  ->  gradients

    Nodes of both halves keep the names and the ``meta["val"]`` objects of the joint graph, so a saved value has the
    same name and the same storage in both. A notebook shows the size of both halves and the saved values; `view` and
    `to_html` make a page of forward, the saved values, backward, and the memory over time.

    Attributes:
        forward: takes parameters, buffers and inputs; returns the outputs and the values that backward needs.
        backward: takes the values that forward saved and the gradients of the outputs; returns gradients.
        outputs: how many outputs of forward are outputs of the step.
        saved: the names of the saved tensors (and objects), in the order in which they are passed.
        sizes: the names of the saved symbolic sizes.
        plan: the complete plan; ``None`` if one of torch's partitioners made the pair.
        offloaded: the names of the values that wait for backward on the host; what is passed has the name
            ``x_on_host``.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int
    saved: tuple[str, ...]
    sizes: tuple[str, ...]
    plan: Plan | None = None
    offloaded: tuple[str, ...] = ()

    __repr__ = brief

    @property
    def saved_values(self) -> tuple[SavedValue, ...]:
        """The values that forward saves for backward, the largest first: each with its module, its op and its bytes.

        If several values are views of one storage, its bytes exist only once.
        """
        nodes = {node.name: node for node in self.forward.graph.nodes}
        held = storages_shown(self.forward.graph.find_nodes(op="placeholder"))
        return tuple(sorted((SavedValue.of(nodes[name], held) for name in self.saved), key=lambda value: -value.nbytes))

    @property
    def host_bytes(self) -> int:
        """The bytes on the host when forward has ended, of the values that are offloaded."""
        shown = {node.name: node for node in self.forward.graph.nodes}
        return sum(storage_bytes(value_of(shown[name])) for name in self.offloaded)

    def view(
        self,
        *,
        height: int | None = None,
        costs: Costs | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> Any:
        """Return a page of forward, the saved values, backward, and the memory over time.

        A notebook shows the page if this is the last line of a cell.

        Args:
            height: height of the frame in pixels.
            costs: prices of the nodes; by default those that the plan was made with.
            memory: the memory of the device in bytes (or ``"80GiB"``), drawn as a line.
            title: the text above the picture.

        Raises:
            ViewError: SK901 if the pair cannot be drawn.
        """
        return self._framed(height, costs=costs, memory=memory, title=title)

    def to_html(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> None:
        """Write the page as one file that any browser shows; the options are those of `view`.

        Raises:
            ViewError: SK901 if the pair cannot be drawn.
            FileError: SK504 if the file cannot be written; an existing file is then left as it was.
        """
        self._write_html(path, costs=costs, memory=memory, title=title)

    def to_svg(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> None:
        """Write a static picture; the options are those of `view`, the errors those of `to_html`."""
        self._write_svg(path, costs=costs, memory=memory, title=title)

    def __str__(self) -> str:
        """Return a few lines: the sizes of the halves, the note of the plan, and the largest saved values."""
        values = [value for value in self.saved_values if value.nbytes]
        more = [f"  ... and {len(values) - _SHOWN} more"] if len(values) > _SHOWN else []
        forward, backward = len(self.forward.graph.nodes), len(self.backward.graph.nodes)
        lines = [
            f"Pair: forward of {forward} nodes, backward of {backward} nodes",
            *([f"  {self.plan.note}"] if self.plan and self.plan.note else []),
            f"  {self.outputs} outputs, {len(values)} values saved",
            *(f"  {value}" for value in values[:_SHOWN]),
            *more,
        ]
        return "\n".join(lines)

    @classmethod
    def of(cls, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Pair:
        """Return the pair of two modules in AOTAutograd's calling convention, which shows the saved values."""
        handed: Any = forward.graph.output_node().args[0][outputs:]  # type: ignore[index]
        sizes = [node.name for node in handed if is_size(node)]
        saved = [node.name for node in handed if node.name not in sizes]
        return cls(forward, backward, outputs, tuple(saved), tuple(sizes))

    def run(self, primals: list[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run forward, then backward, on real values; return the outputs and the gradients.

        As under AOTAutograd, each value is freed after its last use, saved values during backward. For this,
        ``primals`` is emptied; a primal is freed early only if the caller holds no other reference to it.
        """
        with torch.no_grad():
            made = list(_run(self.forward, primals))
            outputs, handed = tuple(made[: self.outputs]), made[self.outputs :]
            made.clear()
            count = len(self.saved)
            given = [*handed[count:], *handed[:count], *tangents]
            handed.clear()
            gradients = _run(self.backward, given)
        return outputs, tuple(gradients)

    def run_forward(self, primals: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run forward; return the outputs, and what it saves for backward."""
        made = self.forward(*primals)
        return tuple(made[: self.outputs]), tuple(made[self.outputs :])

    def run_backward(self, held: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Run backward on what forward saved and the gradients of the outputs; return the gradients."""
        count = len(self.saved)
        return tuple(self.backward(*held[count:], *held[:count], *tangents))


def _run(gm: fx.GraphModule, values: list[Any]) -> Any:
    """Run a graph, freeing each value after its last use, and at once if nobody reads it; empty ``values``."""
    interpreter = fx.Interpreter(gm)
    for node in gm.graph.nodes:
        if not node.users and node.op not in ("placeholder", "output"):
            interpreter.user_to_last_uses.setdefault(node, []).append(node)
    return interpreter.boxed_run(values)


def divide(flow: JointFlow, policy: PolicyLike, costs: Costs) -> Pair:
    """Divide a joint graph into forward and backward: plan, honour checkpoint tags, complete, check and emit.

    Nodes that the policy does not place stay where eager autograd computes them.

    Raises:
        PlanError: SK202 for a second copy of a node that may run only once, SK206 for parts other than the two, SK208
            for nodes that are needed but have no part, SK210 for an effect that is planned in the other half, SK220 for
            a value that cannot be offloaded.
        CycleError: SK203 if forward would need a value, or an effect, of backward.
    """
    decided = decide_joint(flow, policy, costs)
    plan = _complete(flow, apply_checkpoints(flow, _with_homes(flow, decided)))
    check_plan(flow, plan)
    _check_effects(flow, plan)
    _check_order(flow, plan)
    taken = saved_for_backward(flow, plan)
    sizes = [n for n in taken if is_size(n)]
    saved = sorted((n for n in taken if not is_size(n)), key=_rank)
    primals = [n for n in flow.graph.find_nodes(op="placeholder") if n not in flow.backward_inputs]
    order = EmissionOrder(flow)
    early, late = order.forward(plan.members(FORWARD), taken), order.backward(plan.members(BACKWARD))
    copies = HostCopies.of(flow, plan.offloaded, saved, early, late)
    sent = [*flow.outputs, *saved, *sizes]
    forward = emitted_half(flow, early, primals, sent, replace(copies, fetch={}, read={}))
    given = [*sizes, *saved, *flow.backward_inputs]
    backward = emitted_half(flow, late, given, flow.gradients, replace(copies, release={}))
    moved, names = tuple(n.name for n in copies.made), tuple(map(copies.name, saved))
    return Pair(forward, backward, flow.forward_outputs, names, tuple(n.name for n in sizes), plan, moved)


def decide_joint(flow: JointFlow, policy: PolicyLike, costs: Costs) -> Plan:
    """Return the plan that a policy, or an object in its place, makes for a joint graph."""
    decided = as_plan(policy, flow, costs)
    return with_origin(decided, policy, flow, costs) if isinstance(policy, Policy) else decided


def _with_homes(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with a place for every placeable node."""
    places = save_all_plan(flow).places | {n: plan.places[n] for n in flow.nodes if n in plan.places}  # type: ignore[operator]
    for node, keys in places.items():
        if not {FORWARD, BACKWARD}.issuperset(keys):
            raise PlanError(
                "SK206",
                f"{node.name} is planned in {list(keys)}, but a joint graph has the parts 'forward' and 'backward'",
                "Use a policy that divides a training step, such as splitkit.policies.SaveAll().",
                [node],
            )
    return replace(plan, places=places)


def _complete(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with places for inputs, members of tuples and attributes as well."""
    places: dict[Node, tuple[PartKey, ...]] = {n: (FORWARD,) for n in flow.scope if n.op == "placeholder"}
    places |= dict.fromkeys(flow.backward_inputs, (BACKWARD,))
    places |= {n: plan.places[flow.producer(n)] for n in flow.scope if flow.producer(n) in plan.places}
    for node in flow.scope:
        if node.op == "get_attr":
            places[node] = tuple(dict.fromkeys(key for user in node.users for key in places.get(user, ())))
    return replace(plan, places={n: places.get(n, ()) for n in flow.index if n.op != "output"})


def _check_effects(flow: JointFlow, plan: Plan) -> None:
    """Raise SK210 for an effect in the other half than under eager autograd: backward may run much later, or never."""
    for node, reason in flow.once.items():
        producer = flow.producer(node)
        if producer in flow.save_all and plan[producer] != flow.save_all[producer]:
            here, home = plan.home(producer), flow.save_all.home(producer)
            raise PlanError(
                "SK210",
                f"{producer.name} is planned in {here!r}, but it belongs to {home!r}: {reason}",
                "Leave it where splitkit.training.flow.save_all_plan has it; `unrepeatable` there lists such nodes.",
                [producer],
            )


def _check_order(flow: JointFlow, plan: Plan) -> None:
    """Raise SK203 if forward needs a value that only backward computes, or must follow an effect in backward."""
    home = save_all_plan(flow)
    for node, keys in plan.items():
        if FORWARD not in keys or node.op == "placeholder":
            continue
        for read in node.all_input_nodes:
            if FORWARD not in plan[read]:
                raise _cycle(node, "reads", read)
        for before in flow.after[node]:
            if home.home(before) == FORWARD and BACKWARD in plan[before]:
                raise _cycle(node, "must run after the effect or read of", before)
    for output in output_nodes(flow.outputs):
        if FORWARD not in plan[output]:
            raise CycleError(
                "SK203",
                f"forward returns {output.name}, which is planned in backward",
                "Place it, and what it reads, in 'forward'.",
                [output],
            )


def _cycle(node: Node, verb: str, other: Node) -> CycleError:
    return CycleError(
        "SK203",
        f"forward waits for backward: {node.name} {verb} {other.name}, which is planned in backward",
        f"Place {other.name} in 'forward' as well, or {node.name} in 'backward'.",
        [node, other],
    )


def _rank(node: Node) -> tuple[bool, bool]:
    """Return the sort key of a saved value: objects after tensors, and values without a version check last.

    This is part of the calling convention (``_extract_fwd_bwd_modules`` of torch 2.13 and 2.15); 2.11 sets no such
    mark.
    """
    return not isinstance(value_of(node), torch.Tensor), bool(node.meta.get("saved_tensor_with_no_vc_check"))


def emitted_half(
    flow: JointFlow,
    nodes: Iterable[Node],
    inputs: Sequence[Node],
    outputs: Sequence[object],
    copies: HostCopies,
    kept: Iterable[Node] = (),
) -> fx.GraphModule:
    """Return the graph that computes ``nodes`` in their order, with the attributes that they read.

    Args:
        flow: facts about the joint graph.
        nodes: what it computes; inputs among them are taken as inputs.
        inputs: its placeholders, in order.
        outputs: what it returns: nodes, constants, or functions that add nodes of their own to the graph, given node of
            the joint graph -> its copy, and return the last. The copies on the host stand for what moves there.
        copies: what the graph copies to the host and back.
        kept: further outputs, which are returned themselves.
    """
    graph, env, back = fx.Graph(), dict[Node, Node](), dict[Node, Node]()
    hosts = {node: copies.given(graph, node, env) for node in inputs}

    def copied(node: Node) -> Node:
        if node not in env and node.op == "get_attr":
            env[node] = graph.node_copy(node)
        return env[node]

    for node in nodes:
        if node not in env:
            copies.before(graph, node, env, hosts, back)
            env[node] = graph.node_copy(node, copied)
            copies.after(graph, node, env, hosts)

    def returned(value: object) -> Any:
        if isinstance(value, Node):
            return hosts[value] if value in copies.made else copied(value)
        return value(graph, env) if callable(value) else value

    graph.output((*map(returned, outputs), *(env[value] for value in kept)))
    return pickle_by_nodes(fx.GraphModule(flow.root, graph))


# Emit the copies of offloaded values: to the host in forward, and back in backward.


_Env = dict[Node, Node]


@dataclass
class HostCopies:
    """The copies of one pair, by the nodes of the joint graph at which they stand.

    Attributes:
        made: value -> its copy on the host, as both graphs show it.
        release: node of forward -> values whose copies are waited for after it.
        fetch: node of backward -> values that are asked for before it.
        read: node of backward -> values that are waited for before it. Where nothing fetches them, the copies that are
            given are on their way.
    """

    made: dict[Node, object] = field(default_factory=dict)
    release: dict[Node, list[Node]] = field(default_factory=dict)
    fetch: dict[Node, list[Node]] = field(default_factory=dict)
    read: dict[Node, list[Node]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        flow: JointFlow,
        offloaded: Iterable[Offloaded],
        saved: Collection[Node],
        forward: Sequence[Node],
        backward: Sequence[Node],
    ) -> HostCopies:
        """Check what a plan offloads.

        Args:
            flow: facts about the joint graph.
            offloaded: of the plan.
            saved: what backward takes from forward.
            forward: the nodes of forward in order.
            backward: the nodes of backward in order.

        Raises:
            PlanError: SK220 for a value that cannot be moved, or moments that make no sense.
        """
        found = cls()
        early, late = ({node: i for i, node in enumerate(nodes)} for nodes in (forward, backward))
        for one in offloaded:
            value = one.value
            if flaw := why_not_offloaded(flow, value, saved, "backward"):
                raise offload_refused(value, flaw)
            if value not in early:
                raise offload_refused(value, "forward does not compute it")
            last = max((early[n] for n in _readers(flow, value, forward)), default=early[value])
            first = next(iter(_readers(flow, value, backward)))
            release, fetch = one.release or forward[max(last, early[value])], one.fetch or first
            if early.get(release, -1) < early[value]:
                way = "Name a node of forward that runs later, or None."
                raise offload_refused(value, f"it cannot leave the device after {release.name}", way)
            if late.get(fetch, late[first] + 1) > late[first]:
                way = f"Name a node of backward that runs no later than {first.name}, or None."
                raise offload_refused(value, f"{first.name} reads it, before it is fetched at {fetch.name}", way)
            found.made[value] = host_value(value_of(value))
            found.release.setdefault(release, []).append(value)
            found.fetch.setdefault(fetch, []).append(value)
            found.read.setdefault(first, []).append(value)
        for values in found.fetch.values():  # what is read first comes first
            values.sort(key=lambda value: late[next(iter(_readers(flow, value, backward)))])
        return found

    def name(self, value: Node) -> str:
        """Return the name under which a saved value passes from forward to backward."""
        return on_host(value.name) if value in self.made else value.name

    def given(self, graph: fx.Graph, value: Node, env: _Env) -> Node:
        """Add the input of backward for a saved value, which is on the host or is the value itself."""
        made = graph.placeholder(self.name(value))
        made.meta = dict(value.meta)
        if value in self.made:
            made.meta["val"] = self.made[value]
        else:
            env[value] = made
        return made

    def after(self, graph: fx.Graph, node: Node, env: _Env, hosts: _Env) -> None:
        """Add what follows a node of forward: the start of its own copy, and the ends of others."""
        if node in self.made:
            hosts[node] = added_copy(graph, f"copy_of_{node.name}", TO_HOST, (env[node],), node, self.made[node])
        for value in self.release.get(node, ()):
            args = hosts[value], env[value]
            hosts[value] = added_copy(graph, self.name(value), ARRIVED, args, value, self.made[value])

    def before(self, graph: fx.Graph, node: Node, env: _Env, hosts: _Env, copies: _Env) -> None:
        """Add what precedes a node of backward: the starts of copies, and the ends of those that it reads."""
        for value in self.fetch.get(node, ()):
            args = hosts[value], value_of(value).device
            copies[value] = added_copy(graph, f"copy_of_{value.name}_back", TO_DEVICE, args, value, value_of(value))
        for value in self.read.get(node, ()):
            args = copies.get(value, hosts[value]), hosts[value]
            env[value] = added_copy(graph, back_on_device(value.name), ARRIVED, args, value, value_of(value))


def added_copy(graph: fx.Graph, name: str, target: Any, args: tuple[Any, ...], value: Node, val: object) -> Node:
    """Add a call that copies a value or waits for a copy; it has the meta of the value, but for what it yields."""
    made = graph.create_node("call_function", target, args, name=name)
    made.meta = {**value.meta, "val": val}
    return made


def on_host(name: str) -> str:
    """Return the name of the copy of a value on the host."""
    return f"{name}_on_host"


def back_on_device(name: str) -> str:
    """Return the name of a value that is on the device again."""
    return f"{name}_back"


def why_not_offloaded(flow: JointFlow, value: Node, saved: Collection[Node], backward: str) -> str:
    """Return why a value of forward cannot wait on the host; an empty string if it can.

    Args:
        flow: facts about the joint graph.
        value: the value.
        saved: what backward takes from forward.
        backward: what the reason calls backward.
    """
    if value not in saved:
        return f"{backward} does not take it from forward"
    if flaw := why_not_moved(flow, value):
        return flaw
    if others := sharing(flow, value, [node for node in saved if node is not value]):
        return f"{others[0].name}, which is saved too, lies in the same memory"
    returned = sharing(flow, value, output_nodes((*flow.outputs, *flow.gradients)))
    return "it is returned to the caller" if returned else ""


def sharing(flow: JointFlow, value: Node, nodes: Iterable[Node]) -> list[Node]:
    """Return those of some nodes whose values lie in the memory of ``value``."""
    roots = set(flow.storages.under(value))
    return [node for node in nodes if not roots.isdisjoint(flow.storages.under(node))]


def _readers(flow: JointFlow, value: Node, nodes: Iterable[Node]) -> Iterable[Node]:
    """Return the nodes that read a value or a view of it, in order."""
    roots = set(flow.storages.under(value))
    return (n for n in nodes if any(r is value or roots & {*flow.storages.under(r)} for r in n.all_input_nodes))


def offload_refused(
    value: Node, reason: str, remedy: str = "Leave it out of Plan.offloaded, or plan again."
) -> PlanError:
    """Return the SK220 of a value that cannot be moved."""
    return PlanError("SK220", f"{value.name} cannot be offloaded: {reason}", remedy, [value])
