"""The inverse of a split: one graph again, out of the parts as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.assemble import carry_hooks
from splitkit.engine.inlining.attributes import Mirror
from splitkit.engine.inlining.flatten import Flat, flatten
from splitkit.engine.inlining.modules_now import FREE, is_for_regions, modules_of
from splitkit.engine.names import unique
from splitkit.engine.restoring import restore_modes_on_error
from splitkit.engine.scopedgraph import ScopedGraph
from splitkit.engine.split import Split
from splitkit.engine.writer import Writer
from splitkit.errors import GraphError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.scope import NEUTRAL
from splitkit.plans.order import stable_order


def inline(split: Split) -> fx.GraphModule:
    """Put the parts of a split together again.

    The result is the original graph: the same nodes in the same order under the same names, with their meta, regions
    and signature, and the same parameters. It is built from the modules of the split, so that what passes have done
    to parts since is in it::

        split(gm, ...)          parts          a pass on submod_0          inline
        a  relu  b  c    ->   a relu | b c   ->   a gelu | b c   ->   a  gelu  b  c

    Nodes that were added to a part follow the nodes before them, or take the place of those that were erased there.
    Copies of a node become one if they are still alike. Where an edit moved a node into another region, regions are
    written anew, by need. A checkpointed part is written plainly; hooks on parts are not carried over.

    Neither the split nor the original is changed; parameters, buffers and called modules are shared with them.

    Raises:
        GraphError: SK106 when a part cannot be understood: it was replaced by a module that has no graph, say, or
            takes other inputs than it is given.
    """
    if not isinstance(split, Split):
        raise GraphError(
            "SK101", f"inline takes a Split, not a {type(split).__name__}", "Give what splitkit.split gave."
        )
    modules = modules_of(split)
    mirror = Mirror(split.flow.root, modules.values())
    flat = flatten(split, modules, mirror.name)
    order = _order(flat, _torch.LazyGraphModule(mirror.module, flat.graph), split.flow)
    graph = _write(flat, order, split, anew=not _regions_are_kept(flat, order, split.flow))
    graph.set_codegen(_torch.codegen_of(split.module.graph))
    restore_modes_on_error(graph)
    module = mirror.module
    module.graph = graph
    module.meta = _meta(split)
    carry_hooks(split.flow.root, module)
    return module


def _meta(split: Split) -> dict[str, object]:
    """The meta of the parent, without what `split` has put there."""
    name, original = "partition_names", _torch.meta_of(split.flow.root)
    kept = {field: value for field, value in _torch.meta_of(split.module).items() if field != name}
    return kept | ({name: original[name]} if name in original else {})


def _order(flat: Flat, gm: fx.GraphModule, original: Dataflow) -> list[tuple[int, Node]]:
    """The nodes in the original's order as far as data and effects allow, each with the index that it is to follow."""
    flow = analyze(gm)  # of added nodes too
    first = max((i for n, i in original.index.items() if n.op == "placeholder"), default=-1)
    place = {n: p if n in flat.origin else max(p, (first, 1)) for n, p in flat.place.items()}

    def waits(node: Node) -> set[Node]:
        after: Iterable[Node] = flow.after[node]
        if node in flow.references:  # in the original it may have come before a write that ran before it in the split
            after = (n for n in after if place[n] < place[node])
        return {*node.all_input_nodes, *after}

    order = stable_order({node: waits(node) for node in flat.graph.nodes}, place)
    reached = accumulate((place[node][0] for node in order), max, initial=-1)
    return list(zip(islice(reached, 1, None), order, strict=True))


def _regions_are_kept(flat: Flat, order: list[tuple[int, Node]], original: Dataflow) -> bool:
    """Whether every node runs under the state that it wants if the original's state ops stay where they are."""
    nodes = list(original.index)
    state = [original.scope.get(node) for node in nodes]
    wanted = [(flat.scope[node], state[i] if i >= 0 else NEUTRAL) for i, node in order if node.op not in FREE]
    return flat.final == original.final and all(want == have for want, have in wanted)


def _write(flat: Flat, order: list[tuple[int, Node]], split: Split, anew: bool) -> fx.Graph:
    """Write the nodes, and those of the original that no part has: state ops, and what `prune` dropped."""
    writer = Writer(fx.Graph())
    scoped = ScopedGraph(writer)
    env: dict[Node, Node] = {}  # of the flat graph
    whole: dict[Node, Node] = {}  # of the original
    names = {node.name for node in split.flow.index}
    others = _others(split, anew)
    if not order:
        return writer.graph
    index, other = next(others)
    for reached, node in order:
        while index < reached:
            for read in other.all_input_nodes:
                if read.op == "get_attr" and read not in whole:  # erased in the parts
                    whole[read] = writer.copy(read, whole.__getitem__)
            if all(read in whole for read in other.all_input_nodes):
                whole[other] = writer.copy(other, whole.__getitem__)
            index, other = next(others)
        if anew and node.op == "output":
            scoped.finish(flat.final)
        elif anew and node.op not in FREE:
            scoped.move_to(flat.scope[node])
        origin = flat.origin.get(node)
        if origin is None or origin in whole:
            name = node.name if node.name not in names else unique(node.name, names)
            names.add(name)
        else:
            name = origin.name
        env[node] = writer.copy(node, env.__getitem__, name=name)
        if origin is not None:
            whole.setdefault(origin, env[node])
    return scoped.graph


def _others(split: Split, anew: bool) -> Iterator[tuple[int, Node]]:
    """The nodes of the original that no part has, with their index."""
    flow, places = split.flow, split.plan.places
    for node, index in flow.index.items():
        of_regions = node not in flow.scope or is_for_regions(node, flow.scope)
        if not (anew and of_regions) and (of_regions or not places[node]):
            yield index, node
    yield from ((len(flow.index), node) for node in list(flow.index)[:1])  # a guard that is never written
