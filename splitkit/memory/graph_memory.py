"""What each node of a forward graph touches and takes, and from that the memory of any order of its nodes.

A search asks for the memory of thousands of segments. To run a simulation for each would take hours, so each node is
looked at once, here: the storages it makes, reads and saves, and the bytes it takes for itself. `order_tables` turns
these into arrays along an order, and `segment` reads the peak of any segment from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.losses import loss_node
from splitkit.graph.node_values import hints, storage_bytes, tensor_bytes
from splitkit.graph.storages import fills_its_range, start_of, storage_key, tensors, value_of
from splitkit.memory.kernels.target_kernels import TargetKernels
from splitkit.memory.kernels.temporaries import Temporaries
from splitkit.memory.saved_storages import NOTHING, Activations, activations, activations_alone
from splitkit.memory.segment import BEFORE, Bools, Incidence, Ints, OrderMemory


@dataclass
class GraphMemory:
    """The memory of a graph's nodes, and of orders of them.

    Attributes:
        flow: facts about the graph.
        activations: what a run with gradients makes and keeps.
        training: whether there is a backward.
        nodes: placeable node -> what it touches and takes.
        storage_sizes: bytes of each storage: those of the run with gradients, then the weights that autocast has cast.
        nbytes: node -> bytes of the tensors that it yields.
        owned: key of a parameter, buffer or constant -> its bytes.
        gradients: the same key -> offset in its storage -> bytes of the gradient there.
    """

    flow: Dataflow
    activations: Activations
    training: bool
    nodes: dict[Node, NodeMemory] = field(init=False)
    storage_sizes: list[int] = field(init=False)
    nbytes: dict[Node, int] = field(init=False)
    owned: dict[object, int] = field(default_factory=dict)
    gradients: dict[object, dict[object, int]] = field(default_factory=dict)
    _casts: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storage_sizes = list(self.activations.nbytes)
        self.nbytes = {n: sum(map(tensor_bytes, tensors(value_of(n)))) for n in self.flow.index}
        followers: dict[Node, list[Node]] = {}
        for node, producer in self.flow.followers.items():
            followers.setdefault(producer, []).append(node)
        temporaries = Temporaries({})
        with TargetKernels(self.activations.kernels):
            self.nodes = {n: self._node(n, followers.get(n, []), temporaries) for n in self.flow.nodes}

    def _node(self, node: Node, followers: Sequence[Node], temporaries: Temporaries) -> NodeMemory:
        known = self.activations
        group = {node, *followers}
        read = dict.fromkeys(r for n in (node, *followers) for r in n.all_input_nodes if r not in group)
        reads = tuple(r for r in read if r in known.values and r.op != "get_attr")
        parameters = self._parameters((node, *followers))
        wants = self.training and not group.isdisjoint(known.requires)
        contributes: list[object] = [r for r in reads if r in known.requires] if wants else []
        contributes += [key for key in parameters if wants and any(self.gradients[key].values())]
        inside = known.inside.get(node, NOTHING)
        leaves = pytree.tree_leaves((node.args, node.kwargs)) if inside.wide or inside.handed else []
        saves = dict.fromkeys(s for n in (node, *followers) for s in known.saved.get(n, ())) if self.training else {}
        forward = inside.forward
        regions = self.flow.scope[node].autocast
        if not self.training or (regions and not any(r in known.requires for r in reads)):
            without = temporaries(self.flow.root, node, regions)
            forward = max(without.transient, forward if self.training else 0)
            if without.casts and parameters:
                # Autocast casts a weight once and keeps the result until the region ends, so ops that read the same
                # weights share one storage of casts.
                saves[self._cast(parameters, without.casts)] = None
        return NodeMemory(
            makes=tuple(followers) if followers and len(followers) == len(node.users) else (node, *followers),
            storages=tuple(dict.fromkeys(s for n in (node, *followers) for s in known.values.get(n, ()))),
            reads=reads,
            saves=tuple(saves),
            contributes=tuple(contributes),
            wide={leaves[i]: nbytes for i, nbytes in inside.wide},
            handed=frozenset(leaves[i] for i in inside.handed),
            parameters=parameters,
            forward=forward,
            backward=inside.backward,
        )

    def _cast(self, parameters: tuple[object, ...], nbytes: int) -> int:
        if parameters not in self._casts:
            self._casts[parameters] = len(self.storage_sizes)
            self.storage_sizes.append(nbytes)
        return self._casts[parameters]

    def _parameters(self, nodes: Iterable[Node]) -> tuple[object, ...]:
        found: dict[object, None] = {}
        for tensor in self.flow.owned(*nodes):
            key = storage_key(tensor)
            found[key] = None
            self.owned.setdefault(key, storage_bytes(tensor))
            gradients, start = self.gradients.setdefault(key, {}), start_of(tensor)
            if tensor.requires_grad:
                gradients[start] = max(gradients.get(start, 0), tensor_bytes(tensor))
        return tuple(found)

    @cached_property
    def views(self) -> dict[Node, Node]:
        """View -> base for the views whose gradient is a view of the base's gradient; empty without training.

        Autograd passes the gradient of a view on as a view of that gradient: it takes no memory, and what holds one
        holds both. That is so only if nobody else reads the base, for gradients of several readers are summed in new
        memory, and only if size and dtype are equal, for the gradient of a slice is padded with zeros to a new tensor.
        """
        readers: dict[Node, int] = {}
        for memory in self.nodes.values():
            for read in memory.reads:
                readers[read] = readers.get(read, 0) + 1
        values, found = self.activations.values, dict[Node, Node]()
        for node, memory in self.nodes.items() if self.training else ():
            bases = [r for r in memory.contributes if isinstance(r, Node)]
            only = memory.makes == (node,) and len(bases) == len(memory.contributes) == 1 and readers[bases[0]] == 1
            if not only or self.flow.effects[node].writes:
                continue
            same = values[node] == values[bases[0]] != () and _sizes_of(node) == _sizes_of(bases[0])
            if same and not any(u.op == "output" for u in bases[0].users):
                found[node] = bases[0]
        return found

    def scattered(self) -> dict[Node, Node]:
        """Return value whose elements are not contiguous -> the first value that is the same in another shape.

        A stage sends a contiguous copy of it, unless it received that first value, which then is contiguous already.
        """
        values, found = self.activations.values, dict[Node, Node]()
        for node in values:
            if isinstance(value := value_of(node), torch.Tensor) and not is_dense(value):
                of = node.args[0] if node.args else None
                same = isinstance(of, Node) and of in found and values[node] == values[of]
                found[node] = found[of] if same and _sizes_of(node) == _sizes_of(of) else node  # type: ignore[index, arg-type]
        return found

    def order(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int] | None = None) -> OrderMemory:
        """Return the memory of the order that runs one part after the other.

        Args:
            parts: placeable nodes, in the order in which they run.
            homes: node -> the part whose copy others read, for nodes that are in several parts.
        """
        return _OrderBuilder(self._tables, parts, homes or {}).order()

    def kept_outputs(self) -> Sequence[Node]:
        """Return the outputs that are held to the end.

        A training step keeps the loss only: a pipeline drops the logits beside it as soon as the loss is computed.
        """
        every = self.flow.graph.output_node().all_input_nodes
        loss = loss_node(self.flow.graph, self.activations.requires) if self.training else None
        return every if loss is None else [loss]

    @cached_property
    def _tables(self) -> OrderTables:
        return OrderTables(self)


def graph_memory(flow: Dataflow, training: bool, kernels: str | None = None) -> GraphMemory:
    """Return the memory of a forward graph on a device with these kernels; a fact of ``flow``, see `Dataflow.fact`."""
    # Without backward, no temporary memory of a run with gradients is asked for.
    return GraphMemory(flow, flow.fact(activations if training else activations_alone, kernels), training)


def mixed_memory(on: Mapping[Node, GraphMemory]) -> GraphMemory:
    """Return the memory of a graph whose nodes run on devices with different kernels.

    Args:
        on: placeable node -> the memory of the graph on the device of the node.
    """
    base = next(iter(on.values()))
    flow, made = base.flow, copy(base)
    values, saved, sizes = dict[Node, tuple[int, ...]](), dict[Node, tuple[int, ...]](), list[int]()
    number: dict[tuple[int, int], int] = {}

    def numbered(node: Node, memory: GraphMemory, storages: Iterable[int]) -> tuple[int, ...]:
        """Number storages that a node makes or keeps; those of values that it reads are where these were made."""
        near = [*node.all_input_nodes, node]
        known = {
            s: t for n in near for s, t in zip(memory.activations.values.get(n, ()), values.get(n, ()), strict=False)
        }
        found = []
        for storage in storages:
            if storage not in known and (id(memory), storage) not in number:
                number[id(memory), storage] = len(sizes)
                sizes.append(memory.storage_sizes[storage])
            found.append(known[storage] if storage in known else number[id(memory), storage])
        return tuple(found)

    for node in base.activations.values:
        memory = on.get(flow.followers.get(node, node), base)
        values[node] = numbered(node, memory, memory.activations.values[node])
        if node in memory.activations.saved:
            saved[node] = numbered(node, memory, memory.activations.saved[node])
    nodes: dict[Node, NodeMemory] = {}
    for node, memory in on.items():
        group = dict.fromkeys((node, *memory.nodes[node].makes))
        storages = dict.fromkeys(s for n in group for s in values.get(n, ()))
        kept = dict.fromkeys(s for n in group for s in saved.get(n, ())) if base.training else {}
        casts = [s for s in memory.nodes[node].saves if s >= len(memory.activations.nbytes)]
        saves = (*kept, *numbered(node, memory, casts))
        nodes[node] = replace(memory.nodes[node], storages=tuple(storages), saves=saves)
    estimated = {n: why for n, memory in on.items() if (why := memory.activations.estimated.get(n))}
    made.activations = replace(base.activations, nbytes=tuple(sizes), values=values, saved=saved, estimated=estimated)
    made.nodes, made.storage_sizes = nodes, sizes
    for found_before in ("views", "_tables"):
        made.__dict__.pop(found_before, None)
    return made


def is_dense(tensor: torch.Tensor, any_order: bool = True) -> bool:
    """Return whether the elements of a tensor fill one block of memory.

    Args:
        tensor: a strided tensor; any other layout counts as dense.
        any_order: accept any order of the dimensions, as of a transpose; otherwise only the contiguous one.
    """
    if tensor.layout is not torch.strided or not tensor_bytes(tensor):
        return True
    shape, strides = hints(tensor.shape), hints(tensor.stride())
    outer = [stride for stride, size in zip(strides, shape, strict=True) if size != 1]
    return fills_its_range(shape, strides) and (any_order or outer == sorted(outer, reverse=True))


def _sizes_of(node: Node) -> list[tuple[int, torch.dtype]]:
    return [(tensor_bytes(t), t.dtype) for t in tensors(value_of(node))]


# Order-independent tables of what each node of a graph touches, and from them the `OrderMemory` of any parts.
#
# A search weighs many plans of one graph and asks for an order for each. What a node touches is the same in all of
# them; only its position differs, and which copy of a value it reads. So the tables are made once, as CSR arrays over
# nodes and values, and an order is a handful of gathers from them: no node is looked at again.


@dataclass(frozen=True)
class NodeMemory:
    """What a placeable node and the members of its tuple touch and take, whatever the order.

    Attributes:
        makes: the nodes whose values it makes: itself, or the members that unpack its tuple.
        storages: the storages of these values, and of the tuple.
        reads: the nodes whose values it reads: placeable ones, members of tuples, inputs.
        saves: the storages that autograd keeps for it; without training, its weights as autocast casts them.
        contributes: what its backward computes gradients of: values that it reads, and keys of parameters.
        wide: value in ``contributes`` -> bytes of the storage of its gradient, where the gradient is a view of larger
            memory.
        handed: values in ``contributes`` whose gradient lies in the memory of the gradient of the node's own value.
        parameters: keys of the parameters and buffers that it reads.
        forward: bytes that its forward takes temporarily.
        backward: bytes that its backward takes temporarily.
    """

    makes: tuple[Node, ...]
    storages: tuple[int, ...]
    reads: tuple[Node, ...]
    saves: tuple[int, ...]
    contributes: tuple[object, ...]
    wide: Mapping[object, int]
    handed: frozenset[object]
    parameters: tuple[object, ...]
    forward: int
    backward: int


@dataclass(frozen=True, eq=False)
class _Lists:
    """Rows of whole numbers in CSR form: row i is ``items[starts[i]:starts[i + 1]]``."""

    starts: Ints
    items: Ints

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> _Lists:
        made = [list(row) for row in rows]
        starts = np.cumsum([0, *map(len, made)], dtype=np.int64)
        return cls(starts, np.array([item for row in made for item in row], np.int64))

    def at(self, rows: Ints) -> tuple[Ints, Ints]:
        """Gather ``rows``: for each of their items, in order, the index into ``rows`` and the index into `items`."""
        first, counts = self.starts[rows], np.diff(self.starts)[rows]
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        return owner, np.arange(len(owner)) + np.repeat(first - (ends - counts), counts)


class OrderTables:
    """Makes the `OrderMemory` of any parts of one graph.

    Values and nodes are numbered: the inputs first, then what each node makes, in the order of the nodes.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self.training, rows = memory.training, list(memory.nodes.values())
        self._row: dict[Node, int] = {node: i for i, node in enumerate(memory.nodes)}
        inputs = memory.flow.graph.find_nodes(op="placeholder")
        nodes = [*inputs, *(made for row in rows for made in row.makes)]
        number = {node: i for i, node in enumerate(nodes)}
        self._maker = np.array([BEFORE] * len(inputs) + [i for i, row in enumerate(rows) for _ in row.makes], np.int64)
        self._makes = _Lists.of([number[made] for made in row.makes] for row in rows)
        self._reads = _Lists.of([number[read] for read in row.reads] for row in rows)
        self._saves = _Lists.of(sorted(set(row.saves)) for row in rows)
        storages = memory.activations.values
        self._touches = _Lists.of(
            sorted({*row.storages, *row.saves, *(s for read in row.reads for s in storages[read])}) for row in rows
        )
        keys = {key: i for i, key in enumerate(memory.owned)}
        self._parameters = _Lists.of(sorted({keys[key] for key in row.parameters}) for row in rows)
        # Gradients are numbered like values, and those of parameters after all values.
        views, scattered, values = memory.views, memory.scattered(), len(nodes)
        adds = [[c for c in row.contributes if views.get(node) is not c] for node, row in memory.nodes.items()]
        self._adds = _Lists.of([number[c] if isinstance(c, Node) else values + keys[c] for c in of] for of in adds)
        self._wide = np.array([row.wide.get(c, 0) for row, of in zip(rows, adds, strict=True) for c in of], np.int64)
        self._viewed = np.array([number[views[n]] if n in views else BEFORE for n in nodes], np.int64)
        self._scattered = np.array([number[scattered[n]] if n in scattered else BEFORE for n in nodes], np.int64)
        self._graded = np.array([self.training and node in memory.activations.requires for node in nodes], np.bool_)
        self._value_storages = _Lists.of(storages.get(node, ()) for node in nodes)
        self._nbytes = np.array([memory.nbytes[node] for node in nodes], np.int64)
        self._messages = np.where(self._maker == BEFORE, 0, self._nbytes)
        self._outputs = np.array([number[n] for n in memory.kept_outputs() if n in number], np.int64)
        self._forward = np.array([row.forward for row in rows], np.int64)
        self._backward = np.array([row.backward for row in rows], np.int64)
        gradients = [sum(memory.gradients[key].values()) for key in memory.owned]
        self._owned = np.array([*zip(memory.owned.values(), gradients, strict=True)], np.int64).reshape(-1, 2)
        self._sizes = np.array(memory.storage_sizes, np.int64)


class _OrderBuilder:
    """Builds one order.

    A *copy* is a node in one of the parts. Copies are numbered by position in the order, and so are the values that
    they make: a node that two parts compute is two copies with values of their own.
    """

    def __init__(self, tables: OrderTables, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> None:
        self._tables = tables
        self._rows = np.array([tables._row[node] for nodes in parts for node in nodes], np.int64)
        self._parts = np.repeat(np.arange(len(parts)), [len(nodes) for nodes in parts])
        size = len(tables._row)
        home = np.full(size, BEFORE, np.int64)
        for node, part in homes.items():
            home[tables._row[node]] = part
        own = (home[self._rows] == BEFORE) | (home[self._rows] == self._parts)
        self._home = np.full(size, BEFORE, np.int64)  # the copy that other parts read
        self._home[self._rows[own]] = np.flatnonzero(own)
        self._place = self._copies_of_several(size)
        # `_first` is the first value of each copy; `_ids` says which value of the tables a value of the order is.
        copy, where = tables._makes.at(self._rows)
        inputs = int((tables._maker == BEFORE).sum())
        counts = np.bincount(copy, minlength=len(self._rows))
        self._first = inputs + np.cumsum(counts) - counts
        self._ids = np.concatenate([np.arange(inputs), tables._makes.items[where]])
        self._made = np.concatenate([np.full(inputs, BEFORE, np.int64), copy])

    def _copies_of_several(self, size: int) -> dict[int, int] | None:
        """Return (part, node) as one number -> copy, for nodes of several parts; None if there are none."""
        counts = np.bincount(self._rows, minlength=size)
        if not (counts > 1).any():
            return None
        several = np.flatnonzero(counts[self._rows] > 1)
        keys = self._parts[several] * size + self._rows[several]
        return dict(zip(keys.tolist(), several.tolist(), strict=True))

    def _sources(self, values: Ints, parts: Ints) -> Ints:
        """Return the values of the order that parts read: of their own copy if they have one, else of the home's."""
        tables = self._tables
        maker = tables._maker[values]
        copy = np.where(maker == BEFORE, BEFORE, self._home[maker])
        if self._place is not None:
            keys = (parts * len(self._home) + maker).tolist()
            copy = np.array([self._place.get(k, c) for k, c in zip(keys, copy.tolist(), strict=True)], np.int64)
            copy[maker == BEFORE] = BEFORE
        assert ((copy != BEFORE) | (maker == BEFORE)).all(), "a value that is read is in no part"
        within = values - tables._makes.items[tables._makes.starts[:-1]][maker]
        return np.where(maker == BEFORE, values, self._first[copy] + within)

    def order(self) -> OrderMemory:
        """Gather the tables in this order."""
        tables, length, ids = self._tables, len(self._rows), self._ids
        reader, where = tables._reads.at(self._rows)
        read = self._sources(tables._reads.items[where], self._parts[reader])
        last = self._made.copy()  # a value that nobody reads dies where it is made
        np.maximum.at(last, read, reader)
        # What the graph returns is held to the end, as if a node after the last one read it.
        last[self._sources(tables._outputs, np.full(len(tables._outputs), BEFORE))] = length
        value, where = tables._value_storages.at(ids)
        gradient_of, own = self._gradients()
        adds, gradient_bytes = self._added(gradient_of, own)
        return OrderMemory(
            length=length,
            training=tables.training,
            storages=self._touched(tables._touches),
            storage_bytes=tables._sizes,
            saves=self._touched(tables._saves),
            reads=Incidence.of_pairs(reader, read, length),
            made=self._made,
            last=last,
            value_storages=(value, tables._value_storages.items[where]),
            value_bytes=tables._messages[ids],
            copied_from=self._copied_from(),
            gradient_of=gradient_of,
            gradient_reads=adds,
            gradient_bytes=gradient_bytes,
            gradient_made=np.concatenate([self._made[own], np.full(len(tables._owned), BEFORE, np.int64)]),
            is_parameter=np.arange(len(gradient_bytes)) >= int(own.sum()),
            parameters=self._touched(tables._parameters),
            parameter_bytes=tables._owned[:, 0],
            trained_bytes=tables._owned[:, 1],
            forward=tables._forward[self._rows],
            backward=tables._backward[self._rows],
        )

    def _touched(self, lists: _Lists) -> Incidence:
        copy, where = lists.at(self._rows)
        return Incidence.of_sorted_pairs(copy, lists.items[where], len(self._rows))

    def _copied_from(self) -> Ints:
        """Return `OrderMemory.copied_from`.

        No part receives an input of the graph from another one, so every part sends views of inputs as copies.
        """
        of = self._tables._scattered[self._ids]
        found = np.full(len(of), BEFORE, np.int64)
        values = np.flatnonzero((of != BEFORE) & (self._made != BEFORE))
        first = self._made[self._sources(of[values], self._parts[self._made[values]])]
        found[values] = np.where(first == BEFORE, len(self._rows), first)
        return found

    def _gradients(self) -> tuple[Ints, Bools]:
        """Return the gradient of each value (of its base for a view), and which values have a gradient of their own."""
        tables, ids = self._tables, self._ids
        viewed = tables._viewed[ids]
        views = np.flatnonzero(viewed != BEFORE)
        root = np.arange(len(ids))
        root[views] = self._sources(viewed[views], self._parts[self._made[views]])
        while (root[root] != root).any():  # views of views
            root = root[root]
        own = tables._graded[ids] & (viewed == BEFORE)
        number = np.where(own, np.cumsum(own) - 1, BEFORE)
        return number[root], own

    def _added(self, gradient_of: Ints, own: Bools) -> tuple[Incidence, Ints]:
        """Return the gradients that backward adds to, numbered with those of parameters last, and their bytes."""
        tables = self._tables
        copy, where = tables._adds.at(self._rows)
        item = tables._adds.items[where]
        of_value = item < len(tables._nbytes)
        source = self._sources(item[of_value], self._parts[copy[of_value]])
        item = item - len(tables._nbytes) + int(own.sum())
        item[of_value] = gradient_of[source]
        nbytes = np.concatenate([tables._nbytes[self._ids[own]], tables._owned[:, 1]])
        np.maximum.at(nbytes, item, tables._wide[where])
        return Incidence.of_pairs(copy, item, len(self._rows)), nbytes
