"""Compute the facts about a graph that policies, rewrites, the engine and reports read."""

from __future__ import annotations

import operator
import re
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.errors import GraphError, NoPlanError
from splitkit.graph.opaque_bindings import Bindings, bindings_of
from splitkit.graph.ops import Effects, Memo, effects_of, is_tuple, op_tables
from splitkit.graph.ops.functions import is_python
from splitkit.graph.ops.tuples import Known
from splitkit.graph.ops.value_kinds import ValueKind, read_from, value_kind
from splitkit.graph.scope import Scope, is_state_op, scopes
from splitkit.graph.shards import is_wait
from splitkit.graph.shared_memory import order_edges, references_of
from splitkit.graph.storages import (
    Lookup,
    is_symbolic,
    owned_tensors,
    require_stored,
    symbol_nodes,
    symbols_of,
    value_of,
)
from splitkit.prices import Costs
from splitkit.short_repr import brief

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Dataflow:
    """The result of `analyze`: facts about a graph. After an edit of the graph they are stale.

    Attributes:
        graph: the graph.
        root: the module that owns its parameters, buffers and called modules.
        index: node -> position in graph order, the tie-breaker everywhere.
        after: node -> the nodes that must run before it because of an effect (order edges).
        scope: node -> the ambient state (autocast, grad mode ...) that it was captured under.
        final: the state in which the graph leaves its caller.
        once: node -> why it may not be copied: it writes memory, owns memory that is written, draws random numbers,
            or acts on the outside world. Iterates and tests like a set.
        written: the attributes (``get_attr`` nodes) whose memory the graph writes.
        followers: node that unpacks a tuple -> the node that made the tuple; node that waits for a collective -> the
            collective. Both are in the same parts.
        effects: node -> what it does, as classified by `splitkit.graph.ops`.
        bindings: the attributes that opaque code may bind anew.
        references: view that reads nothing of its base -> that base, and whether the view may run early.
    """

    graph: fx.Graph
    root: fx.GraphModule
    index: Mapping[Node, int]
    after: Mapping[Node, tuple[Node, ...]]
    scope: Mapping[Node, Scope]
    final: Scope
    once: Mapping[Node, str]
    written: frozenset[Node]
    followers: Mapping[Node, Node]
    effects: Mapping[Node, Effects]
    bindings: Bindings
    references: Mapping[Node, tuple[Node, bool]]

    __repr__ = brief

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The placeable nodes in graph order: the nodes that a policy assigns to parts."""
        fixed, followers = ("placeholder", "output", "get_attr"), self.followers
        return tuple(n for n in self.scope if n.op not in fixed and n not in followers)

    @cached_property
    def _placeable(self) -> frozenset[Node]:
        return frozenset(self.nodes)

    def is_placeable(self, node: Node) -> bool:
        """Whether a policy decides where ``node`` runs (no input, output, attribute, state op or follower)."""
        return node in self._placeable

    def fact(self, find: Callable[..., T], *given: Hashable) -> T:
        """Return ``find(flow, *given)``, computed once for all callers (what autograd saves, FLOPs ...).

        The key contains the state that may change without an edit of the graph: the modes of modules, which tensors
        require grad, and the kernels that attention may take.
        """
        root = self.root
        wants = tuple(t.requires_grad for held in (root.parameters(), root.buffers()) for t in held)
        key = (find, given, wants, tuple(getattr(module, "training", None) for module in root.modules()), _kernels())
        if key not in self._facts:
            self._facts[key] = find(self, *given)
        found: T = self._facts[key]
        return found

    @cached_property
    def _facts(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _binders(self) -> Mapping[Any, Node]:
        return symbol_nodes(self.graph)

    def symbols(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that define the symbols in the sizes of the node's value, sorted by symbol.

        A symbol that no node yields is left out: the tensor itself carries it. Graphs of ``torch.export`` that never
        ask for a size have such symbols.
        """
        value = value_of(node)
        if not is_symbolic(value):
            return ()
        return tuple(self._binders[s] for s in symbols_of(value) if s in self._binders)

    def producer(self, node: Node) -> Node:
        """Return the node that made the tuple that ``node`` unpacks, or the node itself."""
        return self.followers.get(node, node)

    def inputs(self, node: Node) -> dict[Node, None]:
        """Return the placeable nodes whose values ``node`` reads, each once, in the order of its arguments."""
        producers = (self.producer(read) for read in reads(node))
        return {p: None for p in producers if p is not node and self.is_placeable(p)}

    @cached_property
    def waits(self) -> Mapping[Node, tuple[Node, ...]]:
        """Placeable node -> the placeable nodes that must run before it: its inputs, then its order edges."""
        return {node: (*self.inputs(node), *self.after.get(node, ())) for node in self.nodes}

    def owned(self, *nodes: Node) -> tuple[torch.Tensor, ...]:
        """Return the parameters, buffers and constants that nodes read, also in the modules that they call and in the
        bodies of higher-order operators.

        Of tensors that begin at the same place of a storage only one is returned: a parameter if there is one, then
        the largest. Views that begin at different places of one storage are all returned, such as the weights of an
        LSTM on CUDA; `splitkit.graph.storages.storage_key` is equal for them.
        """
        return owned_tensors(self.root, nodes)


def analyze(gm: fx.GraphModule) -> Dataflow:
    """Compute the facts about a graph, in time linear in its nodes and edges.

    Works on graphs of ``torch.export``, ``torch.fx.symbolic_trace``, Dynamo backends and ``make_fx``.

    Raises:
        GraphError: SK101 if ``gm`` is not a GraphModule, SK103 or SK104 if its regions or attributes do not resolve,
            SK111 if a node reads a node that is not in the graph or that comes after it.
    """
    graph = require_graph(gm).graph
    require_order(graph)
    scope, final = scopes(graph)
    find = Lookup(gm)
    for node in scope:
        if node.op == "get_attr":
            require_stored(find, str(node.target))
    memo = Memo()
    effects: Mapping[Node, Effects] = {n: effects_of(n, gm, memo) for n in scope}
    effects, bindings = bindings_of(effects, gm)
    followers = _followers(effects, gm, memo.tuples)
    references = references_of(effects, scope, gm, memo.tuples)
    after, once, written = order_edges(effects, gm, followers.__contains__, bindings, references)
    index = {n: i for i, n in enumerate(graph.nodes)}
    return Dataflow(graph, gm, index, after, scope, final, once, written, followers, effects, bindings, references)


def facts_of(given: object) -> Dataflow:
    """Return the given facts, or the facts of a given graph, `Split` or `Joint`.

    Raises:
        GraphError: SK101 if it is none of these.
    """
    held = given if isinstance(given, Dataflow) else getattr(given, "flow", None)
    return held if isinstance(held, Dataflow) else analyze(require_graph(given, "splitkit.analyze(gm) or a graph"))


def require_order(graph: fx.Graph) -> None:
    """Raise unless every node reads only earlier nodes of this graph; a wrong edit may break that.

    Raises:
        GraphError: SK111 with the node and the node that it reads.
    """
    before: set[Node] = set()
    for node in graph.nodes:
        if not before.issuperset(inputs_of(node)):
            wrong = next(n for n in inputs_of(node) if n not in before)
            where = "comes after it" if wrong in set(graph.nodes) else "is not a node of this graph"
            raise GraphError(
                "SK111",
                f"{node.name} reads {wrong.name}, which {where}",
                "Correct the edit that caused this: give the node an input from its own graph that comes before it "
                "(gm.graph.lint() checks that).",
                [node, wrong],
            )
        before.add(node)


def require_graph(given: object, wanted: str = "a torch.fx.GraphModule") -> fx.GraphModule:
    """Return ``given`` if it is a graph module.

    Args:
        given: any object.
        wanted: what the error says was expected.

    Raises:
        GraphError: SK101 if it is not a graph module.
    """
    if isinstance(given, fx.GraphModule):
        return given
    remedy = "Capture the model first: gm = splitkit.capture(model, *example_inputs)."
    if isinstance(given, torch.export.ExportedProgram):
        remedy = "Give its module: program.module()."
    raise GraphError("SK101", f"splitkit works on {wanted}, not on {type(given).__name__}", remedy)


def root_of(given: fx.GraphModule | Dataflow) -> fx.GraphModule:
    """Return the given graph module, or the graph module of the given facts.

    Raises:
        GraphError: SK101 if the argument is neither.
    """
    return given.root if isinstance(given, Dataflow) else require_graph(given)


def reads(node: Node) -> list[Node]:
    """Return the nodes whose values ``node`` takes, each once; region handles are not values."""
    return [a for a in node.all_input_nodes if not is_state_op(a)]


def _followers(effects: Mapping[Node, Effects], root: nn.Module, known: Known) -> dict[Node, Node]:
    """Return ``getitem`` of a tuple -> the node that made the tuple, through nested tuples; not for written lists.

    What waits for a collective follows it, too: no other part may get a value that is still on its way.
    """
    followers: dict[Node, Node] = {}
    items = [n for n in effects if (n.target is getitem or is_wait(n)) and isinstance(n.args[0], Node)]
    written = {node for effect in effects.values() for node in effect.writes} if items else set()
    for node in items:
        source = node.args[0]
        assert isinstance(source, Node)
        if source.op in ("placeholder", "get_attr") or source not in effects:
            continue
        if is_wait(node):
            followers[node] = followers.get(source, source)
            continue
        if source in written:
            continue
        known_tuple = is_tuple(source, root, known)
        # Unknown: an index that only tensors take shows a view of a tensor. Keeping a pair together is always right.
        unpacks = isinstance(node.args[1], int | slice | str) if known_tuple is None else known_tuple
        # A computed index may come from another part; then the whole tuple crosses.
        if len(node.all_input_nodes) == 1 and unpacks:
            followers[node] = followers.get(source, source)
    return followers


def _kernels() -> tuple[bool, ...]:
    """Return which kernels attention may take (``torch.nn.attention.sdpa_kernel``): they differ in saved values."""
    allowed: Any = torch.backends.cuda  # untyped
    return (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
        allowed.math_sdp_enabled(),
    )


_CALL_SUFFIX = re.compile(r"@\d+")  # export marks the second call of a module `h.0@1`
_ITEM = re.compile(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]")  # Dynamo: L['self'].h[0], ._modules['h']


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What export writes for a node that no module called, such as a size of an input: 2.11, 2.13, 2.15."""


def module_path(node: Node) -> str:
    """Return the dotted name of the innermost module whose call produced ``node``, ``""`` for the model itself.

    A backward node of a joint graph belongs to the module of its forward node.
    """
    meta = node.meta
    stack: Mapping[str, Any] | None = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if node.op == "call_module":
        return str(node.target)
    if not stack:
        return ""
    return _plain_path(str(list(stack.values())[-1][0]))


def calls_around(node: Node) -> Mapping[str, str]:
    """Return the calls of modules in which ``node`` was captured, outermost first: key of the call -> its module."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    calls = {str(key): _plain_path(str(module[0])) for key, module in stack.items()}
    own = {node.name: str(node.target)} if node.op == "call_module" and node.target not in calls.values() else {}
    return {**calls, **own}


def _plain_path(path: str) -> str:
    if path == _NO_MODULE:
        return ""
    path = path.removeprefix("L['self']").removeprefix("L__self__")
    return _CALL_SUFFIX.sub("", _ITEM.sub(r".\1", path)).lstrip(".")


def enough_nodes(flow: Dataflow, parts: int) -> None:
    """Raise SK303 if the graph has fewer placeable nodes than ``parts``."""
    if len(flow.nodes) < parts:
        raise NoPlanError(
            "SK303",
            f"{parts} parts were asked for, but the graph has only {len(flow.nodes)} nodes to place",
            f"Ask for at most {len(flow.nodes)}." if flow.nodes else "Capture a model that computes something.",
        )


def nodes_after(before: Mapping[Key, Iterable[Key]]) -> dict[Key, list[Key]]:
    """Return node -> the nodes that must run after it; nodes of a graph, or keys in their place."""
    after: dict[Key, list[Key]] = {node: [] for node in before}
    for node, earlier in before.items():
        for n in earlier:
            after[n].append(node)
    return after


def readers_of(flow: Dataflow) -> dict[Node, list[Node]]:
    """Return placeable node -> the placeable nodes that read it or an item of its tuple, in graph order."""
    return nodes_after({node: flow.inputs(node) for node in flow.nodes})


def given_back(flow: Dataflow) -> set[Node]:
    """Return the nodes whose values the graph returns."""
    return {flow.producer(read) for n in flow.index if n.op == "output" for read in n.all_input_nodes}


def waits_for(flow: Dataflow, node: Node) -> tuple[Node, ...]:
    """Return the placeable nodes that must run before ``node``."""
    known = flow.waits.get(node)
    return (*flow.inputs(node), *flow.after.get(node, ())) if known is None else known


def crossing_values(flow: Dataflow, costs: Costs, nodes: Sequence[Node]) -> npt.NDArray[np.float64]:
    """Return, for each border before, between and after ``nodes``, how many values cross it and their bytes.

    A value crosses a border if a node before it makes the value and a node behind it reads the value.

    Returns:
        Array of shape (2, n + 1): counts, then bytes.
    """
    position = {node: i for i, node in enumerate(nodes)}
    change = np.zeros((2, len(position) + 1))  # at each border, against the border before it
    for value in flow.index:
        if (made := position.get(flow.producer(value))) is None:
            continue
        readers = [position[u] for u in value.users if u in position]  # items of a tuple count separately
        if readers and max(readers) > made:
            size = (1, costs.nbytes(value))
            change[:, made + 1] += size
            change[:, max(readers) + 1] -= size
    return change.cumsum(axis=1)


# Finds nodes that only keep a module's books: counters, running ranges and the like, whose results no node reads.
#
# Nothing but its module tells where such a node belongs. It costs next to nothing and feeds nothing, so a search would
# put it wherever there is room, and its buffer with it::
#
#     num_batches_tracked.add_(1)                 with the batch norm of its module
#     low.copy_(minimum(low, x.amin()))           with what makes x


def bookkeeping(flow: Dataflow) -> list[tuple[Node, ...]]:
    """Return sets of nodes that only keep books, each set behind the node, which keeps none, in whose part it belongs.

    That is the last node that they compute from; if there is none, their neighbour in the order of the graph: the next
    node, or the one before if only that one is in their module.
    """
    place, group = flow.index.__getitem__, dict[Node, list[Node]]()
    for node in _books(flow):
        own = group[node] = [node]
        for first in flow.waits[node]:
            if first in group and group[first] is not own:
                own += group[first]
                group |= dict.fromkeys(group[first], own)
    others = [node for node in flow.nodes if node not in group]
    found = []
    for nodes in {id(nodes): sorted(nodes, key=place) for nodes in group.values()}.values():
        at, owner = bisect(others, place(nodes[0]), key=place), module_path(nodes[0])
        near = [*others[at : at + 1], *others[max(at - 1, 0) : at]]
        made = [first for node in nodes for first in flow.waits[node] if first not in group]
        inside = (node for node in near if f"{module_path(node)}.".startswith(f"{owner}."))
        home = max(made, key=place) if made else next(inside, near[0] if near else None)
        if home is not None:
            found.append((home, *nodes))
    return found


def _books(flow: Dataflow) -> list[Node]:
    """Return, in graph order, the nodes that write memory or make a new state and are read by no node, and those of
    their module that only these read.
    """
    given, readers, found = given_back(flow), nodes_after(flow.waits), set[Node]()
    for node in reversed(flow.nodes):
        owner, isolated = module_path(node), not flow.waits[node]
        if readers[node]:
            alike = isolated or (owner and all(module_path(reader) == owner for reader in readers[node]))
            is_book = node not in given and alike and found.issuperset(readers[node])
        else:
            # a joint graph returns the new state, where others write it
            is_book = node in flow.once and (isolated or (node not in given and bool(flow.effects[node].writes)))
        if is_book:
            found.add(node)
    return [node for node in flow.nodes if node in found]


# Find the inputs that the analysis assumes to be tensors although nothing says so.
#
# If an input has neither ``meta["val"]`` nor an annotation, ``x.add(y)`` is nearly always the method of a tensor. The
# method of another object could change that object; then its order, its copies and whether it runs at all would matter.
# So where a split relies on the assumption, `splitkit.engine.split` checks the inputs of each call.


Path = tuple[tuple[bool, object], ...]
"""The reads that lead from an input to a value: for each, whether it reads an attribute (or an item), and its name."""


@dataclass(frozen=True)
class Assumed:
    """A value that is assumed to be a tensor.

    Attributes:
        path: how the value is read from the input; empty for the input itself.
        by: the nodes whose effects would differ for another object.
        no_array: whether the effects of one of these nodes would also differ for a numpy array.
    """

    path: Path
    by: tuple[Node, ...]
    no_array: bool


def assumed_tensors(flow: Dataflow) -> Mapping[Node, tuple[Assumed, ...]]:
    """Return placeholder -> the values read from it that are assumed to be tensors, in time linear in the graph."""
    known: dict[Node, ValueKind] = {}
    found: dict[Node, dict[Path, list[Node]]] = {}
    for node, effect in flow.effects.items():
        for value in _operands(node) if effect.known else ():
            if value_kind(value, flow.root, known) is ValueKind.OPEN:
                source, reads = read_from(value)
                if source.op == "placeholder":
                    path = tuple((r.target is getattr, r.args[1]) for r in reads)
                    found.setdefault(source, {}).setdefault(path, []).append(node)
    return {
        source: tuple(Assumed(path, tuple(by), any(map(_is_other_in_arrays, by))) for path, by in paths.items())
        for source, paths in found.items()
    }


def _operands(node: Node) -> tuple[Node, ...]:
    """Return the arguments whose class decides what a node does."""
    if node.op == "call_method" or node.target is operator.getitem:
        return tuple(a for a in node.args[:1] if isinstance(a, Node))
    return tuple(node.all_input_nodes) if is_python(node) and node.target is not getattr else ()


def _is_other_in_arrays(node: Node) -> bool:
    return node.op == "call_method" and node.target in op_tables.IN_PLACE_ELSEWHERE
