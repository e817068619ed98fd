"""Inline the parts of a split, as they are now, into one graph again."""

from __future__ import annotations

import operator
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate, islice
from typing import Any

from torch import fx, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit import _torch
from splitkit._torch import attributes_of
from splitkit.engine.codegen.emit import ScopedGraph, unique_name
from splitkit.engine.codegen.part_modules import Container, carry_hooks, pickle_by_nodes
from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.engine.codegen.writer import Writer
from splitkit.engine.split import Split
from splitkit.errors import GraphError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.input_overlap import check_nodes
from splitkit.graph.scope import NEUTRAL, Scope, scopes
from splitkit.graph.shared_memory import GIVEN
from splitkit.graph.storages import attribute
from splitkit.plans.part_order import stable_order
from splitkit.plans.parts import PARENT, PartKey


def inline(split: Split) -> fx.GraphModule:
    """Put the parts of a split together into one graph module: the inverse of `split`.

    The result is the original graph: the same nodes in the same order under the same names, with their meta, regions,
    signature and parameters. It is built from the modules of the split, so that it contains later changes to parts::

        split(gm, ...)          parts          a pass on submod_0          inline
        a  relu  b  c    ->   a relu | b c   ->   a gelu | b c   ->   a  gelu  b  c

    Nodes that were added to a part follow the nodes before them, or take the place of those that were erased there.
    Copies of a node become one if they are still equal. If an edit moved a node into another region, all regions are
    emitted anew. A checkpointed part is inlined without its checkpoint; hooks on parts are dropped.

    Neither the split nor the original is modified; parameters, buffers and called modules are shared with them.

    Raises:
        GraphError: SK106 if a part cannot be inlined: for example, it was replaced by a module without a graph, or its
            number of inputs differs from its call.
    """
    if not isinstance(split, Split):
        raise GraphError(
            "SK101", f"inline takes a Split, not a {type(split).__name__}", "Pass the result of splitkit.split."
        )
    modules = current_modules(split)
    attributes = MergedAttributes(split.flow.root, modules.values())
    flat = _Flattener(split, modules, attributes.name).flat_graph()
    order = _order(flat, _torch.LazyGraphModule(attributes.module, flat.graph), split.flow)
    graph = _write(flat, order, split, anew=not _regions_are_kept(flat, order, split.flow))
    graph.set_codegen(_torch.codegen_of(split.module.graph))
    restore_modes_on_error(graph)
    module = attributes.module
    module.graph = graph
    module.meta = _meta(split)
    carry_hooks(split.flow.root, module)
    return module


def _meta(split: Split) -> dict[str, object]:
    """Return the meta of the parent, without the field that `split` has added."""
    name, original = "partition_names", _torch.meta_of(split.flow.root)
    kept = {field: value for field, value in _torch.meta_of(split.module).items() if field != name}
    return kept | ({name: original[name]} if name in original else {})


def _order(flat: FlatGraph, gm: fx.GraphModule, original: Dataflow) -> list[tuple[int, Node]]:
    """Return the nodes in the original's order as far as data and effects allow, each with the index it must follow."""
    flow = analyze(gm)  # covers added nodes too
    first = max((i for n, i in original.index.items() if n.op == "placeholder"), default=-1)
    place = {n: p if n in flat.origin else max(p, (first, 1)) for n, p in flat.place.items()}

    def waits(node: Node) -> set[Node]:
        after: Iterable[Node] = flow.after[node]
        if (
            node in flow.references
        ):  # in the original, the reference may precede a write that ran before it in the split
            after = (n for n in after if place[n] < place[node])
        return {*node.all_input_nodes, *after}

    order = stable_order({node: waits(node) for node in flat.graph.nodes}, place)
    reached = accumulate((place[node][0] for node in order), max, initial=-1)
    return list(zip(islice(reached, 1, None), order, strict=True))


def _regions_are_kept(flat: FlatGraph, order: list[tuple[int, Node]], original: Dataflow) -> bool:
    """Whether every node has its ambient state if the original's state ops stay where they are."""
    nodes = list(original.index)
    state = [original.scope.get(node) for node in nodes]
    wanted = [(flat.scope[node], state[i] if i >= 0 else NEUTRAL) for i, node in order if node.op not in GIVEN]
    return flat.final == original.final and all(want == have for want, have in wanted)


def _write(flat: FlatGraph, order: list[tuple[int, Node]], split: Split, anew: bool) -> fx.Graph:
    """Write the nodes, and those of the original that no part has: state ops, and nodes that `prune` dropped."""
    writer = Writer(fx.Graph())
    scoped = ScopedGraph(writer)
    env: dict[Node, Node] = {}  # node of the flat graph -> its copy
    whole: dict[Node, Node] = {}  # node of the original -> its copy
    names = {node.name for node in split.flow.index}
    others = _others(split, anew)
    if not order:
        return writer.graph
    index, other = next(others)
    for reached, node in order:
        # First the original's nodes that precede this place and that no part has.
        while index < reached:
            for read in other.all_input_nodes:
                if read.op == "get_attr" and read not in whole:  # erased in the parts
                    whole[read] = writer.copy(read, whole.__getitem__)
            if all(read in whole for read in other.all_input_nodes):
                whole[other] = writer.copy(other, whole.__getitem__)
            index, other = next(others)
        if anew and node.op == "output":
            scoped.move_to(flat.final)
        elif anew and node.op not in GIVEN:
            scoped.move_to(flat.scope[node])
        origin = flat.origin.get(node)
        # The first copy gets the original's name; added nodes, and copies that an edit made unequal, get new ones.
        if origin is None or origin in whole:
            name = unique_name(node.name, names)
            names.add(name)
        else:
            name = origin.name
        env[node] = writer.copy(node, env.__getitem__, name=name)
        if origin is not None:
            whole.setdefault(origin, env[node])
    return scoped.graph


def _others(split: Split, anew: bool) -> Iterator[tuple[int, Node]]:
    """Yield the nodes of the original that no part has, with their index."""
    flow, places = split.flow, split.plan.places
    for node, index in flow.index.items():
        of_regions = node not in flow.scope or is_for_regions(node, flow.scope)
        if not (anew and of_regions) and (of_regions or not places[node]):
            yield index, node
    yield from ((len(flow.index), node) for node in list(flow.index)[:1])  # a sentinel, which is never written


# Make a module with the attributes of the original and of the parts that were made from it.


class MergedAttributes:
    """A new GraphModule with the attributes of ``original`` and those that ``modules`` read, under the original names.

    Tensors and called modules are shared; the plain containers that hold them are new. An attribute that was replaced
    or added in one of ``modules`` is taken from there. If two modules have different attributes of one name, the second
    gets a new name.
    """

    def __init__(self, original: fx.GraphModule, modules: Iterable[fx.GraphModule]) -> None:
        self.module = pickle_by_nodes(fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(original).__name__))
        self._own: set[nn.Module] = set()  # new containers, which may be modified
        self._fill(self.module, original)
        self._names: dict[tuple[int, str], str] = {}
        self._taken: dict[str, object] = {}
        parts = {id(m) for m in modules}
        read = [(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op in ("get_attr", "call_module")]
        for module, target in sorted(read, key=lambda pair: pair[1].count(".")):  # modules before their attributes
            value = attribute(module, target)
            if id(value) not in parts:
                self._names[id(module), target] = self._add(module, target, value)

    def name(self, module: fx.GraphModule, target: str) -> str:
        """Return the name that the attribute ``target`` of ``module`` has in the new module."""
        return self._names[id(module), target]

    def _fill(self, module: nn.Module, original: nn.Module) -> None:
        self._own.add(module)
        module.training = original.training
        held = attributes_of(original)
        for name, parameter in held.parameters.items():
            module.register_parameter(name, parameter)
        for name, buffer in held.buffers.items():
            module.register_buffer(name, buffer, name not in held.unsaved)
        for name, child in held.modules.items():
            if child is not None and type(child) in (nn.Module, Container):
                module.add_module(name, nn.Module())
                self._fill(module.get_submodule(name), child)
            else:
                module.add_module(name, child)

    def _add(self, module: fx.GraphModule, target: str, value: object) -> str:
        differs = target in self._taken and self._taken[target] is not value
        if differs or not self._may_hold(target, value):
            target_here = unique_name(target.replace(".", "_"), self._taken, dir(self.module))
        else:
            target_here = target
        self._taken[target_here] = value
        here: Any = self.module
        if reduce(lambda found, atom: getattr(found, atom, None), target_here.split("."), here) is not value:
            self._put(target_here, value, module.get_submodule(target.rpartition(".")[0]))
        return target_here

    def _may_hold(self, target: str, value: object) -> bool:
        """Whether ``target`` is ``value``, or can be set to it without modifying a shared module."""
        owner: object = self.module
        *path, last = target.split(".")
        for atom in path:
            owner = getattr(owner, atom, None)
            if owner is None:
                return True
        return owner in self._own or getattr(owner, last, None) is value

    def _put(self, target: str, value: object, like: nn.Module) -> None:
        *path, last = target.split(".")
        owner: nn.Module = self.module
        for atom in path:
            if atom not in attributes_of(owner).modules:
                owner.add_module(atom, nn.Module())
                self._own.add(owner.get_submodule(atom))
                owner.get_submodule(atom).training = like.training
            owner = owner.get_submodule(atom)
        held = attributes_of(like)
        if last in held.buffers:
            owner.register_buffer(last, held.buffers[last], last not in held.unsaved)
        else:
            setattr(owner, last, value)


# Write a split, as it is now, as one flat graph: the parts replace their calls, in the order in which they run.
#
# State ops are left out; the flat graph records the scope of each node instead, in terms of the original's regions.
# Copies of one node that are still equal become one again::
#
#     parent: h, submod_0, submod_1, add          flat: h, a, b, c, add
#     submod_0: a, b      submod_1: b', c


@dataclass(frozen=True)
class FlatGraph:
    """A split as one graph.

    Attributes:
        graph: the flat graph.
        scope: node -> its ambient state.
        place: node -> its place in the original graph.
        origin: copy -> the original node; added nodes have none.
        final: the ambient state after the split has run.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    scope: dict[Node, Scope] = field(default_factory=dict)
    place: dict[Node, Place] = field(default_factory=dict)
    origin: dict[Node, Node] = field(default_factory=dict)
    final: Scope = NEUTRAL


def _inside(outer: Scope, inner: Scope) -> Scope:
    if outer == NEUTRAL:
        return inner
    return Scope((*outer.regions, *inner.regions), outer.settings).having(dict(inner.settings))


class _Flattener:
    """Writes the flat graph of a split.

    Args:
        split: the split.
        modules: its modules as they are now, see `current_modules`.
        name: (module, target) -> the name of that attribute in the flat graph.
    """

    def __init__(
        self,
        split: Split,
        modules: Mapping[PartKey, fx.GraphModule],
        name: Callable[[fx.GraphModule, str], str],
    ) -> None:
        self._modules = {key: CurrentModule(split, key, module) for key, module in modules.items()}
        self._keys = {part: key for key, part in split.names.items()}
        self._name = name
        self.flat = FlatGraph(final=self._modules[PARENT].final)
        self._writer = Writer(self.flat.graph)
        self._made: dict[Node, list[Node]] = {}  # original node -> the nodes written for it

    def flat_graph(self) -> FlatGraph:
        """Write the parent, in which calls of parts and their getitems vanish.

        Raises:
            GraphError: SK106 if the call of a part cannot be inlined, SK103 if an edit broke a region.
        """
        current = self._modules[PARENT]
        env: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if isinstance(env[node], fx.GraphModule):
                raise unusable_part(str(node.target), "is passed to a function that is not checkpoint")
            return env[node]

        checks = check_nodes(current.module.graph)  # input checks, which only a split needs
        for node in (n for n in current.scope if n not in checks):
            args, kwargs = node.args, node.kwargs
            if node.op in ("get_attr", "call_module") and node.target in self._keys:
                key = self._keys[str(node.target)]
                if node.op == "get_attr":
                    env[node] = self._modules[key].module
                    continue
            elif node.target is checkpoint and isinstance(args[0], Node) and args[0].target in self._keys:
                key, args, kwargs = self._keys[str(args[0].target)], args[1:], {}
            elif node.target is operator.getitem and isinstance(members := env.get(_first(node)), Sequence):
                env[node] = _member(_first(node), members, args[1])
                continue
            else:
                env[node] = self._write(current, node, value, NEUTRAL)
                continue
            inputs: Any = fx.node.map_arg((args, kwargs), value)
            env[node] = self._part(key, inputs[0], inputs[1], current.scope[node])
        return self.flat

    def _part(self, key: PartKey, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Scope) -> Any:
        """Write the nodes of a part, and return its output value."""
        current = self._modules[key]
        inputs = [n for n in current.scope if n.op == "placeholder"]
        if len(inputs) != len(args) or kwargs:
            name = next(name for name, k in self._keys.items() if k == key)
            raise unusable_part(name, f"takes {len(inputs)} inputs, and is called with {len(args) + len(kwargs)}")
        env: dict[Node, Any] = dict(zip(inputs, args, strict=True))
        for node in current.scope:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            if node.op != "placeholder":
                env[node] = self._write(current, node, env.__getitem__, outer)
        return None

    def _write(self, current: CurrentModule, node: Node, value: Callable[[Node], Any], outer: Scope) -> Node:
        flat, origin = self.flat, current.origin.get(node)
        target = self._name(current.module, str(node.target)) if node.op in ("get_attr", "call_module") else node.target
        scope = NEUTRAL if node.op in GIVEN else _inside(outer, current.scope[node])
        copied = self._writer.copy(node, value, target)
        for made in self._made.get(origin, ()) if origin else ():
            if flat.scope[made] == scope and _alike(made, copied):
                flat.graph.erase_node(copied)
                flat.place[made] = min(flat.place[made], current.place[node])
                return made
        if origin is not None:
            flat.origin[copied] = origin
            self._made.setdefault(origin, []).append(copied)
        flat.scope[copied], flat.place[copied] = scope, current.place[node]
        return copied


def _alike(a: Node, b: Node) -> bool:
    return a.op == b.op and a.target == b.target and repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))


def _first(node: Node) -> Any:
    return node.args[0]


def _member(call: Node, values: Sequence[Any], position: Any) -> Any:
    """Return the value of ``getitem(call, position)``."""
    if not isinstance(position, int) or not -len(values) <= position < len(values):
        raise unusable_part(call.name, f"gives {len(values)} values, of which {position!r} is read")
    return values[position]


# Relate the modules of a split, as they are now, to the original: the origin, scope and place of each node.
#
# A node is a copy of an original node if it has the name of the copy; the others were added by someone who edited a
# module.


Place = tuple[int, int]
"""The place of a node: an index in the original graph, and before (-1), at (0) or after (1) the node there."""


def current_modules(split: Split) -> dict[PartKey, fx.GraphModule]:
    """Return the parent (`PARENT`) and the parts as they are now, which need not be the modules that `split` made.

    Raises:
        GraphError: SK106 if one of them has no graph any more.
    """
    found: dict[PartKey, fx.GraphModule] = {PARENT: split.module}
    for key, name in split.names.items():
        module = attribute(split.module, name)
        if not isinstance(module, fx.GraphModule):
            raise unusable_part(name, f"is a {type(module).__name__}, which has no graph")
        if type(_torch.codegen_of(module.graph)) is not fx.graph.CodeGen:
            raise unusable_part(name, "has a signature of its own")
        found[key] = module
    return found


def unusable_part(name: str, why: str) -> GraphError:
    """Return the error (SK106) for a part that cannot be inlined."""
    return GraphError(
        "SK106",
        f"the part {name!r} {why}",
        "Inline before parts are replaced or compiled, or put a GraphModule with the same inputs and outputs there.",
        [name],
    )


@dataclass(frozen=True)
class CurrentModule:
    """One module of the split as it is now, and the origin of its nodes."""

    split: Split
    key: PartKey
    module: fx.GraphModule

    @cached_property
    def origin(self) -> dict[Node, Node]:
        """Copy -> the original node, for the nodes that are copies."""
        by_name = {copied.name: node for node, copied in self.split.copies[self.key].items()}
        return {node: by_name[node.name] for node in self.module.graph.nodes if node.name in by_name}

    @cached_property
    def _scopes(self) -> tuple[dict[Node, Scope], Scope]:
        found, final = scopes(self.module.graph)
        flow, same = self.split.flow, dict[Node, Node]()
        pairs = [(found[node], flow.scope[origin]) for node, origin in self.origin.items()]
        for ours, originals in [*pairs, (final, flow.final)]:
            for here, there in zip(ours.regions, originals.regions, strict=False):
                if _region(here) == _region(there):
                    same.setdefault(here, there)
        kept = (n for n in found if not is_for_regions(n, found))
        return {node: _renamed(found[node], same) for node in kept}, _renamed(final, same)

    @property
    def scope(self) -> Mapping[Node, Scope]:
        """The scope of each node except state ops; regions that are unchanged are those of the original."""
        return self._scopes[0]

    @property
    def final(self) -> Scope:
        """The ambient state after the module has run."""
        return self._scopes[1]

    @cached_property
    def place(self) -> dict[Node, Place]:
        """Node -> its place. Added nodes follow those before them, or take the place of erased ones."""
        index, places, waiting, last = self.split.flow.index, dict[Node, Place](), list[Node](), -1
        for node in self.scope:
            if node not in self.origin:
                waiting.append(node)
                continue
            here = index[self.origin[node]]
            places[node] = (here, int(self.split.plan.home(self.origin[node]) != self.key))
            if node.op not in GIVEN:
                places |= dict.fromkeys(waiting, self._between(last, here))
                waiting, last = [], here
        return places | dict.fromkeys(waiting, self._between(last, len(index)))

    def _between(self, last: int, here: int) -> Place:
        gap = bisect(self._erased, last)
        if gap < len(self._erased) and self._erased[gap] < here:
            return self._erased[gap], 0
        if last >= 0 or self.key is PARENT:
            return last, 1
        return here, -1

    @cached_property
    def _erased(self) -> list[int]:
        left = self.split.copies[self.key].keys() - self.origin.values()
        return sorted(self.split.flow.index[node] for node in left)


def is_for_regions(node: Node, scope: Mapping[Node, Scope]) -> bool:
    """Whether a node is an attribute that only state ops read."""
    return node.op == "get_attr" and bool(node.users) and scope.keys().isdisjoint(node.users)


def _region(enter: Node) -> tuple[object, str]:
    """Return a key for a region that is the same in every graph."""
    return enter.target, repr(fx.node.map_arg((enter.args, enter.kwargs), lambda n: str(n.target)))


def _renamed(scope: Scope, names: Mapping[Node, Node]) -> Scope:
    if not scope.regions:
        return scope
    return Scope(tuple(names.get(enter, enter) for enter in scope.regions), scope.settings)
