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

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.byte_sizes import storage_bytes, tensor_bytes
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fake_calls import hints
from splitkit.graph.losses import loss_node
from splitkit.graph.storages import start_of, storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.autograd.backward_temporaries import NOTHING
from splitkit.memory.autograd.saved_storages import Activations, activations, activations_alone
from splitkit.memory.kernels.target_kernels import TargetKernels
from splitkit.memory.kernels.temporaries import Temporaries
from splitkit.memory.segments.order_tables import MemoryFacts, NodeMemory, OrderTables
from splitkit.memory.segments.segment import OrderMemory


@dataclass(frozen=True)
class _Owned:
    """A storage of parameters, buffers or constants: its bytes, and offset -> bytes of the gradients in it."""

    nbytes: int
    gradients: dict[object, int] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        """The bytes of all gradients."""
        return sum(self.gradients.values())


@dataclass
class GraphMemory:
    """The memory of a graph's nodes, and of orders of them.

    Attributes:
        flow: facts about the graph.
        activations: what a run with gradients makes and keeps.
        training: whether there is a backward.
        nodes: placeable node -> what it touches and takes.
    """

    flow: Dataflow
    activations: Activations
    training: bool
    nodes: dict[Node, NodeMemory] = field(init=False)
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
        with TargetKernels(self.activations.kernels):
            self.nodes = {n: self._node(n, followers.get(n, []), temporaries) for n in self.flow.nodes}
        self.settle(self._sizes)

    def settle(self, sizes: list[int]) -> None:
        """Set the bytes of each storage, and what follows from `nodes`."""
        self._sizes = sizes
        self._views = self._views_of() if self.training else {}
        self._nbytes = {n: sum(map(tensor_bytes, tensors(value_of(n)))) for n in self.flow.index}
        self.__dict__.pop("_tables", None)

    def _node(self, node: Node, followers: Sequence[Node], temporaries: Temporaries) -> NodeMemory:
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
        """Return view -> base for the views whose gradient is a view of the base's gradient.

        Autograd passes the gradient of a view on as a view of that gradient: it takes no memory, and what holds one
        holds both. That is so only if nobody else reads the base, for gradients of several readers are summed in new
        memory, and only if size and dtype are equal, for the gradient of a slice is padded with zeros to a new tensor.
        """
        readers: dict[Node, int] = {}
        for memory in self.nodes.values():
            for read in memory.reads:
                readers[read] = readers.get(read, 0) + 1
        values, found = self.activations.values, dict[Node, Node]()
        for node, memory in self.nodes.items():
            bases = [r for r in memory.contributes if isinstance(r, Node)]
            only = memory.makes == (node,) and len(bases) == len(memory.contributes) == 1 and readers[bases[0]] == 1
            if not only or self.flow.effects[node].writes:
                continue
            same = values[node] == values[bases[0]] != () and _sizes_of(node) == _sizes_of(bases[0])
            if same and not any(u.op == "output" for u in bases[0].users):
                found[node] = bases[0]
        return found

    def _scattered(self) -> dict[Node, Node]:
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

    @property
    def storage_sizes(self) -> Sequence[int]:
        """The bytes of each storage: those of the run with gradients, then the weights that autocast has cast."""
        return self._sizes

    def bytes_of(self, node: Node) -> int:
        """Return the bytes of the tensors that a node yields."""
        return self._nbytes[node]

    def order(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int] | None = None) -> OrderMemory:
        """Return the memory of the order that runs one part after the other.

        Args:
            parts: placeable nodes, in the order in which they run.
            homes: node -> the part whose copy others read, for nodes that are in several parts.
        """
        return self._tables.order(parts, homes or {})

    def kept_outputs(self) -> Sequence[Node]:
        """Return the outputs that are held to the end.

        A training step keeps the loss only: a pipeline drops the logits beside it as soon as the loss is computed.
        """
        every = self.flow.graph.output_node().all_input_nodes
        loss = loss_node(self.flow.graph, self.activations.requires) if self.training else None
        return every if loss is None else [loss]

    @cached_property
    def _tables(self) -> OrderTables:
        graph, known = self.flow.graph, self.activations
        return OrderTables(
            MemoryFacts(
                nodes=self.nodes,
                inputs=graph.find_nodes(op="placeholder"),
                outputs=[n for n in self.kept_outputs() if n in known.values and n.op != "get_attr"],
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
    made.nodes = {}
    for node, memory in on.items():
        group = dict.fromkeys((node, *memory.nodes[node].makes))
        storages = dict.fromkeys(s for n in group for s in values.get(n, ()))
        kept = dict.fromkeys(s for n in group for s in saved.get(n, ())) if base.training else {}
        casts = [s for s in memory.nodes[node].saves if s >= len(memory.activations.nbytes)]
        saves = (*kept, *numbered(node, memory, casts))
        made.nodes[node] = replace(memory.nodes[node], storages=tuple(storages), saves=saves)
    estimated = {n: why for n, memory in on.items() if (why := memory.activations.estimated.get(n))}
    made.activations = replace(base.activations, nbytes=tuple(sizes), values=values, saved=saved, estimated=estimated)
    made.settle(sizes)
    return made


def is_dense(tensor: torch.Tensor, any_order: bool = True) -> bool:
    """Return whether the elements of a tensor fill one block of memory.

    Args:
        tensor: a strided tensor; any other layout counts as dense.
        any_order: accept any order of the dimensions, as of a transpose; otherwise only the contiguous one.
    """
    if tensor.layout is not torch.strided or not tensor_bytes(tensor):
        return True
    sizes = zip(hints(tensor.stride()), hints(tensor.shape), strict=True)
    inner, together = [(stride, size) for stride, size in sizes if size != 1][::-1], 1
    for stride, size in sorted(inner) if any_order else inner:
        if stride != together:
            return False
        together *= size
    return True


def _sizes_of(node: Node) -> list[tuple[int, torch.dtype]]:
    return [(tensor_bytes(t), t.dtype) for t in tensors(value_of(node))]
