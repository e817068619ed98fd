"""Inputs that share memory with each other or with an attribute: looked for at each call, where it could matter.

The order of parts stands on what the graph shows, and a graph does not show that its caller passes one tensor twice::

    a = y * 1        part A      whole: a, b, r          f(t, t): r reads what b wrote
    b = x.add_(10)   part B      split: A (a, r), B      f(t, t): r runs first
    r = a - y        part A

So the parent of such a split begins with a node that compares the memory of its inputs (`splitkit.sharing`). The parent
of a split whose parts keep the order of the graph, as stages do, and of a graph that writes nothing, has none.

A parameter of a part is looked up at each call, and passed over when it is gone: users replace parts::

    submod_1 = self.submod_1;  l = getattr(submod_1, "l", None);  weight = getattr(l, "weight", None)
    refuse_shared([x, y, weight], ...)
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.cut import Subgraph
from splitkit.graph.checks import check_nodes
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import REACHED, SIZES, Memory, memory_of
from splitkit.graph.ops import PURE
from splitkit.graph.storages import Lookup, storage_key
from splitkit.graph.symbols import value_of
from splitkit.sharing import Use, refuse_shared

_ANYWHERE = ("as_strided", "set_", "resize", "storage")
"""Parts of the names of ops that may reach bytes of a storage which the tensor that they are given does not show."""


@dataclass(frozen=True)
class OverlapCheck:
    """What a check of a split's inputs has to know.

    Attributes:
        inputs: the inputs that may get in each other's way, or in that of an attribute -> their class.
        attributes: parameters and buffers of the parent that may -> their class.
        uses: class -> who uses it out of order with a user of another class.
        whole: some op may reach bytes that its input does not show, so that whole storages are compared.
    """

    inputs: Mapping[str, int]
    attributes: Mapping[str, int]
    uses: Sequence[Sequence[Use]]
    whole: bool

    def write(self, module: fx.GraphModule, parts: Collection[str]) -> None:
        """Put the check behind the inputs of ``module``, whose ``parts`` have these names."""
        graph = module.graph
        places = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
        with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
            read = _Reader(graph, parts)
            given = [*(places[name] for name in self.inputs), *map(read.attribute, self.attributes)]
            table = [(name, c, self.uses[c]) for name, c in (*self.inputs.items(), *self.attributes.items())]
            graph.call_function(refuse_shared, (given, self.whole, json.dumps(table)))
        module.recompile()


class _Reader:
    """Writes nodes that read attributes, each once."""

    def __init__(self, graph: fx.Graph, parts: Collection[str]) -> None:
        self.graph, self.parts = graph, parts
        self.made: dict[str, Node] = {}

    def attribute(self, name: str) -> Node:
        """An attribute of the parent; or one of a part, ``None`` at a call where it is gone."""
        if name not in self.made:
            *owner, last = name.split(".")
            if not owner or owner[0] not in self.parts:
                self.made[name] = self.graph.get_attr(name)
            else:
                inside = self.attribute(".".join(owner)) if owner[1:] else self._part(owner[0])
                self.made[name] = self.graph.call_function(getattr, (inside, last, None))
        return self.made[name]

    def _part(self, name: str) -> Node:
        if name not in self.made:
            self.made[name] = self.graph.get_attr(name)
        return self.made[name]


def rename_watched(graph: fx.Graph, rename: Callable[[str], str], parts: Collection[str] = ()) -> bool:
    """Let the check of a parent read its attributes under other names; gives whether there is such a check.

    Args:
        graph: of the parent, whose code is to be made again.
        rename: the name of an attribute -> its name now.
        parts: names of the parts, of which attributes may be gone.
    """
    checks = graph.find_nodes(op="call_function", target=refuse_shared)
    for check in checks:
        given, whole, table = cast(tuple[Sequence[Node], bool, str], check.args)
        known = json.loads(table)
        inputs = [n for n in given if n.op == "placeholder"]  # which come first
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


def overlap_check(
    flow: Dataflow, units: Sequence[Subgraph | Node], qualified_names: Callable[[], Mapping[str, str]]
) -> OverlapCheck | None:
    """The check that a split needs; ``None`` where no call can go wrong.

    Args:
        flow: facts about the graph.
        units: the parts, and the host's own nodes, in the order of the parent.
        qualified_names: gives the parameters and buffers of the parent, each with its name in the original.
    """
    acting = [e for e in flow.effects.values() if e is not PURE]
    inputs = [n for n in flow.scope if n.op == "placeholder"]
    if not inputs or not any(e.writes or e.writes_state or not e.known for e in acting):
        return None
    moments = _moments(units)
    if _keeps_order(flow, moments):
        return None
    held = [storage_key(t) for e in acting for t in e.reads_state]
    attributes = [n for n in flow.scope if n.op == "get_attr"]
    memory = memory_of(flow.effects, flow.root, besides=[*inputs, *attributes, *held])
    of_inputs = {str(n.target).lstrip("*"): _class_in(memory, n) for n in inputs if _may_hold_memory(n)}
    roots = {*of_inputs.values(), *(_class_in(memory, item) for item in (*attributes, *held))}
    uses = _involved(_uses(flow, memory, roots, moments), set(of_inputs.values()))
    if not uses:
        return None
    number = {c: i for i, c in enumerate(uses)}
    of_attributes: dict[str, int] = {}
    find = Lookup(flow.root)
    for name, original in qualified_names().items():
        tensor = find(original)
        if isinstance(tensor, torch.Tensor) and (c := _class_in(memory, storage_key(tensor))) in number:
            of_attributes[name] = number[c]
    watched = {name: number[c] for name, c in of_inputs.items() if c in number}
    return OverlapCheck(watched, of_attributes, list(uses.values()), _reaches_anywhere(flow))


def _may_hold_memory(node: Node) -> bool:
    """Whether an input may be a tensor, or hold some."""
    return not isinstance(value_of(node), (int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool))


def _reaches_anywhere(flow: Dataflow) -> bool:
    """Whether a node may touch bytes of a storage that the tensors which it is given do not show."""
    return any(
        not effect.known or any(part in _torch.target_name(node) for part in _ANYWHERE)
        for node, effect in flow.effects.items()
        if effect is not PURE
    )


def _involved(uses: Mapping[Hashable, list[Use]], inputs: Set[Hashable]) -> dict[Hashable, list[Use]]:
    """The uses of each class that are out of order with one of another class, one of the two being an input's.

    Uses of one class are in order, or the plan would have been refused.
    """
    all_ = _Order(use for found in uses.values() for use in found)
    of_inputs = _Order(use for c, found in uses.items() if c in inputs for use in found)
    found = {c: [u for u in us if (all_ if c in inputs else of_inputs).clashes(u)] for c, us in uses.items()}
    return {c: us for c, us in found.items() if us}


class _Order:
    """Uses in the order of the graph, to ask which others are out of order with them, each in logarithmic time."""

    def __init__(self, uses: Iterable[Use]) -> None:
        known = sorted(uses)
        self.every, self.writes = _Side(known), _Side([use for use in known if use.writes])

    def clashes(self, use: Use) -> bool:
        """Whether one of them, a write unless ``use`` is one, runs on the wrong side of it."""
        return (self.every if use.writes else self.writes).clashes(use)


class _Side:
    def __init__(self, uses: Sequence[Use]) -> None:
        self.places = [use.place for use in uses]
        self.latest = list(accumulate((use.last for use in uses), max))  # up to each
        self.earliest = list(accumulate((use.first for use in reversed(uses)), min))[::-1]  # from each on

    def clashes(self, use: Use) -> bool:
        before, after = bisect_left(self.places, use.place), bisect_right(self.places, use.place)
        late = before > 0 and self.latest[before - 1] >= use.first
        return late or (after < len(self.places) and self.earliest[after] <= use.last)


def _class_in(memory: Memory, item: Hashable) -> Hashable:
    """The class of a node or storage; all that opaque code may reach is one."""
    c = memory.members.get(item, item)
    return REACHED if c in memory.reached else c


def _moments(units: Sequence[Subgraph | Node]) -> dict[Node, tuple[int, int]]:
    """When each node runs in the split: its first copy, and its last."""
    moments: dict[Node, tuple[int, int]] = {}
    nodes = (n for unit in units for n in (unit.nodes if isinstance(unit, Subgraph) else (unit,)))
    for moment, node in enumerate(nodes):
        moments[node] = (moments.get(node, (moment,))[0], moment)
    return moments


def _keeps_order(flow: Dataflow, moments: Mapping[Node, tuple[int, int]]) -> bool:
    """Whether the nodes run one by one in the order of the graph."""
    latest = -1
    for node in filter(moments.__contains__, flow.nodes):
        first, last = moments[node]
        if first <= latest:
            return False
        latest = last
    return True


def _uses(
    flow: Dataflow, memory: Memory, roots: Set[Hashable], moments: Mapping[Node, tuple[int, int]]
) -> dict[Hashable, list[Use]]:
    """Who uses the memory of inputs and attributes."""
    uses: dict[Hashable, list[Use]] = {}
    for node, effect in flow.effects.items():
        if node.op in ("placeholder", "get_attr") or node in flow.followers or node not in moments:
            continue
        writes, touched = ({_root_of(memory, c) for c in classes} for classes in memory.use(node, effect))
        for c in touched & roots:
            uses.setdefault(c, []).append(Use(flow.index[node], *moments[node], c in writes, node.name))
    return uses


def _root_of(memory: Memory, c: Hashable) -> Hashable:
    """The class itself, where it is its sizes that are asked for as well."""
    if isinstance(c, tuple) and c[:1] == (SIZES,):
        c = c[1]
    return REACHED if c in memory.reached else c
