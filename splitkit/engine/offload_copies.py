"""Emit the copies of offloaded values: to the host in forward, and back in backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.symbols import value_of
from splitkit.memory.kernels.host_copies import ARRIVED, TO_DEVICE, TO_HOST, host_value
from splitkit.plans.offloaded import Offloaded
from splitkit.training.flow import JointFlow, output_nodes
from splitkit.training.movable_values import why_not_moved

_Env = dict[Node, Node]


@dataclass
class HostCopies:
    """The copies of one pair, by the nodes of the joint graph at which they stand.

    Attributes:
        values: the values that are moved.
        made: value -> its copy on the host, as both graphs show it.
        release: node of forward -> values whose copies are waited for after it.
        fetch: node of backward -> values that are asked for before it.
        read: node of backward -> values that are waited for before it.
    """

    values: tuple[Node, ...] = ()
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
            if flaw := _why_not(flow, value, saved, early):
                raise _refused(value, flaw, "Leave it out of Plan.offloaded, or plan again.")
            last = max((early[n] for n in _readers(flow, value, forward)), default=early[value])
            first = next(iter(_readers(flow, value, backward)))
            release, fetch = one.release or forward[max(last, early[value])], one.fetch or first
            if early.get(release, -1) < early[value]:
                way = "Name a node of forward that runs later, or None."
                raise _refused(value, f"it cannot leave the device after {release.name}", way)
            if late.get(fetch, late[first] + 1) > late[first]:
                way = f"Name a node of backward that runs no later than {first.name}, or None."
                raise _refused(value, f"{first.name} reads it, before it is fetched at {fetch.name}", way)
            found.made[value] = host_value(value_of(value))
            found.release.setdefault(release, []).append(value)
            found.fetch.setdefault(fetch, []).append(value)
            found.read.setdefault(first, []).append(value)
        found.values = tuple(found.made)
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
            hosts[node] = self._call(graph, f"copy_of_{node.name}", TO_HOST, (env[node],), node, self.made[node])
        for value in self.release.get(node, ()):
            args = hosts[value], env[value]
            hosts[value] = self._call(graph, self.name(value), ARRIVED, args, value, self.made[value])

    def before(self, graph: fx.Graph, node: Node, env: _Env, hosts: _Env, copies: _Env) -> None:
        """Add what precedes a node of backward: the starts of copies, and the ends of those that it reads."""
        for value in self.fetch.get(node, ()):
            args = hosts[value], value_of(value).device
            copies[value] = self._call(graph, f"copy_of_{value.name}_back", TO_DEVICE, args, value, value_of(value))
        for value in self.read.get(node, ()):
            args = copies[value], hosts[value]
            env[value] = self._call(graph, back_on_device(value.name), ARRIVED, args, value, value_of(value))

    def _call(
        self, graph: fx.Graph, name: str, target: object, args: tuple[object, ...], value: Node, val: object
    ) -> Node:
        made = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
        made.meta = {**value.meta, "val": val}
        return made


def on_host(name: str) -> str:
    """Return the name of the copy of a value on the host."""
    return f"{name}_on_host"


def back_on_device(name: str) -> str:
    """Return the name of a value that is on the device again."""
    return f"{name}_back"


def _why_not(flow: JointFlow, value: Node, saved: Collection[Node], early: Collection[Node]) -> str:
    if value not in saved:
        return "backward does not take it from forward"
    if flaw := why_not_moved(flow, value):
        return flaw
    (root,) = flow.storages.under(value)
    if others := [node.name for node in saved if node is not value and root in flow.storages.under(node)]:
        return f"{others[0]}, which is saved too, lies in the same memory"
    if any(root in flow.storages.under(node) for node in output_nodes((*flow.outputs, *flow.gradients))):
        return "it is returned to the caller"
    return "" if value in early else "forward does not compute it"


def _readers(flow: JointFlow, value: Node, nodes: Iterable[Node]) -> Iterable[Node]:
    """Return the nodes that read a value or a view of it, in order."""
    roots = set(flow.storages.under(value))
    return (n for n in nodes if any(r is value or roots & {*flow.storages.under(r)} for r in n.all_input_nodes))


def _refused(value: Node, reason: str, remedy: str) -> PlanError:
    return PlanError("SK220", f"{value.name} cannot be offloaded: {reason}", remedy, [value])
