"""Inline the parts of a split, as they are now, into one graph again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import attributes_of
from splitkit.engine.codegen.assemble import carry_hooks
from splitkit.engine.codegen.emit import ScopedGraph
from splitkit.engine.codegen.part_modules import Container, pickle_by_nodes
from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.engine.codegen.writer import Writer
from splitkit.engine.flatten import STATELESS_OPS, FlatGraph, current_modules, flatten, is_for_regions
from splitkit.engine.module_names import unique_name
from splitkit.engine.split import Split
from splitkit.errors import GraphError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.scope import NEUTRAL
from splitkit.graph.storages import attribute
from splitkit.plans.part_order import stable_order


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
    flat = flatten(split, modules, attributes.name)
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
    wanted = [(flat.scope[node], state[i] if i >= 0 else NEUTRAL) for i, node in order if node.op not in STATELESS_OPS]
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
            scoped.finish(flat.final)
        elif anew and node.op not in STATELESS_OPS:
            scoped.move_to(flat.scope[node])
        origin = flat.origin.get(node)
        # The first copy gets the original's name; added nodes, and copies that an edit made unequal, get new ones.
        if origin is None or origin in whole:
            name = node.name if node.name not in names else unique_name(node.name, names)
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
        if _find(self.module, target_here) is not value:
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


def _find(module: nn.Module, target: str) -> object:
    found: object = module
    for atom in target.split("."):
        found = getattr(found, atom, None)
    return found
