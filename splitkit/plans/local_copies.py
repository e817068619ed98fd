"""Copy small values (sizes, numbers, devices, dtypes) into the parts that read them, if their inputs are there anyway.

If a ``torch.Size``, a float or a device crosses a border, whoever compiles, exports or sends the part has to handle
it; recomputing it costs nothing::

    part 0: size = x.size()  ──size──>  part 1: y.view(size)     ==>     part 1: size = x.size(); y.view(size)

Ints still cross, because symbolic shapes are built from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune

Places = dict[Node, tuple[PartKey, ...]]

_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, complex, torch.SymFloat, torch.SymBool)
_SMALL = (*_NUMBERS, str, slice, range, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)
_OF_A_TENSOR = ("shape", "device", "dtype", "layout")


def recompute_locally(flow: Dataflow, places: Places) -> None:
    """Copy each small value into the parts that read it, unless that would make another value cross.

    Args:
        flow: facts about the graph.
        places: the parts of every node except attributes; modified in place.
    """
    local = _Local(flow, places)
    for node in reversed(flow.nodes):  # readers first: a copy adds readers to its inputs
        if is_small(node) and not isinstance(value_of(node), _INTS):
            local.spread(node)
    places.update({n: places[producer] for n, producer in flow.followers.items()})


def recompute_sizes(flow: Dataflow, plan: Plan) -> Plan:
    """Copy every ``x.size()`` into the parts that read the whole size, and send them ``x``; its members still cross::

        part 0: x -> s = x.size()      ──s──>  part 1: y.view(s)
        part 0: x                      ──x──>  part 1: s = x.size(); y.view(s)

    This serves compilers of single parts, which accept only tensors and ints. A size that is read before its tensor is
    written or resized stays where it is, since it could differ later.
    """
    local = _Local(flow, {n: plan.places.get(n, (PARENT,)) for n in flow.nodes})
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for node in flow.nodes:
        # Ordered nodes are skipped: asked again after a write or resize, the size could differ.
        free = _is_size(node) and node not in flow.once and node not in local.timed
        if free and (readers := local.readers(node)):
            changes[node] = (*plan.places.get(node, (PARENT,)), *readers)
    return prune(flow, plan.place(changes)) if changes else plan


def _is_size(node: Node) -> bool:
    value = value_of(node)
    if value is None:
        return _asks_a_tensor(node) and node.target in ("size", getattr) and node.args[1:2] in ((), ("shape",))
    return isinstance(value, torch.Size)


class _Local:
    def __init__(self, flow: Dataflow, places: Places) -> None:
        self.flow, self.places = flow, places
        self._taken: dict[Node, set[PartKey]] = {}

    def spread(self, node: Node) -> None:
        """Copy ``node`` to the readers that can compute it; drop the original copy if nobody reads it any more."""
        copies = tuple(reader for reader in self.readers(node) if self.may_have(node, reader))
        if not copies:
            return
        left = {key for user in node.users for key in self.places.get(user, ())} - {*copies}
        gone = not left and not any(user in self.flow.followers for user in node.users)
        self.places[node] = copies if gone else (*self.places[node], *copies)

    def readers(self, node: Node) -> list[PartKey]:
        """Return the parts that read the value without computing it."""
        keys = self.places[node]
        found = dict.fromkeys(key for user in self._users(node) for key in self.places[user])
        return [key for key in found if key is not PARENT and key not in keys] if keys else []

    def may_have(self, node: Node, reader: PartKey) -> bool:
        """Whether ``reader`` can compute a copy from values that it computes or receives anyway."""
        needed = self._needs[node]
        return needed is not None and all(reader in self._parts_with(value) for value in needed)

    def _parts_with(self, value: Node) -> set[PartKey]:
        """Return the parts that compute or read a value."""
        if value not in self._taken:
            read = (key for user in self._users(value) for key in self.places[user])
            self._taken[value] = {*self.places[value], *read}
        return self._taken[value]

    def _users(self, node: Node) -> Iterator[Node]:
        return (user for user in node.users if user in self.places and user not in self.flow.followers)

    @cached_property
    def _needs(self) -> dict[Node, frozenset[Node] | None]:
        """Small value -> the large values that it is computed from in the end; ``None`` if it must not be copied."""
        needs: dict[Node, frozenset[Node] | None] = {}
        for node in self.flow.nodes:
            if is_small(node):
                free = node not in self.flow.once and node not in self.timed
                found = frozenset(n for read in reads(node) for n in self._sources(read, needs)) if free else None
                needs[node] = found if found is None or len(found) <= _MOST else None
        return needs

    def _sources(self, value: Node, needs: Mapping[Node, frozenset[Node] | None]) -> Iterable[Node]:
        if value.op in ("placeholder", "get_attr") or isinstance(value_of(value), _INTS):  # ints may cross
            return ()
        found = needs.get(value)
        return (value,) if found is None else found

    @cached_property
    def timed(self) -> set[Node]:
        """Nodes that are ordered with an effect. A copy would be ordered as well, which may close a cycle of parts."""
        after = self.flow.after
        return {*after, *(n for before in after.values() for n in before)}


# The most large values that one small value may be computed from; it bounds the sets of `_needs`, which grow along
# chains of sizes. Not tuned: with 3 and with 10,000 the tests pass too.
_MOST = 16


def is_small(node: Node) -> bool:
    """Whether a node yields a size, a number or a setting, which costs nothing to compute."""
    value = value_of(node)
    if value is None:
        return _asks_a_tensor(node)
    if isinstance(value, torch.Tensor):  # tested first because it is the most frequent case
        return False
    return isinstance(value, _SMALL) or (type(value) is tuple and all(isinstance(v, _NUMBERS) for v in value))


def _asks_a_tensor(node: Node) -> bool:
    """Whether a node is ``x.size()``, ``x.shape``, ``x.device`` ...; for graphs without ``meta["val"]``."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and len(node.args) > 1 and node.args[1] in _OF_A_TENSOR
