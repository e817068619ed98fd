"""Order-independent tables of what each node of a graph touches, and from them the `OrderMemory` of any parts.

A search weighs many plans of one graph and asks for an order for each. What a node touches is the same in all of them;
only its position differs, and which copy of a value it reads. So the tables are made once, as CSR arrays over nodes and
values, and an order is a handful of gathers from them: no node is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch.fx import Node

from splitkit.memory.segments.segment import BEFORE, Bools, Incidence, Ints, OrderMemory


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
class MemoryFacts:
    """What the tables of one graph are made from.

    Attributes:
        nodes: placeable node -> what it touches.
        inputs: the placeholders.
        outputs: the nodes whose values the graph returns.
        training: whether there is a backward.
        storages: node -> the storages that its value lies in.
        storage_sizes: bytes of each storage.
        nbytes: node -> bytes of the tensors that it yields.
        graded: nodes whose values have a gradient.
        views: value -> the value that it is in another shape; it has no gradient of its own.
        scattered: value whose elements are not contiguous -> the value that it is in another shape, or itself.
        owned: key of a parameter or buffer -> its bytes, and the bytes of its gradients.
    """

    nodes: Mapping[Node, NodeMemory]
    inputs: Sequence[Node]
    outputs: Sequence[Node]
    training: bool
    storages: Mapping[Node, tuple[int, ...]]
    storage_sizes: Sequence[int]
    nbytes: Mapping[Node, int]
    graded: frozenset[Node]
    views: Mapping[Node, Node]
    scattered: Mapping[Node, Node]
    owned: Mapping[object, tuple[int, int]]


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

    Args:
        facts: what the graph's nodes touch.
    """

    def __init__(self, facts: MemoryFacts) -> None:
        self._facts = facts
        rows = list(facts.nodes.values())
        self._row: dict[Node, int] = {node: i for i, node in enumerate(facts.nodes)}
        nodes = [*facts.inputs, *(made for row in rows for made in row.makes)]
        number = {node: i for i, node in enumerate(nodes)}
        self._maker = np.array(
            [BEFORE] * len(facts.inputs) + [i for i, row in enumerate(rows) for _ in row.makes], np.int64
        )
        self._makes = _Lists.of([number[made] for made in row.makes] for row in rows)
        self._reads = _Lists.of([number[read] for read in row.reads] for row in rows)
        self._saves = _Lists.of(sorted(set(row.saves)) for row in rows)
        storages = facts.storages
        self._touches = _Lists.of(
            sorted({*row.storages, *row.saves, *(s for read in row.reads for s in storages[read])}) for row in rows
        )
        keys = {key: i for i, key in enumerate(facts.owned)}
        self._parameters = _Lists.of(sorted({keys[key] for key in row.parameters}) for row in rows)
        # Gradients are numbered like values, and those of parameters after all values.
        adds = [[c for c in row.contributes if facts.views.get(node) is not c] for node, row in facts.nodes.items()]
        values = len(nodes)
        self._adds = _Lists.of([number[c] if isinstance(c, Node) else values + keys[c] for c in of] for of in adds)
        self._wide = np.array([row.wide.get(c, 0) for row, of in zip(rows, adds, strict=True) for c in of], np.int64)
        self._viewed = np.array([number[facts.views[n]] if n in facts.views else BEFORE for n in nodes], np.int64)
        scattered = facts.scattered
        self._scattered = np.array([number[scattered[n]] if n in scattered else BEFORE for n in nodes], np.int64)
        self._graded = np.array([facts.training and node in facts.graded for node in nodes], np.bool_)
        self._value_storages = _Lists.of(storages.get(node, ()) for node in nodes)
        self._nbytes = np.array([facts.nbytes[node] for node in nodes], np.int64)
        self._messages = np.where(self._maker == BEFORE, 0, self._nbytes)
        self._outputs = np.array([number[n] for n in facts.outputs if n in number], np.int64)
        self._forward = np.array([row.forward for row in rows], np.int64)
        self._backward = np.array([row.backward for row in rows], np.int64)

    def order(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> OrderMemory:
        """Return the memory of the order that runs one part after the other; see `GraphMemory.order`."""
        return _OrderBuilder(self, parts, homes).order()

    @cached_property
    def _owned(self) -> Ints:
        """(keys, 2) bytes of each parameter and buffer, and of its gradients."""
        return np.array([*self._facts.owned.values()], np.int64).reshape(-1, 2)

    @cached_property
    def _sizes(self) -> Ints:
        return np.array(self._facts.storage_sizes, np.int64)


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
            training=tables._facts.training,
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
