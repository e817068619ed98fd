"""Fuse partitions in place, as torch's ``fuse_by_partitions``: each becomes a module that the graph calls.

The modules, their inputs and outputs, the names of nodes and their meta are torch's. What differs is the order of the
calls, which keeps writes, random numbers and ambient state in order, and that nothing is changed if a partition cannot
be fused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import NoReturn

from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.utils.common import lift_subgraph_as_module

from splitkit import _torch
from splitkit.engine.codegen.emit import numbered_names
from splitkit.errors import CycleError, PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.dependences import Before, all_dependences, lowest_first

Key = tuple[int, int]
"""A place in the graph that is being made: a position in the old graph, and 0 for a call, 1 ... for its outputs."""


def fuse_partitions(flow: Dataflow, partitions: Sequence[Iterable[Node]], prefix: str) -> fx.GraphModule:
    """Replace each partition by a call of a module ``prefix0``, ``prefix1`` ..., and return the graph module.

    Inputs of the graph and its output stay outside; empty partitions are left out. A name that is taken gets a suffix.

    Args:
        flow: facts about the graph, which is modified.
        partitions: the nodes of each partition, in an order that is kept where dependences allow.
        prefix: the beginning of the modules' names.

    Raises:
        PlanError: SK310 if a node is in two partitions, or is not a node of the graph.
        CycleError: SK311 if partitions wait for each other, or a partition for itself through a node outside.
    """
    before = all_dependences(flow)
    fused = [_sorted(number, nodes, before, flow) for number, nodes in fusible_nodes(flow, partitions).items()]
    order = _order_of_calls(flow, fused, before)
    made: dict[Key, Node] = {}
    modules: dict[str, fx.GraphModule] = {}
    for partition in fused:
        name = next(free for free in numbered_names(f"{prefix}{partition.number}") if not hasattr(flow.root, free))
        calls, modules[name] = _fuse(flow, partition, name)
        made |= calls
    for last, node in itertools.pairwise([made.get(key) or node for key, node in order]):
        if last.next is not node:
            last.append(node)
    flow.root.recompile()
    # Only now: `recompile` would generate the code of every child again.
    for name, module in modules.items():
        flow.root.add_submodule(name, module)
    return flow.root


@dataclass
class _Fused:
    """A partition that is to be fused.

    Attributes:
        number: its number among the partitions given.
        nodes: its nodes in the order in which they will run.
        outputs: the nodes whose values are read outside.
        place: the position in the graph where it is called.
    """

    number: int
    nodes: list[Node]
    outputs: list[Node]
    place: int

    def key_of(self, node: Node) -> Key:
        """Return the key of the call, or of the node that takes this node's value from the tuple that it returns."""
        is_member = len(self.outputs) > 1 and node in self._members
        return (self.place, 1 + self._members[node]) if is_member else (self.place, 0)

    @cached_property
    def _members(self) -> dict[Node, int]:
        return {node: i for i, node in enumerate(self.outputs)}


def fusible_nodes(flow: Dataflow, partitions: Iterable[Iterable[Node]]) -> dict[int, list[Node]]:
    """Return number -> the nodes that can be fused, for partitions that have such nodes.

    Raises:
        PlanError: SK310 if a node is in two partitions, or is not a node of the graph.
    """
    found: dict[int, list[Node]] = {}
    number_of: dict[Node, int] = {}
    for number, given in enumerate(partitions):
        inside = list(dict.fromkeys(given))
        for node in inside:
            if node not in flow.index:
                raise PlanError(
                    "SK310", f"partition {number} names {node}, which is not a node of this graph",
                    "Propose partitions of the graph as it is now; nodes that were fused before are gone.", [node],
                )  # fmt: skip
            if number_of.setdefault(node, number) != number:
                raise PlanError(
                    "SK310", f"{node.name} is in partitions {number_of[node]} and {number}",
                    "Give each node one partition.", [node],
                )  # fmt: skip
        if inside := [node for node in inside if node.op not in ("placeholder", "output")]:
            found[number] = inside
    return found


def _sorted(number: int, nodes: Sequence[Node], before: Before, flow: Dataflow) -> _Fused:
    """Keep the order given as far as dependences allow, which among the nodes of a graph make no cycle."""
    keys = {node: (place, 0) for place, node in enumerate(nodes)}
    inside = {key: {keys[n] for n in before[node] if n in keys} for node, key in keys.items()}
    order = [nodes[place] for place, _ in lowest_first(inside)]
    outputs = [node for node in order if any(user not in keys for user in node.users)]
    return _Fused(number, order, outputs, flow.index[order[-1]])


def _order_of_calls(flow: Dataflow, fused: Sequence[_Fused], before: Before) -> list[tuple[Key, Node]]:
    """Return the order of the new graph: the key of each node, and the old node if it stays.

    As in torch, a partition is called where its last node was, and nodes keep their order as far as dependences allow.
    """
    of_node = {node: partition for partition in fused for node in partition.nodes}
    keys = {node: of_node[node].key_of(node) if node in of_node else (i, 0) for node, i in flow.index.items()}
    calls = {(partition.place, 0): partition for partition in fused}
    waits: dict[Key, set[Key]] = {key: set() for key in (*keys.values(), *calls)}
    for key in waits:
        if key[1]:
            waits[key].add((key[0], 0))
    for node, earlier in before.items():
        mine = of_node.get(node)
        key = keys[node] if mine is None else (mine.place, 0)
        waits[key].update(keys[n] for n in earlier if mine is None or of_node.get(n) is not mine)
    order = lowest_first(waits)
    if len(order) < len(waits):
        names = {key: node.name for node, key in keys.items()}
        _refuse_cycle(waits, order, names | {key: f"partition {p.number}" for key, p in calls.items()})
    nodes = list(flow.index)
    return [(key, nodes[key[0]]) for key in order]


def _refuse_cycle(waits: Mapping[Key, Collection[Key]], order: Iterable[Key], names: Mapping[Key, str]) -> NoReturn:
    done = set(order)
    path = dict.fromkeys([next(key for key in waits if key not in done)])
    while (key := next(k for k in waits[next(reversed(path))] if k not in done)) not in path:
        path[key] = None
    found = [*path][[*path].index(key) :]
    cycle = [*dict.fromkeys(names[key[0], 0] for key in reversed(found))]
    raise CycleError(
        "SK311",
        f"partitions cannot be fused because of a cycle: {' -> '.join([*cycle, cycle[0]])}",
        "Two nodes may be in one partition only if everything between them is in it too; writes, random numbers and "
        "changes of the ambient state also order nodes. The partitions of propose_partitions() have no cycles.",
        cycle,
    )


def _fuse(flow: Dataflow, partition: _Fused, name: str) -> tuple[dict[Key, Node], fx.GraphModule]:
    """Replace the nodes of a partition by a call of a module that is not there yet.

    Returns:
        Key -> the call, and the nodes that take its outputs; and the module.
    """
    gm, outputs = flow.root, partition.outputs
    inputs, subgraph = _subgraph(partition)
    module, _ = lift_subgraph_as_module(gm, subgraph, class_name=name)
    if any(node in flow.once for node in partition.nodes):
        _torch.mark_impure(module)
    gm.add_submodule(name, nn.Module())  # fx wants a module of that name
    with gm.graph.inserting_after(partition.nodes[-1]):
        call = gm.graph.call_module(name, tuple(inputs))
    made: dict[Key, Node] = {(partition.place, 0): call}
    if len(outputs) == 1:
        outputs[0].replace_all_uses_with(call, propagate_meta=True)
    elif outputs:
        with gm.graph.inserting_before(call.next):
            for output in outputs:
                made[partition.key_of(output)] = taken = gm.graph.call_function(getitem, (call, len(made) - 1))
                output.replace_all_uses_with(taken, propagate_meta=True)
        call.meta["val"] = tuple(output.meta.get("val") for output in outputs)
    for node in reversed(partition.nodes):
        gm.graph.erase_node(node)
    return made, module


def _subgraph(partition: _Fused) -> tuple[list[Node], fx.Graph]:
    """Return the nodes whose values a partition takes, in the order of their first use, and its graph."""
    graph = fx.Graph()
    inside = set(partition.nodes)
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []

    def copied(node: Node) -> Node:
        if node not in copies:
            assert node not in inside
            inputs.append(node)
            copies[node] = graph.placeholder(node.name, type_expr=node.type)
            copies[node].meta = copy.copy(node.meta)
        return copies[node]

    for node in partition.nodes:
        copies[node] = graph.node_copy(node, copied)
    values = tuple(copies[node] for node in partition.outputs)
    graph.output(values[0] if len(values) == 1 else values)
    return inputs, graph
