"""Order that data edges do not show: storages that are written, random numbers, prints.

Values that may share memory form one *class* (union-find over views and aliases; two attribute names of one tensor
are one class). Along graph order, reads and writes of a class give *order edges*::

    y = x.add_(1)      write                 read-after-write    z waits for y
    z = x * 2          read                  write-after-read    w waits for z
    w = x.mul_(3)      write                 write-after-write   w waits for y

Random generators and the outside world (prints) are classes too, so that independent dropouts keep their order.
So is ambient state that no `splitkit.scope.Scope` describes (a default dtype, a choice of attention kernels): what sets
it writes, and every other node reads, so nothing moves across.
Obtaining a reference (get_attr, placeholder, getitem of a tuple) reads nothing: only its users do.

Assumed: two inputs of the graph do not share memory, unless their ``meta["val"]`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from splitkit.errors import GraphError
from splitkit.ops import PURE, Effects
from splitkit.scope import is_state_op
from splitkit.symbols import value_of

RANDOM = "random numbers"
OUTSIDE = "the outside world"
AMBIENT = "ambient state"


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


class _Classes:
    """Union-find with path halving over nodes, storages and tokens."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        parent = self.parent
        if item not in parent:
            parent[item] = item
            return item
        while parent[item] is not item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: Hashable, b: Hashable) -> None:
        self.parent[self.find(a)] = self.find(b)


def attribute(root: torch.nn.Module, target: str) -> object:
    """The object behind a dotted attribute name.

    Raises:
        GraphError: SK104 when there is none.
    """
    value: object = root
    for atom in target.split("."):
        if not hasattr(value, atom):
            raise GraphError("SK104", f"the graph reads {target!r}, but its module has no such attribute", "", [target])
        value = getattr(value, atom)
    return value


_REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that share memory; the tensor's identity where it has no storage (sparse, some subclasses)."""
    try:
        storage = tensor.untyped_storage()
        if type(tensor) in _REAL and storage.device.type != "meta" and storage.nbytes():
            return storage.device, storage.data_ptr()  # one memory may have several storages: torch.from_numpy
        return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return id(tensor)


class _Edges(dict[Node, tuple[Node, ...]]):
    """Order edges; a node without an entry waits for nobody."""

    def __missing__(self, node: Node) -> tuple[Node, ...]:
        return ()


def order_of(effects: Mapping[Node, Effects], root: torch.nn.Module, is_reference: Callable[[Node], bool]) -> Order:
    """Order edges and copy bans of a graph, in time linear in nodes and edges.

    Args:
        effects: what each node of the graph does, in graph order.
        root: the module that owns the graph's attributes.
        is_reference: nodes that only pass a reference on (getitem of a tuple).
    """
    acting = {n: e for n, e in effects.items() if e is not PURE}
    written, members = _written_classes(acting, effects, root)
    after, once = _Edges(), dict[Node, str]()
    last_write: dict[Hashable, Node] = {}
    readers: dict[Hashable, dict[Node, None]] = {}
    for node in _concerned(acting, effects, members, AMBIENT in written):
        if node.op in ("placeholder", "get_attr") or is_reference(node):
            continue
        effect = effects[node]
        writes = {members.get(w, w): None for w in _written(effect)}
        touched = writes | {c: None for item in _touched(node, effect) if (c := members.get(item, item)) in written}
        before: dict[Node, None] = {}
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
        if node.op != "output" and (reason := _reason(effect, node in members)):
            once[node] = reason
    attributes = frozenset(n for n in members if isinstance(n, Node) and n.op == "get_attr")
    return Order(after, once, attributes)


def _written_classes(
    acting: Mapping[Node, Effects], effects: Mapping[Node, Effects], root: torch.nn.Module
) -> tuple[set[Hashable], dict[Hashable, Hashable]]:
    """The classes that some node writes; and their members (nodes, storages), each with its class."""
    written = {w for e in acting.values() for w in _written(e)}
    if not any(e.writes or e.writes_state for e in acting.values()):
        return written, {}
    classes = _alias_classes(acting, effects, root)
    found = {classes.find(w) for w in written}
    members = {item: c for item in list(classes.parent) if (c := classes.find(item)) in found}
    return found, members


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


def _alias_classes(acting: Mapping[Node, Effects], effects: Mapping[Node, Effects], root: torch.nn.Module) -> _Classes:
    classes = _Classes()
    for node, effect in acting.items():
        for other in effect.aliases:
            classes.join(node, other)
    for node in effects:
        if node.op == "get_attr":
            value = attribute(root, str(node.target))
            classes.join(node, storage_key(value) if isinstance(value, torch.Tensor) else ("object", id(value)))
        elif node.op == "placeholder":
            value = value_of(node)
            if isinstance(value, torch.Tensor):
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


def _touched(node: Node, effect: Effects) -> Iterable[Hashable]:
    if node.op != "output":
        yield node
    for read in node.all_input_nodes:
        if not is_state_op(read):
            yield read
    yield AMBIENT
    yield from map(storage_key, effect.reads_state)
    if effect.check:  # keeps its place among prints, is free among other checks
        yield OUTSIDE


def _reason(effect: Effects, storage_is_written: bool) -> str:
    if not effect.known:
        return "it is not known what it does (declare it with splitkit.ops.declare)"
    if effect.writes or effect.writes_state:
        return "it writes memory"
    if effect.random:
        return "it draws random numbers"
    if effect.ambient:
        return "it sets the state in which others run"
    if effect.impure or effect.check:
        return "it acts on the outside world"
    return "its memory is written by another node" if storage_is_written else ""
