"""From a graph and what autograd keeps of it to lines: what each node touches, node by node, and then in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fakecalls import hints
from splitkit.graph.sizes import storage_bytes, tensor_bytes
from splitkit.graph.storages import start_of, storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.autograd import Activations, activations
from splitkit.memory.linetables import LineFacts, LineNode, LineTables
from splitkit.memory.probes import NOTHING
from splitkit.memory.stretch import Line
from splitkit.memory.temporaries import Temporaries


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

    def _scattered(self) -> dict[Node, Node]:
        """A value whose elements do not lie side by side -> the first value that is the same in another shape.

        A stage sends a copy of it; but where that first value came from another stage, the elements lie side by side.
        """
        values, found = self.activations.values, dict[Node, Node]()
        for node in values:
            if isinstance(value := value_of(node), torch.Tensor) and not lies_together(value):
                of = node.args[0] if node.args else None
                alike = isinstance(of, Node) and of in found and values[node] == values[of]
                found[node] = found[of] if alike and _sizes_of(node) == _sizes_of(of) else node  # type: ignore[index, arg-type]
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
        return self._tables.line(parts, homes or {})

    @cached_property
    def _tables(self) -> LineTables:
        graph, known = self.flow.graph, self.activations
        return LineTables(
            LineFacts(
                units=self.units,
                inputs=graph.find_nodes(op="placeholder"),
                outputs=[n for n in graph.output_node().all_input_nodes if n in known.values and n.op != "get_attr"],
                training=self.training,
                storages=known.values,
                storage_sizes=self._sizes,
                nbytes=self._nbytes,
                graded=frozenset(known.requires),
                views=self._views,
                scattered=self._scattered(),
                owned={key: (owned.nbytes, owned.trained) for key, owned in self._owned.items()},
            )
        )


def units_of(flow: Dataflow, training: bool) -> Units:
    """The units of a forward graph."""
    return Units(flow, flow.fact(activations), training)


def lies_together(tensor: torch.Tensor, turned: bool = True) -> bool:
    """Whether the elements of a tensor are one piece of memory, in the order of its dimensions or ``turned``."""
    if tensor.layout is not torch.strided or not tensor_bytes(tensor):
        return True
    sizes = zip(hints(tensor.stride()), hints(tensor.shape), strict=True)
    inner, together = [(stride, size) for stride, size in sizes if size != 1][::-1], 1
    for stride, size in sorted(inner) if turned else inner:
        if stride != together:
            return False
        together *= size
    return True


def _sizes_of(node: Node) -> list[tuple[int, torch.dtype]]:
    return [(tensor_bytes(t), t.dtype) for t in tensors(value_of(node))]
