"""Forward and backward as two modules, cut out of a joint graph by a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.brief import brief
from splitkit.costs import Costs
from splitkit.engine.complete import check
from splitkit.errors import CycleError, PlanError
from splitkit.graph.storages import storages_shown
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.shown import Shown
from splitkit.training.checkpoints import honour
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, homes, is_size, nodes_in
from splitkit.training.order import EmissionOrder, crossing
from splitkit.training.savedvalues import SavedValue

Places = dict[Node, tuple[PartKey, ...]]
_SHOWN = 5  # saved values that a pair prints


@dataclass(frozen=True)
class Pair(Shown):
    """The two halves of a training step, in the calling convention that AOTAutograd has for them::

        forward(*primals)                    ->  (*outputs, *saved, *sizes)
        backward(*sizes, *saved, *tangents)  ->  gradients

    Nodes of both have the names, and the very ``meta["val"]``, of the joint graph: a saved value is called alike in
    both, and has the same storage. In a notebook a pair draws how large both are and what is saved; `view` and
    `to_html` are a page of forward, what is saved, backward and the memory of each step. They take ``costs`` (FLOPs by
    default), ``memory`` of the device and a ``title``.

    Attributes:
        forward: takes parameters, buffers and inputs; gives the outputs and what backward needs.
        backward: takes what forward saved and the gradients of outputs; gives gradients.
        outputs: how many outputs of forward are outputs of the step.
        saved: names of the saved tensors (and objects), in the order in which they are handed over.
        sizes: names of the saved symbolic sizes.
        plan: the complete plan that it was cut by; ``None`` if one of torch's partitioners made it.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int
    saved: tuple[str, ...]
    sizes: tuple[str, ...]
    plan: Plan | None = None

    __repr__ = brief

    @property
    def saved_values(self) -> tuple[SavedValue, ...]:
        """What forward saves for backward, the largest first: each with its module, its op and its bytes.

        Several values may be views of one storage, which takes its bytes once.
        """
        nodes = {node.name: node for node in self.forward.graph.nodes}
        held = storages_shown(self.forward.graph.find_nodes(op="placeholder"))
        return tuple(sorted((SavedValue.of(nodes[name], held) for name in self.saved), key=lambda value: -value.nbytes))

    def __str__(self) -> str:
        """A few lines: the plan, the graphs, how much is saved, and what is largest of it."""
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
        """Read off what is saved from two modules that keep the calling convention."""
        handed: Any = forward.graph.output_node().args[0][outputs:]  # type: ignore[index]
        sizes = [node.name for node in handed if is_size(node)]
        saved = [node.name for node in handed if node.name not in sizes]
        return cls(forward, backward, outputs, tuple(saved), tuple(sizes))

    def run(self, primals: list[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run forward, then backward, on real values; yields the outputs and the gradients.

        Each value is freed after its last use, saved ones during backward, as under AOTAutograd: ``primals`` is
        emptied, and what the caller does not hold goes as early as possible.
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


def _run(gm: fx.GraphModule, values: list[Any]) -> Any:
    """Run a graph and free each value after its last use, one that nobody reads at once; empties ``values``."""
    interpreter = fx.Interpreter(gm)
    for node in gm.graph.nodes:
        if not node.users and node.op not in ("placeholder", "output"):
            interpreter.user_to_last_uses.setdefault(node, []).append(node)
    return interpreter.boxed_run(values)


def divide(flow: JointFlow, policy: PolicyLike, costs: Costs) -> Pair:
    """Cut a joint graph into forward and backward: plan, honour checkpoint tags, complete, check, emit.

    What the policy does not place stays where eager autograd has it.

    Raises:
        PlanError: SK202 for a second copy of what may run only once, SK206 for parts other than the two, SK208 for
            nodes that are needed and planned nowhere, SK210 for an effect that is planned in the other half.
        CycleError: SK203 when forward would need a value, or an effect, of backward.
    """
    decided = as_plan(policy, flow, costs)
    plan = _complete(flow, honour(flow, _with_homes(flow, decided)))
    check(flow, plan)
    _check_effects(flow, plan)
    _check_order(flow, plan)
    taken = crossing(flow, plan)
    sizes = [n for n in taken if is_size(n)]
    saved = sorted((n for n in taken if not is_size(n)), key=_rank)
    primals = [n for n in flow.graph.find_nodes(op="placeholder") if n not in flow.backward_inputs]
    order = EmissionOrder(flow)
    forward = _emit(flow, order.forward(plan.members(FORWARD), taken), primals, [*flow.outputs, *saved, *sizes])
    given = [*sizes, *saved, *flow.backward_inputs]
    backward = _emit(flow, order.backward(plan.members(BACKWARD)), given, flow.gradients)
    names, numbers = (tuple(n.name for n in group) for group in (saved, sizes))
    return Pair(forward, backward, flow.forward_outputs, names, numbers, plan)


def _with_homes(flow: JointFlow, plan: Plan) -> Plan:
    """The plan with a place for every placeable node."""
    places = homes(flow).places | {n: plan.places[n] for n in flow.nodes if n in plan.places}  # type: ignore[operator]
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
    """Give inputs, members of tuples and attributes their places."""
    places: Places = {n: (FORWARD,) for n in flow.scope if n.op == "placeholder"}
    places |= dict.fromkeys(flow.backward_inputs, (BACKWARD,))
    places |= {n: plan.places[flow.producer(n)] for n in flow.scope if flow.producer(n) in plan.places}
    for node in flow.scope:
        if node.op == "get_attr":
            places[node] = tuple(dict.fromkeys(key for user in node.users for key in places.get(user, ())))
    return replace(plan, places={n: places.get(n, ()) for n in flow.index if n.op != "output"})


def _check_effects(flow: JointFlow, plan: Plan) -> None:
    """What may run only once runs where eager autograd runs it: backward may come much later, or never."""
    for node, reason in flow.once.items():
        producer = flow.producer(node)
        if producer in flow.homes and plan[producer] != flow.homes[producer]:
            here, home = plan.home(producer), flow.homes.home(producer)
            raise PlanError(
                "SK210",
                f"{producer.name} is planned in {here!r}, but it belongs to {home!r}: {reason}",
                "Leave it where `homes` of splitkit.training.flow has it; `unrepeatable` there lists such nodes.",
                [producer],
            )


def _check_order(flow: JointFlow, plan: Plan) -> None:
    """Forward runs before backward: it can wait for nothing that is only there, nor come after a repeated effect."""
    home = homes(flow)
    for node, keys in plan.items():
        if FORWARD not in keys or node.op == "placeholder":
            continue
        for read in node.all_input_nodes:
            if FORWARD not in plan[read]:
                raise _cycle(node, "reads", read)
        for before in flow.after[node]:
            if home.home(before) == FORWARD and BACKWARD in plan[before]:
                raise _cycle(node, "must run after the effect or read of", before)
    for output in nodes_in(flow.outputs):
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
    """Where a saved value stands: objects after tensors, and those last whose version autograd does not check.

    Part of the calling convention (``_extract_fwd_bwd_modules`` of 2.13 and 2.15); 2.11 sets no such mark.
    """
    return not isinstance(value_of(node), torch.Tensor), bool(node.meta.get("saved_tensor_with_no_vc_check"))


def _emit(flow: JointFlow, nodes: Iterable[Node], inputs: Sequence[Node], outputs: Sequence[object]) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[Node, Node]()
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(_copied(value, env) for value in outputs))
    return fx.GraphModule(flow.root, graph)


def _copied(value: object, env: Mapping[Node, Node]) -> Any:
    return env[value] if isinstance(value, Node) else value
