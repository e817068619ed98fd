"""Order edges: which nodes must keep their order although no value passes between them.

Along graph order, reads and writes of one class of memory (`splitkit.graph.shared_memory`) give edges, as in the
dependence analysis of compilers::

    y = x.add_(1)      write                 read-after-write    z waits for y
    z = x * 2          read                  write-after-read    w waits for z
    w = x.mul_(3)      write                 write-after-write   w waits for y

Attributes that opaque code may bind anew (`splitkit.graph.opaque_bindings`) are one more class, `BOUND`.

A view that only takes a reference reads no memory. It may always run after a write that follows it in the graph, but
before a write that precedes it only where autograd allows that: not if the view yields several tensors, is made without
gradients, or is itself written later. In those cases torch raises that the base has been modified in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from splitkit.graph.opaque_bindings import Bindings
from splitkit.graph.ops import Effects, base_of_view
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.scope import Scope
from splitkit.graph.shared_memory import AMBIENT, acting_nodes, memory_classes, only_aliases

BOUND = "attributes that opaque code may bind anew"


@dataclass(frozen=True)
class Order:
    """The result of `order_edges`.

    Attributes:
        after: node -> the nodes that must run before it because of an effect.
        once: node -> the reason why it may not be copied.
        written: the attributes of the graph (``get_attr`` nodes) whose memory some node writes.
    """

    after: Mapping[Node, tuple[Node, ...]]
    once: Mapping[Node, str]
    written: frozenset[Node]


class _Edges(dict[Node, tuple[Node, ...]]):
    """Order edges; a node without an entry waits for no other."""

    def __missing__(self, node: Node) -> tuple[Node, ...]:
        return ()


def order_edges(
    effects: Mapping[Node, Effects],
    root: nn.Module,
    is_reference: Callable[[Node], bool],
    bindings: Bindings,
    references: Mapping[Node, Reference],
) -> Order:
    """Return the order edges of a graph and the nodes that may not be copied, in time linear in nodes and edges.

    Args:
        effects: node -> what it does, in graph order.
        root: the module that owns the graph's attributes.
        is_reference: whether a node only passes a reference on (getitem of a tuple).
        bindings: the attributes that opaque code may bind anew.
        references: the views that read nothing of their bases.
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


@dataclass(frozen=True)
class Reference:
    """A view that reads nothing of its base.

    Attributes:
        base: the node whose memory the view refers to.
        may_be_early: whether the view may run before a write to its base that precedes it in the graph.
    """

    base: Node
    may_be_early: bool


def references_of(
    effects: Mapping[Node, Effects], scope: Mapping[Node, Scope], root: nn.Module, known: Known
) -> Mapping[Node, Reference]:
    """Return the views of a graph that read nothing of their bases.

    Args:
        effects: node -> what it does, in graph order.
        scope: node -> its ambient state.
        root: the module that owns the graph's attributes.
        known: node -> whether it yields a tuple, as far as that has been answered.
    """
    if not any(e.writes for e in effects.values()):
        return {}
    found = {n: b for n, e in effects.items() if e.aliases and (b := base_of_view(n, e, root, known)) is not None}
    written = {w for e in effects.values() for w in e.writes}
    for node in reversed(list(effects)):
        if node in written:  # a write to a view writes its base
            written.update(effects[node].aliases)
    return {
        view: Reference(
            base, view not in written and scope[view].grad is not False and is_tuple(view, root, known) is False
        )
        for view, base in found.items()
    }
