"""Inputs that share memory with each other or with an attribute: looked for at each call, where it could matter.

The order of parts stands on what the graph shows, and a graph does not show that its caller passes one tensor twice::

    a = y * 1        part A      whole: a, b, r          f(t, t): r reads what b wrote
    b = x.add_(10)   part B      split: A (a, r), B      f(t, t): r runs first
    r = a - y        part A

So the parent of such a split asks each call whether inputs share memory. One whose parts keep the order of the graph,
as stages do, and one of a graph that writes nothing, asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.engine.cut import Subgraph
from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import REACHED, SIZES, Memory, memory_of
from splitkit.graph.ops import PURE
from splitkit.graph.storages import Lookup, attribute, storage_key


@dataclass(frozen=True, order=True)
class Use:
    """A node that reads or writes memory: its place in the graph, its first and last in the split."""

    index: int
    first: int
    last: int
    writes: bool
    name: str


class OverlapCheck:
    """A hook of the parent: refuses a call whose inputs share memory that the parts would use in another order.

    Attributes:
        inputs: the inputs in their order, each with the number of its class, ``None`` if nobody uses it.
        attributes: parameters and buffers of the parent -> their class.
        uses: class -> who uses it.
    """

    def __init__(
        self, inputs: Sequence[tuple[str, int | None]], attributes: Mapping[str, int], uses: Sequence[Sequence[Use]]
    ) -> None:
        self.inputs, self.attributes, self.uses = inputs, attributes, uses

    def watch(self, module: fx.GraphModule) -> None:
        """Be called before each run of ``module``, and of its copies."""
        module.register_forward_pre_hook(self, with_kwargs=True)
        _torch.on_deepcopy(module, self.watch)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise SK212 if the split would not do what the whole does."""
        found: dict[Hashable, dict[int, str]] = {}
        for (name, number), given in zip(self.inputs, given_to(module.graph, args, kwargs), strict=False):
            for tensor in filter(_has_memory, pytree.tree_leaves(given)) if number is not None else ():
                found.setdefault(storage_key(tensor), {})[cast(int, number)] = name
        for name, number in self.attributes.items():
            tensor = attribute(module, name)
            if isinstance(tensor, torch.Tensor) and (key := storage_key(tensor)) in found:
                found[key].setdefault(number, name)
        for shared in found.values():
            if len(shared) > 1 and (pair := _out_of_order(use for number in shared for use in self.uses[number])):
                _refuse(list(shared.values()), *pair)


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def given_to(graph: fx.Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call gives to each input of a graph, in their order; defaults and what does not fit are left out."""
    info = getattr(_torch.codegen_of(graph), "pytree_info", None)
    if info is not None:  # inputs are the leaves of the arguments
        later = [name for name in info.orig_args if name in kwargs]
        return pytree.tree_leaves((args, [kwargs[name] for name in later]))
    names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    left = list(args)
    given: list[Any] = []
    for name in names:
        if name.startswith("**"):
            given.append({k: v for k, v in kwargs.items() if k not in names})
        elif name.startswith("*"):
            given.append(left)
            left = []
        else:
            given.append(left.pop(0) if left else kwargs.get(name))
    return given


def _refuse(names: Sequence[str], one: Use, other: Use) -> None:
    writer = one if one.writes else other
    raise PlanError(
        "SK212",
        f"{' and '.join(names)} share memory in this call, and {writer.name} writes it: "
        f"the graph runs {one.name} before {other.name}, the parts do not",
        "Pass a copy (x.clone()) as one of them, or split into parts that keep the order of the graph.",
        [one.name, other.name],
    )


def _out_of_order(uses: Iterable[Use]) -> tuple[Use, Use] | None:
    """Two uses, one of them a write, that run in another order than that of the graph."""
    latest: Use | None = None
    latest_write: Use | None = None
    for use in sorted(uses):
        before = latest if use.writes else latest_write
        if before is not None and before.last >= use.first:
            return before, use
        if latest is None or use.last > latest.last:
            latest = use
        if use.writes and (latest_write is None or use.last > latest_write.last):
            latest_write = use
    return None


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
    roots = {_class_in(memory, item) for item in (*inputs, *attributes, *held)}
    uses = _uses(flow, memory, roots, moments)
    if _out_of_order({use for found in uses.values() for use in found}) is None:
        return None
    number = {c: i for i, c in enumerate(uses)}
    of_attributes: dict[str, int] = {}
    find = Lookup(flow.root)
    for name, original in qualified_names().items():
        tensor = find(original)
        if isinstance(tensor, torch.Tensor) and (c := _class_in(memory, storage_key(tensor))) in number:
            of_attributes[name] = number[c]
    of_inputs = [(str(n.target), number.get(_class_in(memory, n))) for n in inputs]
    return OverlapCheck(of_inputs, of_attributes, list(uses.values()))


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
