"""Check at each call of a split that its inputs share no memory in a way that the order of its parts does not respect.

The order of parts follows from the graph, and a graph does not show that its caller passes one tensor twice::

    a = y * 1        part A      whole: a, b, r          f(t, t): r reads what b wrote
    b = x.add_(10)   part B      split: A (a, r), B      f(t, t): r runs first
    r = a - y        part A

So the parent of such a split begins with a node that compares the memory of its inputs
(`splitkit.graph.input_overlap`). There is no such node if the parts keep the order of the graph, as stages do, or if
the graph writes nothing.

Each call looks up the parameters of parts anew and skips those that are gone, because users replace parts::

    submod_1 = self.submod_1;  l = getattr(submod_1, "l", None);  weight = getattr(l, "weight", None)
    refuse_shared([x, y, weight], ...)
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.codegen.emit import Emitted
from splitkit.engine.subgraphs import Subgraph
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.input_overlap import Use, check_nodes, refuse_shared
from splitkit.graph.ops import PURE, Effects
from splitkit.graph.shared_memory import REACHED, SIZES, Memory, memory_classes
from splitkit.graph.storages import Lookup, storage_key, value_of

_ANYWHERE = ("as_strided", "set_", "resize", "storage")
"""Parts of the names of ops that may touch bytes of a storage outside the tensor they are given."""


class _Reader:
    """Writes the nodes that read attributes, one per attribute."""

    def __init__(self, graph: fx.Graph, parts: Collection[str]) -> None:
        self.graph, self.parts = graph, parts
        self.made: dict[str, Node] = {}

    def attribute(self, name: str) -> Node:
        """Return a node for an attribute of the parent or a part; it yields ``None`` where a part's is gone."""
        if name not in self.made:
            owner, _, last = name.rpartition(".")
            if owner and name.split(".")[0] in self.parts:
                self.made[name] = self.graph.call_function(getattr, (self.attribute(owner), last, None))
            else:
                self.made[name] = self.graph.get_attr(name)
        return self.made[name]


def rename_checked_attributes(graph: fx.Graph, rename: Callable[[str], str], parts: Collection[str] = ()) -> bool:
    """Rename the attributes that the check of a parent reads, and return whether the parent has such a check.

    Args:
        graph: the graph of the parent; the caller recompiles its module.
        rename: returns the new name of an attribute.
        parts: the names of the parts, whose attributes may be gone.
    """
    checks = graph.find_nodes(op="call_function", target=refuse_shared)
    for check in checks:
        given, whole, table = cast(tuple[Sequence[Node], bool, str], check.args)
        known = json.loads(table)
        inputs = [n for n in given if n.op == "placeholder"]  # inputs come first
        for entry in known[len(inputs) :]:
            entry[0] = rename(entry[0])
        before = check_nodes(graph).keys() - {check}
        with graph.inserting_before(check):
            read = _Reader(graph, parts)
            attributes = [read.attribute(entry[0]) for entry in known[len(inputs) :]]
            check.args = ([*inputs, *attributes], whole, json.dumps(known))
        for node in reversed([n for n in graph.nodes if n in before]):
            graph.erase_node(node)
    return bool(checks)


def add_overlap_check(flow: Dataflow, steps: Sequence[Subgraph | Node], emitted: Emitted) -> None:
    """Let the parent of a split refuse inputs that share memory, unless no call can go wrong.

    A class is a set of tensors that the graph knows to share memory; the check compares tensors of different classes.

    Args:
        flow: facts about the graph.
        steps: the parts and the parent's own nodes, in the order in which the parent runs them.
        emitted: the parent and the parts; the check is inserted after the inputs of the parent.
    """
    # Without a write no order of reads matters, and in the order of the graph every call is right.
    acting = [e for e in flow.effects.values() if e is not PURE]
    inputs = [n for n in flow.scope if n.op == "placeholder"]
    if not inputs or not any(e.writes or e.writes_state or not e.known for e in acting):
        return
    if keeps_order(flow, steps):
        return
    times = _execution_times(steps)
    held = [storage_key(t) for e in acting for t in e.reads_state]
    attributes = [n for n in flow.scope if n.op == "get_attr"]
    memory = memory_classes(flow.effects, flow.root, besides=[*inputs, *attributes, *held])
    of_inputs = {str(n.target).lstrip("*"): _class_in(memory, n) for n in inputs if _may_hold_memory(n)}
    roots = {*of_inputs.values(), *(_class_in(memory, item) for item in (*attributes, *held))}
    every = _uses(flow, memory, roots, times)
    uses = _involved(every, set(of_inputs.values()))
    if not uses:
        return
    find, of_attributes = Lookup(flow.root), dict[str, Hashable]()
    for name, original in emitted.qualified_names().items():
        tensor = find(original)
        if isinstance(tensor, torch.Tensor) and (c := _class_in(memory, storage_key(tensor))) in uses:
            of_attributes[name] = c
    watched = {name: c for name, c in of_inputs.items() if c in uses}
    anywhere = {node.name for node, effect in flow.effects.items() if _reaches_anywhere(node, effect)}
    whole = {c: any(use.name in anywhere for use in every[c]) for c in uses}
    number = {c: i for i, c in enumerate(uses)}
    table = [(name, number[c], uses[c], whole[c]) for name, c in (*watched.items(), *of_attributes.items())]
    graph = emitted.module.graph
    places = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        read = _Reader(graph, [name for name in emitted.attributes if name])
        given = [*(places[name] for name in watched), *map(read.attribute, of_attributes)]
        graph.call_function(refuse_shared, (given, any(whole.values()), json.dumps(table)))
    emitted.module.recompile()


def _may_hold_memory(node: Node) -> bool:
    """Whether an input may be a tensor or contain tensors."""
    return not isinstance(value_of(node), (int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool))


def _reaches_anywhere(node: Node, effect: Effects) -> bool:
    """Whether a node may touch bytes of a storage outside the tensors it is given."""
    return not effect.known or any(part in _torch.target_name(node) for part in _ANYWHERE)


def _involved(uses: Mapping[Hashable, list[Use]], inputs: Set[Hashable]) -> dict[Hashable, list[Use]]:
    """Return the uses of each class that run out of order with a use of another class, if one of the two is an input's.

    Uses of the same class are in order, or the plan would have been refused (SK203).
    """
    all_ = _Order(use for found in uses.values() for use in found)
    of_inputs = _Order(use for c, found in uses.items() if c in inputs for use in found)
    found = {c: [u for u in us if (all_ if c in inputs else of_inputs).clashes(u)] for c, us in uses.items()}
    return {c: us for c, us in found.items() if us}


class _Order:
    """Uses sorted by graph order, so that a use out of order with one of them is found in logarithmic time."""

    def __init__(self, uses: Iterable[Use]) -> None:
        known = sorted(uses)
        self._tables = {True: _table(known), False: _table([use for use in known if use.writes])}

    def clashes(self, use: Use) -> bool:
        """Whether one of the uses runs on the wrong side of ``use``; if ``use`` only reads, only writes count."""
        places, latest, earliest = self._tables[use.writes]
        before, after = bisect_left(places, use.place), bisect_right(places, use.place)
        return (before > 0 and latest[before - 1] >= use.first) or (after < len(places) and earliest[after] <= use.last)


def _table(uses: Sequence[Use]) -> tuple[list[int], list[int], list[int]]:
    """Return the places of uses in the graph, the latest time of every prefix and the earliest of every suffix."""
    latest = accumulate((use.last for use in uses), max)
    earliest = accumulate((use.first for use in reversed(uses)), min)
    return [use.place for use in uses], [*latest], [*earliest][::-1]


def _class_in(memory: Memory, item: Hashable) -> Hashable:
    """Return the class of a node, of a storage, or of an entry that stands for the sizes of a class.

    All memory that opaque code may reach is one class.
    """
    if isinstance(item, tuple) and item[:1] == (SIZES,):
        item = item[1]
    c = memory.members.get(item, item)
    return REACHED if c in memory.reached else c


def _execution_times(steps: Sequence[Subgraph | Node]) -> dict[Node, tuple[int, int]]:
    """Return when the first and the last copy of each node run in the split."""
    times: dict[Node, tuple[int, int]] = {}
    nodes = (n for step in steps for n in (step.nodes if isinstance(step, Subgraph) else (step,)))
    for time, node in enumerate(nodes):
        times[node] = (times.get(node, (time,))[0], time)
    return times


def keeps_order(flow: Dataflow, steps: Sequence[Subgraph | Node]) -> bool:
    """Whether the nodes run one by one in the order of the graph."""
    times = _execution_times(steps)
    return all(before[1] < after[0] for before, after in pairwise(times[n] for n in flow.nodes if n in times))


def _uses(
    flow: Dataflow, memory: Memory, roots: Set[Hashable], times: Mapping[Node, tuple[int, int]]
) -> dict[Hashable, list[Use]]:
    """Return the uses of each class of inputs and attributes."""
    uses: dict[Hashable, list[Use]] = {}
    for node, effect in flow.effects.items():
        if node.op in ("placeholder", "get_attr") or node in flow.followers or node not in times:
            continue
        writes, touched = ({_class_in(memory, c) for c in classes} for classes in memory.use(node, effect))
        for c in touched & roots:
            uses.setdefault(c, []).append(Use(flow.index[node], *times[node], c in writes, node.name))
    return uses
