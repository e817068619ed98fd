"""Sizes, numbers and opaque values are recomputed by the part that reads them, where it has what they are made of.

A ``torch.Size``, a float or a device that crosses is a burden to whoever compiles, exports or sends a part, and costs
nothing to compute again::

    part 0: size = x.size()  ──size──>  part 1: y.view(size)     ==>     part 1: size = x.size(); y.view(size)

Ints go on crossing: they are what symbolic shapes are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune

Places = dict[Node, tuple[PartKey, ...]]

_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, complex, torch.SymFloat, torch.SymBool)
_SMALL = (*_NUMBERS, str, slice, range, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)
_OF_A_TENSOR = ("shape", "device", "dtype", "layout")


def recompute_locally(flow: Dataflow, places: Places) -> None:
    """Add a copy of each small value to the parts that read it, where nothing new has to cross for it.

    Args:
        flow: facts about the graph.
        places: a place for every node but attributes; changed in place.
    """
    local = _Local(flow, places)
    for node in reversed(flow.nodes):  # so that what a copy reads is looked at after it
        if is_small(node) and not isinstance(value_of(node), _INTS):
            local.spread(node)
    places.update({n: places[producer] for n, producer in flow.followers.items()})


def ask_sizes_again(flow: Dataflow, plan: Plan) -> Plan:
    """Copy every ``x.size()`` into the parts that read it whole, and send them ``x``; members, which are ints, cross::

        part 0: x -> s = x.size()      ──s──>  part 1: y.view(s)
        part 0: x                      ──x──>  part 1: s = x.size(); y.view(s)

    For compilers of single parts, which take tensors and ints only. A size that is asked before its tensor is written
    or resized stays where it is: asked again later, it could be another one.
    """
    local = _Local(flow, {n: plan.places.get(n, (HOST,)) for n in flow.nodes})
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for node in flow.nodes:
        free = _is_size(node) and node not in flow.once and node not in local.timed
        if free and (readers := local.readers(node)):
            changes[node] = (*plan.places.get(node, (HOST,)), *readers)
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
        """Add copies to the readers that can make one; where that leaves the home without a reader, it goes."""
        copies = tuple(reader for reader in self.readers(node) if self.may_have(node, reader))
        if not copies:
            return
        left = {key for user in node.users for key in self.places.get(user, ())} - {*copies}
        gone = not left and not any(user in self.flow.followers for user in node.users)
        self.places[node] = copies if gone else (*self.places[node], *copies)

    def readers(self, node: Node) -> list[PartKey]:
        """The parts that would take the value from elsewhere."""
        keys = self.places[node]
        found = dict.fromkeys(key for user in self._users(node) for key in self.places[user])
        return [key for key in found if key is not HOST and key not in keys] if keys else []

    def may_have(self, node: Node, reader: PartKey) -> bool:
        """Whether ``reader`` can compute a copy from what it has or is given anyway."""
        needed = self._needs[node]
        return needed is not None and all(reader in self._parts_with(value) for value in needed)

    def _parts_with(self, value: Node) -> set[PartKey]:
        """The parts that compute or read a value."""
        if value not in self._taken:
            read = (key for user in self._users(value) for key in self.places[user])
            self._taken[value] = {*self.places[value], *read}
        return self._taken[value]

    def _users(self, node: Node) -> Iterator[Node]:
        return (user for user in node.users if user in self.places and user not in self.flow.followers)

    @cached_property
    def _needs(self) -> dict[Node, frozenset[Node] | None]:
        """Small value -> what must be there to compute it, other small values followed back; ``None``: it cannot be."""
        needs: dict[Node, frozenset[Node] | None] = {}
        for node in self.flow.nodes:
            if is_small(node):
                free = node not in self.flow.once and node not in self.timed
                found = frozenset(n for read in reads(node) for n in self._sources(read, needs)) if free else None
                needs[node] = found if found is None or len(found) <= _MOST else None
        return needs

    def _sources(self, value: Node, needs: Mapping[Node, frozenset[Node] | None]) -> Iterable[Node]:
        if value.op in ("placeholder", "get_attr") or isinstance(value_of(value), _INTS):  # these may cross
            return ()
        found = needs.get(value)
        return (value,) if found is None else found

    @cached_property
    def timed(self) -> set[Node]:
        """Nodes that must run before or after an effect: a copy must as well, which may close a cycle of parts."""
        after = self.flow.after
        return {*after, *(n for before in after.values() for n in before)}


_MOST = 16  # values that a small value is followed back to


def is_small(node: Node) -> bool:
    """Does it yield a size, a number or a setting, which costs nothing to compute?"""
    value = value_of(node)
    if value is None:
        return _asks_a_tensor(node)
    if isinstance(value, torch.Tensor):  # first, as most are
        return False
    return isinstance(value, _SMALL) or (type(value) is tuple and all(isinstance(v, _NUMBERS) for v in value))


def _asks_a_tensor(node: Node) -> bool:
    """Is it ``x.size()``, ``x.shape``, ``x.device`` ... of a graph that has no values?"""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and len(node.args) > 1 and node.args[1] in _OF_A_TENSOR
