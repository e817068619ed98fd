"""Alias classes: which nodes of a graph share memory, and which of them read or write it.

Values that may share memory form one *class*: union-find joins views, aliases and the several attribute names of one
tensor. Four kinds of state that are not tensors are classes too (the constants below):

- random generators, so that independent dropouts keep their order;
- the outside world, so that prints keep theirs;
- ambient state that no `Scope` describes (a default dtype, a choice of attention kernels). A node that sets it writes
  the class and every other node reads it, so that nothing moves across;
- memory that opaque code may reach. Code that splitkit does not know may reach more than its arguments: any attribute
  of the graph, and whatever earlier opaque code was given or has made. It counts as a reader and a writer of all that.

Obtaining a reference (get_attr, placeholder, getitem of a tuple, a view) reads nothing: only its users read. Asking for
a size (``empty_like``) reads no memory either, but keeps its place among ops that resize: each class has a second one,
``(SIZES, class)``, for that.

Two things are assumed. Inputs of the graph do not share memory with each other or with an attribute unless their
``meta["val"]`` do (`splitkit.engine.overlap_checks` checks this at each call). And opaque code holds no input of a
call that it was not given in that call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import Node

from splitkit.graph.opaque_bindings import Bindings
from splitkit.graph.ops import PURE, Effects, base_of_view, sizes_only
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.scope import Scope, is_state_op
from splitkit.graph.storages import Lookup, held_in, hides_memory, is_plain, shared_keys, storage_key, value_of

RANDOM = "random numbers"
OUTSIDE = "the outside world"
AMBIENT = "ambient state"
SIZES = "sizes of"
REACHED = "memory that opaque code may reach"
LENT = "memory that opaque code may have handed out"
_TOKENS = (RANDOM, OUTSIDE, AMBIENT, REACHED, LENT)
NO_MEMORY: Set[Hashable] = frozenset({*_TOKENS, *((SIZES, token) for token in _TOKENS)})

GIVEN = ("placeholder", "get_attr")
"""The kinds of nodes that only name memory that exists before the graph runs."""
_FREE = frozenset({RANDOM, OUTSIDE, AMBIENT, *((SIZES, token) for token in (RANDOM, OUTSIDE, AMBIENT))})


@dataclass(frozen=True)
class Memory:
    """The alias classes of a graph that matter to order: those that a node writes or that opaque code may reach.

    Attributes:
        members: node or storage -> its class.
        written: the classes that some node writes.
        reached: the classes that opaque code may reach: attributes, its arguments, and tensors that it has made.
        lent: the classes that may be the memory of other classes, because opaque code may return a buffer it holds.
    """

    members: Mapping[Hashable, Hashable]
    written: Set[Hashable]
    reached: Set[Hashable] = frozenset()
    lent: Set[Hashable] = frozenset()

    def use(self, node: Node, effect: Effects) -> tuple[dict[Hashable, None], dict[Hashable, None]]:
        """Return the classes that a node writes, and those that it reads or writes."""
        members, written = self.members, self.written
        writes = {members.get(w, w): None for w in _written(effect)}
        if not effect.same_sizes:
            writes |= {(SIZES, c): None for c in writes if c in written}
        reads = node.all_input_nodes
        asked = sizes_only(node) if reads else ()
        items = _touched(node, effect, reads, asked)
        touched = {**writes}
        for item in items:
            if (c := members.get(item, item)) in written:
                touched[c] = None
        if asked:
            touched |= {(SIZES, c): None for item in asked if (c := members.get(item, item)) in written}
        if self.reached or not effect.known:
            self._reach([*items, *asked], effect, writes, touched)
        return writes, touched

    def refer(self, view: Node, base: Node, touched: dict[Hashable, None]) -> dict[Hashable, None]:
        """Return ``touched`` of a view with the memory of its base replaced by the sizes of its base."""
        c = self.members.get(base, base)
        others = {self.members.get(a, a) for a in view.all_input_nodes if a is not base}
        if c not in touched or c in others:
            return touched
        return {(SIZES, c) if t == c else t: None for t in touched}

    def _reach(
        self, items: list[Hashable], effect: Effects, writes: dict[Hashable, None], touched: dict[Hashable, None]
    ) -> None:
        """Add what opaque code touches: it writes all that it may reach, and what it has lent may be any of that.

        For example, with an opaque ``leaf``::

            u = leaf(x)      writes all reached memory     leaf holds buf in a list, and returns it
            r = buf * 2      reads reached memory          r waits for u
            w = u.add_(1)    writes lent memory            w waits for r
        """
        reached = {c for item in items if (c := self.members.get(item, item)) in self.reached}
        reached.update(map(storage_key, effect.reads_state))
        lent = not self.lent.isdisjoint(reached)
        if effect.known and not reached:
            return
        touched[REACHED] = None
        if lent or not effect.known:
            touched[LENT] = None
        if not effect.known or (lent and not self.lent.isdisjoint(writes)):
            writes[REACHED] = None
        if not effect.known or effect.writes_state or not self.reached.isdisjoint(writes):
            writes[LENT] = touched[LENT] = None


def memory_classes(effects: Mapping[Node, Effects], root: torch.nn.Module, besides: Iterable[Hashable] = ()) -> Memory:
    """Return the alias classes that matter to the order of nodes.

    Args:
        effects: node -> what it does, in graph order.
        root: the module that owns the graph's attributes.
        besides: nodes and storages to treat as if they were written.
    """
    acting = acting_nodes(effects)
    doing = [e for e in acting.values() if not only_aliases(e)]
    written = {w for e in doing for w in _written(e)}
    if not any(e.writes or e.writes_state or not e.known for e in doing):
        return Memory({}, written)
    find = Lookup(root)
    attributes = {n: find(str(n.target)) for n in effects if n.op == "get_attr"}
    state = {id(t): t for e in acting.values() for t in (*e.reads_state, *e.writes_state)}.values()
    classes = _alias_classes(acting, effects, attributes, state)
    found = {classes.find(w) for w in (*written, *besides)}
    opaque = {classes.find(n): None for n, e in acting.items() if not e.known}
    lent = {*opaque, *(classes.find(n) for n, value in attributes.items() if not is_plain(value))}
    lent.update(classes.find(storage_key(t)) for t in state if hides_memory(t))
    reached = {*lent, *map(classes.find, (*attributes, *map(storage_key, state)))} if lent else set()
    matter = found | reached
    members = {item: c for item in list(classes.parent) if (c := classes.find(item)) in matter}
    return Memory(members, found, reached, lent)


def acting_nodes(effects: Mapping[Node, Effects]) -> dict[Node, Effects]:
    """Return the nodes that do more than compute a fresh value."""
    return {n: e for n, e in effects.items() if e is not PURE}


def only_aliases(e: Effects) -> bool:
    """Whether a node does no more than compute, read state and share memory."""
    return not (e.random or e.writes or e.writes_state or e.impure or e.check or e.ambient or not e.known)


def _alias_classes(
    acting: Mapping[Node, Effects],
    effects: Mapping[Node, Effects],
    attributes: Mapping[Node, object],
    state: Iterable[torch.Tensor],
) -> Classes:
    classes = Classes()
    for node, effect in acting.items():
        for other in effect.aliases:
            classes.join(node, other)
    given = list(state)
    for node, value in attributes.items():
        if not isinstance(value, torch.Tensor):
            classes.join(node, ("object", id(value)))
        for held in held_in(value):  # a tensor holds itself
            classes.join(node, storage_key(held))
            given.append(held)
    for node in effects:
        if node.op == "placeholder" and isinstance(value := value_of(node), torch.Tensor):
            classes.join(node, storage_key(value))
            given.append(value)
    for pair in shared_keys(given):
        classes.join(*pair)
    return classes


def _written(effect: Effects) -> Iterable[Hashable]:
    yield from effect.writes
    yield from map(storage_key, effect.writes_state)
    if effect.random:
        yield RANDOM
    if effect.impure:
        yield OUTSIDE
    if effect.ambient:
        yield AMBIENT


def _touched(node: Node, effect: Effects, reads: Collection[Node], asked: Collection[Node]) -> list[Hashable]:
    items: list[Hashable] = [] if node.op == "output" else [node]
    items += [read for read in reads if not is_state_op(read) and read not in asked]
    items.append(AMBIENT)
    if effect.reads_state:
        items += map(storage_key, effect.reads_state)
    if effect.check:  # a check reads the outside world: it keeps its place among prints, not among other checks
        items.append(OUTSIDE)
    return items


class Touch(NamedTuple):
    """One node that touches a class of memory.

    Attributes:
        node: the node; the output node, where the graph returns the memory.
        value: the returned value, for the output node; otherwise the node itself.
        writes: whether the node writes the memory.
    """

    node: Node
    value: Node
    writes: bool


def memory_touches(effects: Mapping[Node, Effects], memory: Memory) -> Mapping[Hashable, list[Touch]]:
    """Return a mapping: written class -> the nodes that touch it, in graph order, without those that only name it."""
    found: dict[Hashable, list[Touch]] = {}
    for node, effect in effects.items():
        if node.op == "output":
            for value in node.all_input_nodes:
                if (item := memory.members.get(value)) in memory.written:
                    found.setdefault(item, []).append(Touch(node, value, False))
        elif node.op not in GIVEN:
            writes, touched = memory.use(node, effect)
            for item in touched:
                if item not in _FREE:
                    found.setdefault(item, []).append(Touch(node, node, item in writes))
    return found


class Classes:
    """Union-find with path halving (Tarjan and van Leeuwen 1984) over nodes, storages and tokens."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """Return the representative of an item's class: equal for all items that are joined."""
        parent = self.parent
        if item not in parent:
            parent[item] = item
            return item
        while parent[item] is not item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: Hashable, b: Hashable) -> None:
        """Merge the classes of two items."""
        self.parent[self.find(a)] = self.find(b)


# Order edges: which nodes must keep their order although no value passes between them.
#
# Along graph order, reads and writes of one class of memory give edges, as in the
# dependence analysis of compilers::
#
#     y = x.add_(1)      write                 read-after-write    z waits for y
#     z = x * 2          read                  write-after-read    w waits for z
#     w = x.mul_(3)      write                 write-after-write   w waits for y
#
# Attributes that opaque code may bind anew (`splitkit.graph.opaque_bindings`) are one more class, `BOUND`.
#
# A view that only takes a reference reads no memory. It may always run after a write that follows it in the graph, but
# before a write that precedes it only where autograd allows that: not if the view yields several tensors, is made
# without gradients, or is itself written later. In those cases torch raises that the base has been modified in place.


BOUND = "attributes that opaque code may bind anew"


class _Edges(dict[Node, tuple[Node, ...]]):
    """Order edges; a node without an entry waits for no other."""

    def __missing__(self, node: Node) -> tuple[Node, ...]:
        return ()


def order_edges(
    effects: Mapping[Node, Effects],
    root: nn.Module,
    is_reference: Callable[[Node], bool],
    bindings: Bindings,
    references: Mapping[Node, tuple[Node, bool]],
) -> tuple[Mapping[Node, tuple[Node, ...]], Mapping[Node, str], frozenset[Node]]:
    """Return the order edges of a graph and the nodes that may not be copied, in time linear in nodes and edges.

    Args:
        effects: node -> what it does, in graph order.
        root: the module that owns the graph's attributes.
        is_reference: whether a node only passes a reference on (getitem of a tuple).
        bindings: the attributes that opaque code may bind anew.
        references: what `references_of` returns.

    Returns:
        `Dataflow.after`, `Dataflow.once` and `Dataflow.written`.
    """
    acting = acting_nodes(effects)
    memory = memory_classes(effects, root)
    members, written = memory.members, memory.written
    after, once = _Edges(), dict[Node, str]()
    last_write: dict[Hashable, Node] = {}
    readers: dict[Hashable, dict[Node, None]] = {}
    all_nodes = AMBIENT in written or bool(bindings.opaque)
    for node in _concerned(acting, effects, members, all_nodes):
        if node.op in ("placeholder", "get_attr") or is_reference(node):
            continue
        effect = effects[node]
        writes, touched = memory.use(node, effect)
        before: dict[Node, None] = {}
        if node in references:
            base, may_be_early = references[node]
            touched = memory.refer(node, base, touched)
            c = members.get(node)
            if c in last_write and not may_be_early:
                before[last_write[c]] = None
        if not effect.known:
            writes[BOUND] = touched[BOUND] = None
        elif node in bindings.calls or any(read in bindings.reads for read in node.all_input_nodes):
            touched[BOUND] = None
        for c in touched:
            if c in last_write:
                before[last_write[c]] = None
            if c in writes:
                before |= readers.pop(c, {})
                last_write[c] = node
            else:
                readers.setdefault(c, {})[node] = None
        before.pop(node, None)
        if before:
            after[node] = tuple(before)
        if node.op != "output" and (reason := _reason(effect, members.get(node) in written)):
            once[node] = reason
    attributes = (n for n in members if isinstance(n, Node) and n.op == "get_attr" and members[n] in written)
    return after, once, frozenset(attributes)


def _concerned(
    acting: Mapping[Node, Effects],
    effects: Mapping[Node, Effects],
    members: Mapping[Hashable, Hashable],
    all_nodes: bool,
) -> Iterable[Node]:
    """Return the nodes that write or touch written memory, in graph order; no other node has an order edge."""
    if all_nodes:
        return effects
    if not members:
        return [n for n, e in acting.items() if not only_aliases(e)]
    found = dict.fromkeys(n for n, e in acting.items() if e.reads_state or not only_aliases(e))
    for item in members:
        if isinstance(item, Node):
            found[item] = None
            found |= item.users
    return [n for n in effects if n in found]


def _reason(effect: Effects, storage_is_written: bool) -> str:
    if not effect.known:
        return "it is not known what it does (declare it with splitkit.extend.declare)"
    if effect.writes or effect.writes_state:
        return "it writes memory"
    if effect.random:
        return "it draws random numbers"
    if effect.ambient:
        return "it sets the state in which other nodes run"
    if effect.impure or effect.check:
        return "it acts on the outside world"
    return "its memory is written by another node" if storage_is_written else ""


def references_of(
    effects: Mapping[Node, Effects], scope: Mapping[Node, Scope], root: nn.Module, known: Known
) -> Mapping[Node, tuple[Node, bool]]:
    """Return the views of a graph that read nothing of their bases.

    Args:
        effects: node -> what it does, in graph order.
        scope: node -> its ambient state.
        root: the module that owns the graph's attributes.
        known: node -> whether it yields a tuple, as far as that has been answered.

    Returns:
        View -> its base, and whether the view may run before a write to the base that precedes it in the graph.
    """
    if not any(e.writes for e in effects.values()):
        return {}
    found = {n: b for n, e in effects.items() if e.aliases and (b := base_of_view(n, e, root, known)) is not None}
    written = {w for e in effects.values() for w in e.writes}
    for node in reversed(list(effects)):
        if node in written:  # a write to a view writes its base
            written.update(effects[node].aliases)
    return {
        view: (base, view not in written and scope[view].grad is not False and is_tuple(view, root, known) is False)
        for view, base in found.items()
    }
