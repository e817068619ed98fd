"""From a graph and what autograd keeps of it to lines: what each node touches, node by node, and then in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.sizes import storage_bytes, tensor_bytes
from splitkit.graph.storages import start_of, storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.autograd import Activations, activations
from splitkit.memory.probes import NOTHING
from splitkit.memory.stretch import BEFORE, Line, Touches
from splitkit.memory.temporaries import Temporaries

Copy = tuple[Node, int]
"""A node, and the part that computes it; the part is -1 for inputs of the graph."""


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


@dataclass(frozen=True)
class _Owned:
    """A storage of parameters, buffers or constants: its bytes, and those of the gradients by where they begin."""

    nbytes: int
    gradients: dict[object, int] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        """Bytes of all gradients."""
        return sum(self.gradients.values())


@dataclass
class Units:
    """The units of a graph, and lines of them.

    Attributes:
        flow: facts about the graph.
        activations: what a run with gradients makes and keeps.
        training: whether there is a backward.
    """

    flow: Dataflow
    activations: Activations
    training: bool
    units: dict[Node, LineNode] = field(init=False)
    _owned: dict[object, _Owned] = field(default_factory=dict)
    _sizes: list[int] = field(init=False)
    _casts: dict[object, int] = field(default_factory=dict)
    _views: dict[Node, Node] = field(init=False)
    _nbytes: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = list(self.activations.nbytes)
        followers: dict[Node, list[Node]] = {}
        for node, producer in self.flow.followers.items():
            followers.setdefault(producer, []).append(node)
        temporaries = Temporaries({})
        self.units = {n: self._unit(n, followers.get(n, []), temporaries) for n in self.flow.nodes}
        self._views = self._views_of() if self.training else {}
        self._nbytes = {n: sum(map(tensor_bytes, tensors(value_of(n)))) for n in self.flow.index}

    def _unit(self, node: Node, followers: Sequence[Node], temporaries: Temporaries) -> LineNode:
        known = self.activations
        group = {node, *followers}
        read = dict.fromkeys(r for n in (node, *followers) for r in n.all_input_nodes if r not in group)
        reads = tuple(r for r in read if r in known.values and r.op != "get_attr")
        parameters = self._parameters((node, *followers))
        wants = self.training and not group.isdisjoint(known.requires)
        contributes: list[object] = [r for r in reads if r in known.requires] if wants else []
        contributes += [key for key in parameters if wants and self._owned[key].trained]
        inside = known.inside.get(node, NOTHING)
        leaves = pytree.tree_leaves((node.args, node.kwargs)) if inside.wide or inside.handed else []
        saves = dict.fromkeys(s for n in (node, *followers) for s in known.saved.get(n, ())) if self.training else {}
        forward = inside.forward
        regions = tuple(r for r in self.flow.scope[node].regions if r.target is _torch.ENTER_AUTOCAST)
        if not self.training or (regions and not any(r in known.requires for r in reads)):
            without = temporaries(self.flow.root, node, regions)
            forward = max(without.transient, forward if self.training else 0)
            if without.casts and parameters:  # of weights: kept until the region ends
                # Autocast casts a weight once: ops that read the same weights share the casts, which are one storage by
                # these.
                saves[self._cast(parameters, without.casts)] = None
        return LineNode(
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
            self._casts[parameters] = len(self._sizes)
            self._sizes.append(nbytes)
        return self._casts[parameters]

    def _parameters(self, nodes: Iterable[Node]) -> tuple[object, ...]:
        found: dict[object, None] = {}
        for tensor in self.flow.owned(*nodes):
            key = storage_key(tensor)
            found[key] = None
            owned = self._owned.setdefault(key, _Owned(storage_bytes(tensor)))
            if tensor.requires_grad:
                start = start_of(tensor)
                owned.gradients[start] = max(owned.gradients.get(start, 0), tensor_bytes(tensor))
        return tuple(found)

    def _views_of(self) -> dict[Node, Node]:
        """A value that is another one in another shape -> the other, if nobody else reads that.

        Its gradient is a view too.

        Autograd hands the gradient of a view on as a view of itself: no memory is taken, and what holds either holds
        both. If somebody else reads the other value, gradients are summed, in memory of their own; so they are where
        sizes or dtypes differ, for a part of a value has a gradient that is filled up with zeros.
        """
        readers: dict[Node, int] = {}
        for unit in self.units.values():
            for read in unit.reads:
                readers[read] = readers.get(read, 0) + 1
        values, found = self.activations.values, dict[Node, Node]()
        for node, unit in self.units.items():
            given = [r for r in unit.contributes if isinstance(r, Node)]
            alone = unit.makes == (node,) and len(given) == len(unit.contributes) == 1 and readers[given[0]] == 1
            if not alone or self.flow.effects[node].writes:
                continue
            same = values[node] == values[given[0]] != () and _sizes_of(node) == _sizes_of(given[0])
            if same and not any(u.op == "output" for u in given[0].users):
                found[node] = given[0]
        return found

    @property
    def storage_sizes(self) -> Sequence[int]:
        """Bytes of each storage by number: those of the run with gradients, and what autocast makes of weights."""
        return self._sizes

    def bytes_of(self, node: Node) -> int:
        """Bytes of the tensors that a node yields."""
        return self._nbytes[node]

    def line(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int] | None = None) -> Line:
        """The line of the nodes of parts, one part after the other.

        Args:
            parts: placeable nodes, in the order in which they run.
            homes: node -> the part whose copy others read, for nodes that stand in several parts.
        """
        return _Builder(self, parts, homes or {}).line()


def units_of(flow: Dataflow, training: bool) -> Units:
    """The units of a forward graph."""
    return Units(flow, flow.fact(activations), training)


def _sizes_of(node: Node) -> list[tuple[int, torch.dtype]]:
    return [(tensor_bytes(t), t.dtype) for t in tensors(value_of(node))]


class _Builder:
    """Numbers what a line touches."""

    def __init__(self, units: Units, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> None:
        self.units = units
        self.copies: list[Copy] = [(node, part) for part, nodes in enumerate(parts) for node in nodes]
        self.position = {copy: i for i, copy in enumerate(self.copies)}
        self.homes = {node: part for node, part in self.copies if homes.get(node, part) == part}
        self.values: dict[Copy, int] = {}
        self.value_nodes: list[Node] = []
        self.made: list[int] = []
        self.parameter_gradients: dict[object, int] = {}
        self.of_parameter: list[bool] = []
        self.gradient_bytes: list[int] = []
        self.gradient_made: list[int] = []
        self.gradient_of: list[int] = []
        self.keys = {key: i for i, key in enumerate(units._owned)}

    def line(self) -> Line:
        """The line."""
        units, known, length = self.units, self.units.activations, len(self.copies)
        for node in units.flow.graph.find_nodes(op="placeholder"):
            self._value((node, BEFORE), BEFORE)
        touches: list[tuple[int, int]] = []
        saves: list[tuple[int, int]] = []
        reads: list[tuple[int, int]] = []
        adds: list[tuple[int, int]] = []
        parameters: list[tuple[int, int]] = []
        for copy, i in self.position.items():
            unit = units.units[copy[0]]
            found = [self._source(read, copy[1]) for read in unit.reads]
            reads += [(i, value) for value in found]
            for made in unit.makes:
                self._value((made, copy[1]), i, self._viewed(made, copy[1]))
            for read in unit.contributes:
                if units._views.get(copy[0]) is not read:
                    gradient = self._gradient(read, copy[1])
                    adds.append((i, gradient))
                    self.gradient_bytes[gradient] = max(self.gradient_bytes[gradient], unit.wide.get(read, 0))
            lie = (s for r in unit.reads for s in known.values[r])
            touches += [(i, s) for s in (*unit.storages, *unit.saves, *lie)]
            saves += [(i, s) for s in unit.saves]
            parameters += [(i, self.keys[key]) for key in unit.parameters]
        members = [units.units[node] for node, _ in self.copies]
        owned = units._owned.values()
        lies = [(v, s) for v, n in enumerate(self.value_nodes) for s in known.values.get(n, ())]
        return Line(
            length=length,
            training=units.training,
            storages=Touches.of(touches, length),
            storage_bytes=np.array(units._sizes, np.int64),
            saves=Touches.of(saves, length),
            reads=Touches.of(reads, length),
            made=np.array(self.made, np.int64),
            last=self._last(reads, length),
            lies=(np.array([v for v, _ in lies], np.int64), np.array([s for _, s in lies], np.int64)),
            loose=np.array([0 if known.values.get(n) else self._message(n) for n in self.value_nodes], np.int64),
            value_bytes=np.array([self._message(n) for n in self.value_nodes], np.int64),
            gradient_of=np.array(self.gradient_of, np.int64),
            gradient_reads=Touches.of(adds, length),
            gradient_bytes=np.array(self.gradient_bytes, np.int64),
            gradient_made=np.array(self.gradient_made, np.int64),
            is_parameter=np.array(self.of_parameter, np.bool_),
            parameters=Touches.of(parameters, length),
            parameter_bytes=np.array([o.nbytes for o in owned], np.int64),
            trained_bytes=np.array([o.trained for o in owned], np.int64),
            forward=np.array([u.forward for u in members], np.int64),
            backward=np.array([u.backward for u in members], np.int64),
        )

    def _value(self, copy: Copy, made: int, viewed: int = BEFORE) -> int:
        node = copy[0]
        self.values[copy] = number = len(self.made)
        self.value_nodes.append(node)
        self.made.append(made)
        own = viewed  # a view has the gradient of what it is a view of, and none of its own
        if own == BEFORE and self.units.training and node in self.units.activations.requires:
            own = self._new_gradient(self.units._nbytes[node], made)
        self.gradient_of.append(own)
        return number

    def _viewed(self, node: Node, part: int) -> int:
        """The gradient of what a view is of, -1 if it is no view."""
        viewed = self.units._views.get(node)
        return BEFORE if viewed is None else self.gradient_of[self._source(viewed, part)]

    def _new_gradient(self, nbytes: int, made: int, of_parameter: bool = False) -> int:
        self.gradient_bytes.append(nbytes)
        self.gradient_made.append(made)
        self.of_parameter.append(of_parameter)
        return len(self.gradient_bytes) - 1

    def _gradient(self, of: object, part: int) -> int:
        """The gradient of a value that the part reads, or of a parameter."""
        if isinstance(of, Node):
            return self.gradient_of[self._source(of, part)]
        if of not in self.parameter_gradients:
            trained = self.units._owned[of].trained
            self.parameter_gradients[of] = self._new_gradient(trained, BEFORE, of_parameter=True)
        return self.parameter_gradients[of]

    def _source(self, node: Node, part: int) -> int:
        """The value that a part reads: of its own copy if it has one, else of the home's."""
        if node.op == "placeholder":
            return self.values[node, BEFORE]
        return self.values.get((node, part), -1) if (node, part) in self.values else self._at_home(node)

    def _at_home(self, node: Node) -> int:
        return self.values[node, self.homes[self.units.flow.producer(node)]]

    def _last(self, reads: Sequence[tuple[int, int]], length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        # What nobody reads dies where it is made; what the graph gives back never does, and that is one step behind the
        # last.
        last = np.array(self.made, np.int64)
        for position, value in reads:
            last[value] = max(last[value], position)
        for node in self.units.flow.graph.output_node().all_input_nodes:
            if node in self.units.activations.values and node.op != "get_attr":
                last[self._source(node, BEFORE)] = length
        return last

    def _message(self, node: Node) -> int:
        return 0 if node.op == "placeholder" else self.units._nbytes[node]
