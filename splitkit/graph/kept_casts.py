"""Find weights that a graph writes while autocast keeps a cast of them.

Autocast casts a weight at its first use and keeps the cast until the outermost region is left, also if the weight is
written meanwhile::

    enter autocast
    a = linear(x, w)     casts w, and keeps the cast
    w.mul_(3)
    b = linear(x, w)     computes with the kept cast: with the old w
    exit autocast

A part that opens the region anew would cast the new ``w``. So ``a`` and ``b`` must be in one part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import OpOverloadPacket
from splitkit.graph.ops import Effects
from splitkit.graph.ops.functions import torch_name
from splitkit.graph.ops.schemas import overloads_of
from splitkit.graph.scope import Scope, is_state_op, states_before
from splitkit.graph.shared_memory import GIVEN, REACHED, Memory, memory_classes
from splitkit.graph.storages import VIEWS, Lookup, held_in, storage_key, value_of


@dataclass
class KeptCast:
    """A weight that is written between two uses under autocast.

    Attributes:
        reads: the nodes that may cast the weight, in graph order.
        write: the first node that may write it after the first of them.
        one_region: whether all of them are inside one outermost region, which a part can keep open.
    """

    reads: list[Node]
    write: Node
    one_region: bool


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a graph opens an autocast."""
    return bool(graph.find_nodes(op="call_function", target=_torch.ENTER_AUTOCAST))


def kept_casts(
    effects: Mapping[Node, Effects], graph: fx.Graph, root: nn.Module, *, without_cache: bool = False
) -> list[KeptCast]:
    """Return the weights that a graph writes while autocast may keep a cast of them, in graph order.

    Args:
        effects: node -> what it does, in graph order.
        graph: the graph.
        root: the module that owns the graph's attributes.
        without_cache: also look at regions that keep no casts (``cache_enabled=False``).
    """
    if not has_autocast(graph) or not any(e.writes or e.writes_state or not e.known for e in effects.values()):
        return []
    memory = memory_classes(effects, root)
    given: list[Hashable] = [n for n in effects if n.op in GIVEN]
    given += (storage_key(t) for e in effects.values() for t in e.reads_state)
    if not any(memory.members.get(item) in memory.written | memory.reached for item in given):
        return []
    find = _Casts(effects, root, memory, without_cache)
    before = frozenset[Node]()
    for node, scope in states_before(graph).items():
        now = frozenset(scope.autocast)
        if before.isdisjoint(now):  # the outermost region has been left
            find.leave()
        before = now
        if now and node in effects:
            find.visit(node, effects[node], scope)
    find.leave()
    return find.found


@dataclass
class _Uses:
    reads: list[Node] = field(default_factory=list)
    outer: set[tuple[Node, ...]] = field(default_factory=set)
    write: Node | None = None
    is_read_again: bool = False


class _Casts:
    def __init__(self, effects: Mapping[Node, Effects], root: nn.Module, memory: Memory, without_cache: bool) -> None:
        self.effects = effects
        self.memory, self.find, self.without_cache = memory, Lookup(root), without_cache
        self.uses: dict[Hashable, _Uses] = {}
        self.found: list[KeptCast] = []

    def leave(self) -> None:
        """Leave the outermost region: autocast drops its casts."""
        for uses in self.uses.values():
            if uses.is_read_again and uses.write is not None:
                self.found.append(KeptCast(uses.reads, uses.write, len(uses.outer) == 1))
        self.uses = {}

    def visit(self, node: Node, effect: Effects, scope: Scope) -> None:
        writes, _ = self.memory.use(node, effect)
        for c, uses in self.uses.items():
            if uses.write is None and (c in writes or (REACHED in writes and c in self.memory.reached)):
                uses.write = node
        if not _casts(scope, self.without_cache) or not _may_cast(node, effect):
            return
        for tensor in self._weights(node, effect):
            c = self.memory.members.get(tensor, tensor)
            if c in self.memory.written or c in self.memory.reached:
                uses = self.uses.setdefault(c, _Uses())
                uses.is_read_again |= uses.write is not None
                uses.reads.append(node)
                uses.outer.add(_outer(scope))

    def _weights(self, node: Node, effect: Effects) -> Iterator[Hashable]:
        """Yield the storages of the tensors of which autocast may keep a cast: leaves that may require grad."""
        yield from {storage_key(t): None for t in effect.reads_state if _may_be_kept(t)}
        for read in node.all_input_nodes:
            for source in self._sources(read) if read not in effect.aliases or not effect.known else ():
                value = self.find(str(source.target)) if source.op == "get_attr" else value_of(source)
                if any(map(_may_be_kept, held_in(value))):
                    yield source

    def _sources(self, node: Node) -> Iterator[Node]:
        """Yield the attributes and inputs that a node may return as they are: ``w.mul_(2)`` and ``w.float()`` do."""
        left, seen = [node], {node}
        while left:
            source = left.pop()
            if source.op in GIVEN:
                yield source
            elif source in self.effects and _op_name(source) not in VIEWS:
                others = [a for a in self.effects[source].aliases if a not in seen]
                left += others
                seen.update(others)


def _may_be_kept(tensor: torch.Tensor) -> bool:
    leaf = isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
    return leaf and tensor.is_floating_point()


def _may_cast(node: Node, effect: Effects) -> bool:
    """Whether an op may be one that autocast runs in lower precision: not if it is elementwise or writes in place."""
    if node.op in ("placeholder", "get_attr", "output") or is_state_op(node) or (effect.known and effect.writes):
        return False
    if node.op == "call_module":
        return True
    packet: Any = getattr(torch.ops.aten, _op_name(node), None)
    overloads = overloads_of(packet) if isinstance(packet, OpOverloadPacket) else ()
    return not any(torch.Tag.pointwise in op.tags for op in overloads)


def _op_name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else torch_name(node.target) or ""


def _casts(scope: Scope, without_cache: bool) -> bool:
    """Whether the innermost autocast of a scope is on, and keeps casts or need not."""
    inner = scope.autocast[-1]
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    given = {**dict(zip(names, inner.args, strict=False)), **inner.kwargs}
    keeps = without_cache or given.get("cache_enabled") is not False
    return keeps and given.get("enabled", True) is not False


def _outer(scope: Scope) -> tuple[Node, ...]:
    """Return the regions up to the outermost autocast."""
    return scope.regions[: scope.regions.index(scope.autocast[0]) + 1]
