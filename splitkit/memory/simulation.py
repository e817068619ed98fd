"""Simulate the storages of a run of graphs: which step makes each, and after which step nobody holds it.

The simulation follows what Python does when the generated code of a graph module runs. That code deletes a name after
its last reader (`fx.Graph.python_code` writes ``name = None`` there), and a storage lives as long as some name holds
it::

    step              a    b    c       storages
    0  a = relu(x)    A                 x belongs to the caller, and is never freed here
    1  b = a.view(…)  A    A
    2  c = b * 2      A    A    C       A is freed after this step: `b` was its last holder
    3  return c                 C       C is held by the caller

It follows that the members of a tuple which nobody unpacks live as long as the tuple, that a result which nobody reads
is freed at once, and that the caller holds the arguments of a called graph (a part) until the call returns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import MKLDNN, HigherOrderOperator, plain_tensors, pytree
from splitkit.checks import is_whole
from splitkit.errors import GraphError
from splitkit.graph.dataflow import require_graph
from splitkit.graph.fake_runs import values_again
from splitkit.graph.node_values import body_graphs, op_name, require_values, storage_nbytes
from splitkit.graph.scope import is_state_op, scopes
from splitkit.graph.storages import (
    assumed_upper_bounds,
    attribute,
    plain_size,
    repeated_group,
    shares_memory,
    storage_key,
    symbols_of,
    tensors,
    value_of,
)
from splitkit.memory.kernels.kernel_results import Bytes, ResultAliases, storages_of
from splitkit.memory.kernels.strides import kernel_strides
from splitkit.memory.kernels.temporaries import Temporaries, allocates_unseen
from splitkit.memory.kernels.vmap_batches import VmapRun, run_vmap
from splitkit.memory.storage_watch import BEFORE, HELD

ValueStorages = Mapping[Hashable, int]
"""The storages of a value: key of a storage -> its number in this simulation."""


@dataclass(slots=True)
class SimulatedStorage:
    """One storage of a simulated run.

    Attributes:
        nbytes: its bytes.
        kind: ``"parameter"``, ``"buffer"``, ``"constant"``, ``"input"``, ``"activation"``, ``"saved"`` (for
            backward), ``"tangent"``, ``"gradient"``, ``"cast"`` (of a weight, by autocast) or ``"output"``.
        name: the name of the node or attribute that makes it.
        node: the node, ``None`` for parameters, buffers and constants.
        born: the step that allocates it, -1 if it exists before.
        dies: the step after which it is freed; larger than every step if its owner holds it to the end.
    """

    nbytes: int
    kind: str
    name: str
    node: Node | None
    born: int
    dies: int


@dataclass
class MemorySimulation:
    """Simulates graphs that run one after the other.

    Attributes:
        sizes: symbol -> size, for symbols whose size differs from the one at capture.
        workspace: node -> bytes that it takes besides its results while it runs, as far as the caller knows.
        steps: the nodes that compute, in the order in which they run.
        transient: for each step, the bytes that exist only while it runs.
        storages: all storages.
        calls: name of a called graph -> the range of its steps.
        aliases: node -> which arguments' memory its results share, where that was observed.
        beyond: node -> bytes of its results beyond what their values show, where that was observed.
        bounds: data-dependent symbol -> the upper bound that it counts as.
        unseen: names of ops that ran and whose kernels take memory that is not seen, and not told by ``workspace``.
        body_peaks: branch or loop -> the most bytes that its bodies take, whichever of them runs, however often.
    """

    sizes: Mapping[str, int]
    workspace: Callable[[Node], int]
    steps: list[Node] = field(default_factory=list)
    transient: list[int] = field(default_factory=list)
    storages: list[SimulatedStorage] = field(default_factory=list)
    calls: dict[str, range] = field(default_factory=dict)
    aliases: dict[Node, ResultAliases] = field(default_factory=dict)
    beyond: dict[Node, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    body_peaks: dict[Node, int] = field(default_factory=dict)
    _static: dict[Hashable, int] = field(default_factory=dict)
    _inputs: dict[int | None, ValueStorages] = field(default_factory=dict)
    _temporaries: Temporaries = field(init=False)
    _casts: dict[Hashable, int] = field(default_factory=dict)  # of autocast: storage of a weight -> storage of its cast
    _region: Node | None = None  # the node that opens the outermost autocast region
    _in_region: int = BEFORE  # the last step in it so far
    _items: dict[Node, list[ValueStorages]] = field(default_factory=dict)
    _again: dict[Node, Any] = field(default_factory=dict)
    _strides_found: dict[Node, Any] = field(default_factory=dict)
    _batched: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._temporaries = Temporaries(self.sizes)

    def know(self, inside: VmapRun) -> None:
        """Take over how nodes run inside a ``torch.vmap``, from a run of the whole graph that may contain this one."""
        self._again |= inside.values
        self._batched |= inside.transient

    def own(self, root: nn.Module) -> None:
        """Add all parameters and buffers of a module, whether the run reads them or not; tied ones once."""
        named = [(n, p, "parameter") for n, p in root.named_parameters()]
        for name, tensor, kind in [*named, *((n, b, "buffer") for n, b in root.named_buffers())]:
            self._attribute(name, tensor, kind)

    def input(self, node: Node, kind: str, keep: bool = True) -> ValueStorages:
        """Add an input that is passed for a placeholder; with ``keep`` its owner holds it to the end of the run."""
        value: dict[Hashable, int] = {}
        group = repeated_group(node)
        if group in self._inputs:  # the same tensor was passed for two inputs
            return self._named(node, self._inputs[group])
        for tensor in self._tensors(node):
            key = storage_key(tensor)  # two inputs may be views of one storage, or of a parameter
            if key not in self._static:
                dies = HELD if keep else BEFORE
                nbytes = storage_nbytes(tensor)
                self._static[key] = self._add(node.name, node, nbytes, kind, BEFORE, dies)
            value[key] = self._static[key]
        if group is not None:
            self._inputs[group] = value
        return value

    def graph(
        self, gm: fx.GraphModule, given: Callable[[Node], ValueStorages], autocast: tuple[Node, ...] = ()
    ) -> list[tuple[Node, ValueStorages]]:
        """Simulate the nodes of a graph.

        Args:
            gm: the graph.
            given: placeholder -> the storages of what is passed for it.
            autocast: the nodes that open the autocast regions around the graph.

        Returns:
            The nodes in the output, as often as they occur there, and the storages that each holds.
        """
        require_values(gm.graph, but=lambda node: _calls_graph(gm, node) is not None)
        known = any(node in self._again for node in gm.graph.nodes)  # a part, whose caller has run on fakes already
        self._again |= {} if known or shares_memory(gm) else values_again(gm)
        if not known:
            self.know(run_vmap(gm))
        self._strides_found |= kernel_strides(gm, self.sizes)
        scope, _ = scopes(gm.graph)
        values: dict[Node, ValueStorages] = {}
        outputs: list[tuple[Node, ValueStorages]] = []
        unread: list[ValueStorages] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._named(node, given(node))
                if not node.users:
                    unread.append(values[node])
            elif node.op == "get_attr":
                values[node] = self._read(gm, node)
            elif node.op == "output":
                leaves: list[Node] = []
                fx.map_arg(node.args, leaves.append)
                outputs = [(leaf, values[leaf]) for leaf in leaves if leaf in values]
            elif not is_state_op(node):
                read = {n: values[n] for n in node.all_input_nodes if n in values}
                values[node] = self._call(gm, node, read, (*autocast, *scope[node].autocast))
        for value in [*unread, *(value for _, value in outputs)]:
            self.hold(value, len(self.steps) - 1)
        self._drop_casts()
        return outputs

    def hold(self, value: ValueStorages, step: int) -> None:
        """Keep the storages of a value alive until ``step`` is done."""
        for number in value.values():
            storage = self.storages[number]
            storage.dies = max(storage.dies, step)

    def _call(
        self, gm: fx.GraphModule, node: Node, read: Mapping[Node, ValueStorages], autocast: tuple[Node, ...]
    ) -> ValueStorages:
        part = _calls_graph(gm, node)
        if part is not None:
            value = self._enter(node, part, read)
        else:
            self.steps.append(node)
            hidden = self._hidden(gm, node, autocast)
            value = self._result(gm, node, read)
            if allocates_unseen(node.target):
                self.unseen.add(op_name(node.target))
            self.transient.append(max(self.workspace(node), hidden))
        for held in (*read.values(), value):
            self.hold(held, len(self.steps) - 1)
        return value

    def _result(self, gm: fx.GraphModule, node: Node, read: Mapping[Node, ValueStorages]) -> ValueStorages:
        """Return the storages of a result: those of the arguments that it shares, and new ones."""
        if node.target is operator.getitem and (items := self._items.get(cast(Node, node.args[0]))):
            return self._named(node, items[cast(int, node.args[1])])
        value, step, beyond = dict[Hashable, int](), len(self.steps) - 1, self.beyond.get(node, 0)
        for piece in storages_of(gm, node, list(self._tensors(node)), read, self.aliases.get(node)):
            held = piece.held
            if held is None:
                held = self._add(node.name, node, piece.nbytes + beyond, "activation", step, step)
                beyond = 0
            value[piece.key] = held
        return value

    def _enter(self, node: Node, part: fx.GraphModule, passed: Mapping[Node, ValueStorages]) -> ValueStorages:
        """Simulate the call of another graph, which has names of its own and shares the caller's storages."""
        start = len(self.steps)
        given = dict(zip(part.graph.find_nodes(op="placeholder"), node.args, strict=False))
        given |= {n: node.kwargs[str(n.target)] for n in given if str(n.target) in node.kwargs}

        def value_given(placeholder: Node) -> ValueStorages:
            source = given.get(placeholder)
            return passed[source] if isinstance(source, Node) else {}

        outputs = dict(self.graph(part, value_given))
        self.calls[str(node.target)] = range(start, len(self.steps))
        returned = part.graph.output_node().args[0]
        if isinstance(returned, tuple | list):
            self._items[node] = [outputs[leaf] if isinstance(leaf, Node) else {} for leaf in returned]
        return {key: number for value in outputs.values() for key, number in value.items()}

    def _hidden(self, gm: fx.GraphModule, node: Node, autocast: tuple[Node, ...]) -> int:
        """Return the bytes that a node takes inside: in the ops of a composite, or a higher-order op's bodies."""
        if isinstance(node.target, HigherOrderOperator):
            inner = (node,) if node.target is torch.ops.higher_order.wrap_with_autocast else ()
            taken = max((self._inside(body, (*autocast, *inner)) for body in body_graphs(gm, node)), default=0)
            if str(node.target) in _BRANCHES_AND_LOOPS:
                self.body_peaks[node] = taken
            return taken
        if node in self._batched:
            return self._batched[node]
        inside = self._temporaries(gm, node, autocast, self._strides_found)
        if autocast:
            self._keep_casts(gm, node, inside.casts, autocast[0])
        self.aliases[node] = inside.aliases
        self.unseen |= inside.unseen
        if not isinstance(node.target, _torch.OpOverload):  # for those `storages_of` has a table
            self.beyond[node] = inside.beyond
        return inside.transient

    def _inside(self, body: fx.GraphModule, autocast: tuple[Node, ...]) -> int:
        """Return the peak of a higher-order op's body beyond its inputs and results."""
        inner = MemorySimulation(self.sizes, self.workspace)
        for _, value in inner.graph(body, lambda n: inner.input(n, "input"), autocast):
            inner.hold(value, HELD)
        self.bounds |= inner.bounds
        self.unseen |= inner.unseen
        kept = sum(b.nbytes for b in inner.storages if b.born != BEFORE and b.dies == HELD)
        before = sum(b.nbytes for b in inner.storages if b.born == BEFORE)
        return max(0, max(inner.timeline(), default=0) - before - kept)

    def _keep_casts(self, gm: fx.GraphModule, node: Node, nbytes: int, region: Node) -> None:
        """Add the casts of a node's weights: autocast caches them until the outermost region ends."""
        step = len(self.steps) - 1
        if self._region is not region:
            self._drop_casts()
            self._region = region
        self._in_region = step
        weights = [attribute(gm, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        wanted = {storage_key(w) for w in weights if isinstance(w, nn.Parameter)}
        if nbytes and not wanted <= self._casts.keys():
            self._casts |= dict.fromkeys(wanted, self._add(node.name, node, nbytes, "cast", step, step))

    def _drop_casts(self) -> None:
        self.hold(self._casts, self._in_region)
        self._casts, self._region = {}, None

    def timeline(self) -> list[int]:
        """Return the bytes alive while each step runs, its results and transients included."""
        change = [0] * (len(self.steps) + 2)
        for storage in self.storages:
            change[max(storage.born, 0)] += storage.nbytes
            change[min(storage.dies, len(self.steps)) + 1] -= storage.nbytes
        live, total = [], 0
        for step, transient in enumerate(self.transient):
            total += change[step]
            live.append(total + transient)
        return live

    def _read(self, gm: fx.GraphModule, node: Node) -> ValueStorages:
        tensor = attribute(gm, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            return {}
        number = self._attribute(str(node.target), tensor, "constant")
        return {storage_key(tensor): number} | {storage_key(t): number for t in self._tensors(node)}

    def _named(self, node: Node, passed: ValueStorages) -> ValueStorages:
        """Add the keys under which the node's own value knows the storages that are passed for it.

        A part has placeholders with fake tensors of their own, so one storage has a key in the caller and one here.
        """
        known = list(dict.fromkeys(map(storage_key, self._tensors(node))))
        numbers = list(dict.fromkeys(passed.values()))
        return {**passed, **dict(zip(known, numbers, strict=True))} if len(known) == len(numbers) else passed

    def _tensors(self, node: Node) -> Iterator[torch.Tensor]:
        """Yield the tensors that hold the memory of a value: those that subclasses wrap, not the wrappers."""
        for tensor in tensors(self._again[node] if node in self._again else value_of(node)):
            refuse_sparse(node, tensor)
            yield from plain_tensors(tensor)

    def _attribute(self, name: str, tensor: torch.Tensor, kind: str) -> int:
        key = storage_key(tensor)
        if key not in self._static:
            parts = [self._add(name, None, storage_nbytes(part), kind, BEFORE, HELD) for part in plain_tensors(tensor)]
            self._static[key] = parts[0]
        return self._static[key]

    def _add(self, name: str, node: Node | None, nbytes: Bytes, kind: str, born: int, dies: int) -> int:
        self.bounds |= assumed_upper_bounds(nbytes, self.sizes)
        known = known_bytes(name, nbytes, self.sizes)
        self.storages.append(SimulatedStorage(known, kind, name, node, born, dies))
        return len(self.storages) - 1


_BRANCHES_AND_LOOPS = frozenset(("cond", "while_loop", "scan", "map_impl", "associative_scan"))
"""Higher-order ops of which only the data decides which body runs, or how often: their bytes are upper bounds."""


def _calls_graph(gm: fx.GraphModule, node: Node) -> fx.GraphModule | None:
    """Return the graph that ``node`` calls, such as a part of a split, or ``None``."""
    target = attribute(gm, str(node.target)) if node.op == "call_module" else None
    return target if isinstance(target, fx.GraphModule) else None


# Check the arguments of `simulate_memory`.


@runtime_checkable
class SplitLike(Protocol):
    """The attributes of a `splitkit.engine.split.Split` that `simulate_memory` reads."""

    @property
    def module(self) -> fx.GraphModule:
        """The parent graph."""

    @property
    def parts(self) -> Mapping[Hashable, fx.GraphModule]:
        """Key -> part."""


def check_options(graph: object, backward: object, user_outputs: object, sizes: Mapping[str, object]) -> None:
    """Refuse what is not a graph, and options that contradict the graph or each other."""
    is_split = not isinstance(graph, fx.GraphModule) and isinstance(graph, SplitLike)
    gm = require_graph(getattr(graph, "module", graph) if is_split else graph, "a torch.fx.GraphModule or a Split")
    if backward is not None:
        require_graph(backward, "a torch.fx.GraphModule or a Split")
    if is_split and backward is not None:
        raise bad_option(
            "a Split is not the forward graph of a pair", "Take the graphs of splitkit.capture_joint(...).split."
        )
    known_symbols = _symbols(gm, backward) if sizes else set()
    for name, bound in sizes.items():
        if name not in known_symbols:
            raise bad_option(
                f"sizes names {name!r}, which is not in the graph",
                f"Its symbols are {', '.join(sorted(known_symbols))}."
                if known_symbols
                else "Leave sizes out: its sizes are all known.",
            )
        if not is_whole(bound):
            raise bad_option(f"sizes[{name!r}] is {bound!r}", "Give a whole number, 0 or more.")
    if user_outputs is not None and backward is None:
        raise bad_option("user_outputs is given without a backward graph", "Leave it out, or give backward.")
    if user_outputs is not None:
        known = len(leaves_returned(gm))
        if not is_whole(user_outputs) or user_outputs > known:
            raise bad_option(f"user_outputs is {user_outputs!r}", f"forward has {known} outputs.")


def _symbols(*graphs: object) -> set[str]:
    nodes = (node for gm in graphs if isinstance(gm, fx.GraphModule) for node in gm.graph.nodes)
    values = (leaf for node in nodes for leaf in pytree.tree_leaves(value_of(node)))
    return {str(symbol) for value in values for symbol in symbols_of(value)}


def leaves_returned(gm: fx.GraphModule) -> list[object]:
    """Return the leaves of a graph's output in order: nodes, ``None`` and other constants."""
    leaves: list[object] = pytree.tree_leaves(gm.graph.output_node().args)
    return leaves


def bad_option(reason: str, remedy: str) -> GraphError:
    """Return an SK110 error."""
    return GraphError("SK110", reason, remedy)


def checked_workspace(workspace: Callable[[Node], int] | None) -> Callable[[Node], int]:
    """Wrap ``workspace`` so that it refuses results that are not a number of bytes."""
    if workspace is None:
        return lambda node: 0
    if not callable(workspace):
        raise bad_option(f"workspace is {workspace!r}", "Give a function from a node to bytes.")

    def known(node: Node) -> int:
        nbytes = workspace(node)
        if not is_whole(nbytes):
            raise bad_option(f"workspace gives {nbytes!r} for {node.name}", "Give bytes, 0 or more.")
        return nbytes

    return known


def known_bytes(name: str, nbytes: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return ``nbytes`` as a plain number.

    Raises:
        GraphError: SK108 if it depends on the data and has no upper bound.
    """
    try:
        return plain_size(nbytes, sizes)
    except LookupError as error:
        symbol = error.args[0]
        raise GraphError(
            "SK108",
            f"{name} has {nbytes} bytes, and {', '.join(error.args)} depends on the data",
            f"State an upper bound in the model, torch._check(n <= 1024) for the n that is {symbol}, and capture "
            f"again; simulate_memory also takes sizes={{{symbol!r}: 1024}}.",
            [name],
        ) from error


def refuse_sparse(node: Node, tensor: torch.Tensor) -> None:
    """Refuse a sparse tensor, whose number of stored elements is unknown.

    Raises:
        GraphError: SK108.
    """
    if tensor.layout not in (torch.strided, MKLDNN):
        raise GraphError(
            "SK108",
            f"{node.name} is sparse ({tensor.layout}): its bytes depend on the data",
            "Make it dense, or measure a run with splitkit.measure_memory.",
            [node],
        )
