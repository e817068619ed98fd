"""What each node of a graph touches, as tables of numbers, and lines of any parts that are made of these at once.

Many lines of one graph are asked for, one for each plan that is weighed. What a node touches is the same in all of
them; only its place is not, and which copy of a value it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch.fx import Node

from splitkit.memory.stretch import Line
from splitkit.memory.touches import BEFORE, Bools, Ints, Touches


@dataclass(frozen=True)
class LineNode:
    """What a placeable node does, whatever the order; the members of its tuple are with it.

    Attributes:
        makes: the nodes whose values it makes: itself, or what unpacks its tuple.
        storages: of these values, and of the tuple.
        reads: the nodes whose values it reads: placeable ones, members of tuples, inputs.
        saves: storages that autograd keeps for it; without training, its weights as autocast casts them.
        contributes: what its backward yields gradients of: values that it reads, and keys of parameters.
        wide: of these values, those whose gradient is a view of larger memory, and its bytes.
        handed: of these values, those whose gradient lies in the memory of that of the node's own value.
        parameters: keys of the parameters and buffers that it reads.
        forward: bytes that it takes for a while.
        backward: the same of its backward.
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
class LineFacts:
    """What a line is made of, of one graph.

    Attributes:
        units: what each placeable node does.
        inputs: the placeholders.
        outputs: the nodes whose values the graph yields.
        training: whether there is a backward.
        storages: node -> the storages that its value lies in.
        storage_sizes: bytes of each storage.
        nbytes: node -> bytes of the tensors that it yields.
        graded: nodes whose values have a gradient.
        views: a value that is another one in another shape -> the other; it has no gradient of its own.
        scattered: a value whose elements do not lie side by side -> the value that it is in another shape, or itself.
        owned: key of a parameter or buffer -> its bytes, and those that require grad.
    """

    units: Mapping[Node, LineNode]
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
    """For each row some whole numbers: those of row i are ``items[starts[i]:starts[i + 1]]``."""

    starts: Ints
    items: Ints

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> _Lists:
        made = [list(row) for row in rows]
        starts = np.cumsum([0, *map(len, made)], dtype=np.int64)
        return cls(starts, np.array([item for row in made for item in row], np.int64))

    def at(self, rows: Ints) -> tuple[Ints, Ints]:
        """Of each of some rows, one after the other: which of them has an item, and where that is among the items."""
        first, counts = self.starts[rows], np.diff(self.starts)[rows]
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(rows)), counts)
        return owner, np.arange(len(owner)) + np.repeat(first - (ends - counts), counts)


class LineTables:
    """Lines of a graph.

    Values and units are numbered: inputs first, then what each unit makes, in the order of the units.

    Args:
        facts: what lines are made of.
    """

    def __init__(self, facts: LineFacts) -> None:
        self._facts = facts
        units = list(facts.units.values())
        self._unit: dict[Node, int] = {node: i for i, node in enumerate(facts.units)}
        nodes = [*facts.inputs, *(made for unit in units for made in unit.makes)]
        number = {node: i for i, node in enumerate(nodes)}
        self._maker = np.array(
            [BEFORE] * len(facts.inputs) + [i for i, u in enumerate(units) for _ in u.makes], np.int64
        )
        self._makes = _Lists.of([number[made] for made in unit.makes] for unit in units)
        self._reads = _Lists.of([number[read] for read in unit.reads] for unit in units)
        self._saves = _Lists.of(sorted(set(unit.saves)) for unit in units)
        lie = facts.storages
        self._touches = _Lists.of(
            sorted({*unit.storages, *unit.saves, *(s for read in unit.reads for s in lie[read])}) for unit in units
        )
        keys = {key: i for i, key in enumerate(facts.owned)}
        self._parameters = _Lists.of(sorted({keys[key] for key in unit.parameters}) for unit in units)
        # A gradient is that of a value, by its number, or of a parameter: its number, and all values before it.
        adds = [[c for c in u.contributes if facts.views.get(node) is not c] for node, u in facts.units.items()]
        values = len(nodes)
        self._adds = _Lists.of([number[c] if isinstance(c, Node) else values + keys[c] for c in row] for row in adds)
        self._wide = np.array([u.wide.get(c, 0) for u, row in zip(units, adds, strict=True) for c in row], np.int64)
        self._viewed = np.array([number[facts.views[n]] if n in facts.views else BEFORE for n in nodes], np.int64)
        scattered = facts.scattered
        self._scattered = np.array([number[scattered[n]] if n in scattered else BEFORE for n in nodes], np.int64)
        self._graded = np.array([facts.training and node in facts.graded for node in nodes], np.bool_)
        self._lies = _Lists.of(lie.get(node, ()) for node in nodes)
        self._nbytes = np.array([facts.nbytes[node] for node in nodes], np.int64)
        self._messages = np.where(self._maker == BEFORE, 0, self._nbytes)
        self._outputs = np.array([number[n] for n in facts.outputs if n in number], np.int64)
        self._forward = np.array([unit.forward for unit in units], np.int64)
        self._backward = np.array([unit.backward for unit in units], np.int64)

    def line(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> Line:
        """The line of the nodes of parts, one part after the other."""
        return _Making(self, parts, homes).line()

    @cached_property
    def _owned(self) -> Ints:
        """(keys, 2) bytes of each parameter and buffer, and those that require grad."""
        return np.array([*self._facts.owned.values()], np.int64).reshape(-1, 2)

    @cached_property
    def _sizes(self) -> Ints:
        return np.array(self._facts.storage_sizes, np.int64)


class _Making:
    """One line. A *copy* is a node in one of the parts; they stand in a row, and so do the values that they make."""

    def __init__(self, tables: LineTables, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> None:
        self._tables = tables
        self._units = np.array([tables._unit[node] for nodes in parts for node in nodes], np.int64)
        self._parts = np.repeat(np.arange(len(parts)), [len(nodes) for nodes in parts])
        size = len(tables._unit)
        home = np.full(size, BEFORE, np.int64)
        for node, part in homes.items():
            home[tables._unit[node]] = part
        own = (home[self._units] == BEFORE) | (home[self._units] == self._parts)
        self._home = np.full(size, BEFORE, np.int64)  # the copy that others read
        self._home[self._units[own]] = np.flatnonzero(own)
        self._place = self._copies_of_several(size)
        # The first value of each copy; `ids` are the values of the tables that those of the line are copies of.
        copy, where = tables._makes.at(self._units)
        inputs = int((tables._maker == BEFORE).sum())
        counts = np.bincount(copy, minlength=len(self._units))
        self._first = inputs + np.cumsum(counts) - counts
        self._ids = np.concatenate([np.arange(inputs), tables._makes.items[where]])
        self._made = np.concatenate([np.full(inputs, BEFORE, np.int64), copy])

    def _copies_of_several(self, size: int) -> dict[int, int] | None:
        """Part and unit, as one number -> the copy, of units that stand in several parts; None if there are none."""
        counts = np.bincount(self._units, minlength=size)
        if not (counts > 1).any():
            return None
        several = np.flatnonzero(counts[self._units] > 1)
        keys = self._parts[several] * size + self._units[several]
        return dict(zip(keys.tolist(), several.tolist(), strict=True))

    def _sources(self, values: Ints, parts: Ints) -> Ints:
        """The values of the line that parts read: of their own copies if they have one, else of the home's."""
        tables = self._tables
        maker = tables._maker[values]
        copy = np.where(maker == BEFORE, BEFORE, self._home[maker])
        if self._place is not None:
            keys = (parts * len(self._home) + maker).tolist()
            copy = np.array([self._place.get(k, c) for k, c in zip(keys, copy.tolist(), strict=True)], np.int64)
            copy[maker == BEFORE] = BEFORE
        assert ((copy != BEFORE) | (maker == BEFORE)).all(), "what is read is in no part"
        within = values - tables._makes.items[tables._makes.starts[:-1]][maker]
        return np.where(maker == BEFORE, values, self._first[copy] + within)

    def line(self) -> Line:
        """The line."""
        tables, length, ids = self._tables, len(self._units), self._ids
        reader, where = tables._reads.at(self._units)
        read = self._sources(tables._reads.items[where], self._parts[reader])
        last = self._made.copy()  # what nobody reads dies where it is made
        np.maximum.at(last, read, reader)
        # What the graph gives back never dies, and that is one step behind the last.
        last[self._sources(tables._outputs, np.full(len(tables._outputs), BEFORE))] = length
        value, lie = tables._lies.at(ids)
        gradient_of, own = self._gradients()
        adds, gradient_bytes = self._added(gradient_of, own)
        return Line(
            length=length,
            training=tables._facts.training,
            storages=self._touched(tables._touches),
            storage_bytes=tables._sizes,
            saves=self._touched(tables._saves),
            reads=Touches.of_pairs(reader, read, length),
            made=self._made,
            last=last,
            lies=(value, tables._lies.items[lie]),
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
            forward=tables._forward[self._units],
            backward=tables._backward[self._units],
        )

    def _touched(self, lists: _Lists) -> Touches:
        copy, where = lists.at(self._units)
        return Touches.in_order(copy, lists.items[where], len(self._units))

    def _copied_from(self) -> Ints:
        """See `Line.copied_from`; no part is sent an input of the graph, so that each sends copies of views of it."""
        of = self._tables._scattered[self._ids]
        found = np.full(len(of), BEFORE, np.int64)
        values = np.flatnonzero((of != BEFORE) & (self._made != BEFORE))
        first = self._made[self._sources(of[values], self._parts[self._made[values]])]
        found[values] = np.where(first == BEFORE, len(self._units), first)
        return found

    def _gradients(self) -> tuple[Ints, Bools]:
        """The gradient of each value, that of what a view is of for a view; and which values have one of their own."""
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

    def _added(self, gradient_of: Ints, own: Bools) -> tuple[Touches, Ints]:
        """To which gradients backward adds, those of values before those of parameters; and their bytes."""
        tables = self._tables
        copy, where = tables._adds.at(self._units)
        item = tables._adds.items[where]
        of_value = item < len(tables._nbytes)
        source = self._sources(item[of_value], self._parts[copy[of_value]])
        item = item - len(tables._nbytes) + int(own.sum())
        item[of_value] = gradient_of[source]
        nbytes = np.concatenate([tables._nbytes[self._ids[own]], tables._owned[:, 1]])
        np.maximum.at(nbytes, item, tables._wide[where])
        return Touches.of_pairs(copy, item, len(self._units)), nbytes
