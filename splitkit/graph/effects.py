"""Order that data edges do not show: storages that are written, random numbers, prints.

Values that may share memory form one *class* (union-find over views and aliases; two attribute names of one tensor
are one class). Along graph order, reads and writes of a class give *order edges*::

    y = x.add_(1)      write                 read-after-write    z waits for y
    z = x * 2          read                  write-after-read    w waits for z
    w = x.mul_(3)      write                 write-after-write   w waits for y

Random generators and the outside world (prints) are classes too, so that independent dropouts keep their order.
So is ambient state that no `Scope` describes (a default dtype, a choice of attention kernels): what sets it writes, and
every other node reads, so nothing moves across. Attributes that opaque code may bind anew are one more
(`splitkit.graph.bindings`).
Obtaining a reference (get_attr, placeholder, getitem of a tuple, a view) reads nothing: only its users do. Asking for a
size (``empty_like``) reads no memory; like views, it keeps its place among ops that resize.

Code that splitkit does not know may reach more than its arguments: any attribute of the graph, whatever opaque code was
given before and whatever it has made. It counts as reader and writer of all that (`Memory`).

Assumed: two inputs of the graph do not share memory with each other or with an attribute, unless their ``meta["val"]``
do (`splitkit.engine.overlaps` looks at each call); and opaque code holds no input of this call that it was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.fx import Node

from splitkit.graph.bindings import NO_BINDINGS, Bindings
from splitkit.graph.classes import Classes, held_in, is_plain
from splitkit.graph.ops import PURE, Effects, sizes_only
from splitkit.graph.references import Reference
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import Lookup, storage_key
from splitkit.graph.symbols import value_of

RANDOM = "random numbers"
OUTSIDE = "the outside world"
AMBIENT = "ambient state"
BOUND = "attributes that opaque code may bind anew"
SIZES = "sizes of"
REACHED = "memory that opaque code may reach"
LENT = "memory that opaque code may have handed out"
_TOKENS = (RANDOM, OUTSIDE, AMBIENT, REACHED, LENT)
NO_REFERENCES: Mapping[Node, Reference] = MappingProxyType({})
NO_MEMORY: Set[Hashable] = frozenset({*_TOKENS, *((SIZES, token) for token in _TOKENS)})


@dataclass(frozen=True)
class Order:
    """What `order_of` finds: order edges, and why a node may run only once.

    Attributes:
        after: for each node, the nodes that must have run before it for the sake of an effect.
        once: node -> reason, for the nodes that may not be copied.
        written: attributes of the graph (``get_attr``) whose memory some node writes.
    """

    after: Mapping[Node, tuple[Node, ...]]
    once: Mapping[Node, str]
    written: frozenset[Node]


class _Edges(dict[Node, tuple[Node, ...]]):
    """Order edges; a node without an entry waits for nobody."""

    def __missing__(self, node: Node) -> tuple[Node, ...]:
        return ()


def order_of(
    effects: Mapping[Node, Effects],
    root: torch.nn.Module,
    is_reference: Callable[[Node], bool],
    bindings: Bindings = NO_BINDINGS,
    references: Mapping[Node, Reference] = NO_REFERENCES,
) -> Order:
    """Order edges and copy bans of a graph, in time linear in nodes and edges.

    Args:
        effects: what each node of the graph does, in graph order.
        root: the module that owns the graph's attributes.
        is_reference: nodes that only pass a reference on (getitem of a tuple).
        bindings: the attributes that opaque code may bind anew.
        references: views that read nothing of their bases.
    """
    acting = _acting(effects)
    memory = memory_of(effects, root)
    members, written = memory.members, memory.written
    after, once = _Edges(), dict[Node, str]()
    last_write: dict[Hashable, Node] = {}
    readers: dict[Hashable, dict[Node, None]] = {}
    everybody = AMBIENT in written or bool(bindings.opaque)
    for node in _concerned(acting, effects, members, everybody):
        if node.op in ("placeholder", "get_attr") or is_reference(node):
            continue
        effect = effects[node]
        writes, touched = memory.use(node, effect)
        before: dict[Node, None] = {}
        if node in references:
            touched = memory.refer(node, references[node].base, touched)
            c = members.get(node)
            if c in last_write and not references[node].may_be_early:
                before[last_write[c]] = None
        if not effect.known:
            writes[BOUND] = touched[BOUND] = None
        elif bindings.reads_one(node):
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
    return Order(after, once, frozenset(attributes))


@dataclass(frozen=True)
class Memory:
    """Who shares memory with whom in a graph, as far as it is written, or opaque code may reach it.

    Attributes:
        members: nodes and storages -> their class.
        written: the classes that some node writes.
        reached: the classes that opaque code may reach: attributes, and what it was given or has made.
        lent: those that may be the memory of others: what opaque code yields may be a buffer that it holds.
    """

    members: Mapping[Hashable, Hashable]
    written: Set[Hashable]
    reached: Set[Hashable] = frozenset()
    lent: Set[Hashable] = frozenset()

    def use(self, node: Node, effect: Effects) -> tuple[dict[Hashable, None], dict[Hashable, None]]:
        """The classes that a node writes, and those that it reads or writes."""
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
        """What a view touches that reads nothing of its base: the sizes, and what its other arguments are."""
        c = self.members.get(base, base)
        others = {self.members.get(a, a) for a in view.all_input_nodes if a is not base}
        if c not in touched or c in others:
            return touched
        return {(SIZES, c) if t == c else t: None for t in touched}

    def _reach(
        self, items: list[Hashable], effect: Effects, writes: dict[Hashable, None], touched: dict[Hashable, None]
    ) -> None:
        """Opaque code writes whatever it may reach; and what it has lent may be any of that::

        u = leaf(x)      writes all that others reach     leaf holds buf in a list, and returns it
        r = buf * 2      reaches                          r waits for u
        w = u.add_(1)    writes what was lent             w waits for r
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


def memory_of(effects: Mapping[Node, Effects], root: torch.nn.Module, besides: Iterable[Hashable] = ()) -> Memory:
    """The classes of memory that matter to the order of nodes.

    Args:
        effects: what each node of the graph does, in graph order.
        root: the module that owns the graph's attributes.
        besides: nodes and storages to look at as if they were written.
    """
    acting = _acting(effects)
    written = {w for e in acting.values() for w in _written(e)}
    if not any(e.writes or e.writes_state or not e.known for e in acting.values()):
        return Memory({}, written)
    find = Lookup(root)
    attributes = {n: find(str(n.target)) for n in effects if n.op == "get_attr"}
    classes = _alias_classes(acting, effects, attributes)
    found = {classes.find(w) for w in (*written, *besides)}
    opaque = {classes.find(n): None for n, e in acting.items() if not e.known}
    lent = {*opaque, *(classes.find(n) for n, value in attributes.items() if not is_plain(value))}
    reached = {*lent, *map(classes.find, attributes)} if lent else set()
    reached.update(classes.find(storage_key(t)) for e in acting.values() for t in e.reads_state if lent)
    matter = found | reached
    members = {item: c for item in list(classes.parent) if (c := classes.find(item)) in matter}
    return Memory(members, found, reached, lent)


def _acting(effects: Mapping[Node, Effects]) -> dict[Node, Effects]:
    """The nodes that do more than compute."""
    return {n: e for n, e in effects.items() if e is not PURE}


def _concerned(
    acting: Mapping[Node, Effects], effects: Mapping[Node, Effects], members: Mapping[Hashable, Hashable], all_: bool
) -> Iterable[Node]:
    """The nodes that write, or touch what is written, in graph order; the others wait for nobody."""
    if all_:
        return effects
    if not members:
        return [n for n, e in acting.items() if not _only_aliases(e)]
    found = dict.fromkeys(n for n, e in acting.items() if e.reads_state or not _only_aliases(e))
    for item in members:
        if isinstance(item, Node):
            found[item] = None
            found |= item.users
    return [n for n in effects if n in found]


def _only_aliases(e: Effects) -> bool:
    return not (e.random or e.writes or e.writes_state or e.impure or e.check or e.ambient or not e.known)


def _alias_classes(
    acting: Mapping[Node, Effects], effects: Mapping[Node, Effects], attributes: Mapping[Node, object]
) -> Classes:
    classes = Classes()
    for node, effect in acting.items():
        for other in effect.aliases:
            classes.join(node, other)
    for node, value in attributes.items():
        if not isinstance(value, torch.Tensor):
            classes.join(node, ("object", id(value)))
        for held in held_in(value):  # itself, if it is a tensor
            classes.join(node, storage_key(held))
    for node in effects:
        if node.op == "placeholder" and isinstance(value := value_of(node), torch.Tensor):
            classes.join(node, storage_key(value))
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
    if effect.check:  # keeps its place among prints, is free among other checks
        items.append(OUTSIDE)
    return items


def _reason(effect: Effects, storage_is_written: bool) -> str:
    if not effect.known:
        return "it is not known what it does (declare it with splitkit.extend.declare)"
    if effect.writes or effect.writes_state:
        return "it writes memory"
    if effect.random:
        return "it draws random numbers"
    if effect.ambient:
        return "it sets the state in which others run"
    if effect.impure or effect.check:
        return "it acts on the outside world"
    return "its memory is written by another node" if storage_is_written else ""
