"""In which order the halves of a joint graph compute their nodes, so that little memory is alive at once."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from torch.fx import Node

from splitkit.plans.record import Plan
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, homes, nodes_in


def crossing(flow: JointFlow, plan: Plan) -> list[Node]:
    """What backward takes from forward, in graph order: all that it reads and does not compute, and the sizes of it."""
    read = dict.fromkeys(r for n in plan.members(BACKWARD) for r in n.all_input_nodes if n.op != "placeholder")
    read |= dict.fromkeys(nodes_in(flow.gradients))
    taken = {n for n in read if BACKWARD not in plan[n]}
    for value in (*taken, *flow.backward_inputs):
        taken |= {s for s in flow.symbols(value) if BACKWARD not in plan[s]}
    return sorted(taken, key=flow.index.__getitem__)


class EmissionOrder:
    """The order in which each half of a joint graph computes the nodes that it has.

    What waits for gradients follows the order of the joint graph, which is that of autograd. All else that backward
    computes, above all what it computes again, goes as late as possible, right before the first that reads it; but
    what does not take more memory than it frees goes at once.
    Late is not always low: a small result of a large value that nobody else reads is better than the value::

        x       8 MiB, saved                 late    g1, g2, m, g3    x is there up to m
        m       2 MiB, computed from x       here    m, g1, g2, g3    m takes its place
        g3      of g2 and m

    Forward keeps the order of eager execution. What a plan has moved there from backward stands behind its inputs, if
    that frees memory, instead of at forward's end, where it was traced.

    The order of a graph with the lowest peak is NP-hard to find (Sethi 1975, "Complete register allocation problems"),
    so these are rules, and none of them always helps. Of these orders and that of the graph the one with the lowest
    peak is taken, so the graph's is never better. Where nothing is computed again, backward keeps the graph's. Data and
    effects (``flow.after``) are respected, and members of a tuple follow it at once. Linear in nodes and edges, times a
    logarithm. One object serves many plans.
    """

    def __init__(self, flow: JointFlow) -> None:
        self.flow = flow
        units: dict[Node, list[Node]] = {}
        for node in flow.index:
            if node.op not in ("placeholder", "output"):
                units.setdefault(flow.producer(node), []).append(node)
        self.units = list(units.values())
        """A node, or the maker of a tuple and what unpacks it. All below is by number of unit or of storage."""
        self.number = {node: i for i, nodes in enumerate(self.units) for node in nodes}
        self.nbytes = flow.storages.nbytes
        self.lies = {node: flow.storages.under(node) for node in self.number}
        self.needs: list[tuple[int, ...]] = []
        self.reads: list[tuple[Node, ...]] = []
        self.sources: list[tuple[int, ...]] = []
        """The units that a unit reads."""
        self.made: list[tuple[int, ...]] = []
        self.held: list[tuple[int, ...]] = []
        """The storages that a unit makes or reads."""
        for unit, nodes in enumerate(self.units):
            reads = [r for r in dict.fromkeys(r for n in nodes for r in n.all_input_nodes) if r in self.number]
            earlier = (a for n in nodes for a in flow.after[n] if a in self.number)
            before = dict.fromkeys(self.number[b] for b in (*reads, *earlier))
            made = dict.fromkeys(s for n in nodes for s in self.lies[n])
            self.needs.append(tuple(b for b in before if b != unit))
            self.reads.append(tuple(r for r in reads if self.number[r] != unit))
            self.sources.append(tuple(dict.fromkeys(self.number[r] for r in self.reads[-1])))
            self.made.append(tuple(made))
            self.held.append(tuple(made | dict.fromkeys(s for r in reads for s in self.lies[r])))
        home = homes(flow)
        self._eager = [home.places.get(nodes[0]) for nodes in self.units]
        self._gradients = tuple(flow.gradients)
        self.bound = self._bound()
        """What stands in backward as autograd runs it: it waits for a gradient, or may run only once."""

    def backward(self, members: Iterable[Node]) -> list[Node]:
        """Order what backward computes: its own nodes, those of forward that it computes again, attributes.

        Args:
            members: all of them, members of tuples as well; inputs are passed over.
        """
        return self.nodes(self.backward_units(self._numbers(members)))

    def backward_units(self, units: Collection[int]) -> list[int]:
        """`backward`, of units; ``units`` by rising number."""
        if not any(self._eager[u] == (FORWARD,) for u in units):
            return list(units)
        half = _Half(self, units, self._gradients)
        free = [u for u in units if u not in self.bound]
        order = half.ordered([*(u for u in units if u in self.bound), *free], set(free))
        return min(order, half.units, key=half.peak)

    def forward(self, members: Iterable[Node], saved: Iterable[Node]) -> list[Node]:
        """Order what forward computes.

        Args:
            members: all of it, members of tuples as well; inputs are passed over.
            saved: what backward takes of it.
        """
        return self.nodes(self.forward_units(self._numbers(members), list(saved)))

    def forward_units(self, units: Collection[int], saved: Iterable[object]) -> list[int]:
        """`forward`, of units; ``units`` by rising number."""
        moved = {u for u in units if self._eager[u] == (BACKWARD,)}
        if not moved:
            return list(units)
        half = _Half(self, units, saved)
        orders = [half.ordered(half.units, moved, at_once=at_once) for at_once in (False, True)]
        return min(*orders, half.units, key=half.peak)

    def nodes(self, units: Iterable[int]) -> list[Node]:
        """The nodes of units."""
        return [node for unit in units for node in self.units[unit]]

    def _numbers(self, members: Iterable[Node]) -> list[int]:
        return sorted({self.number[n] for n in members if n in self.number})

    def _bound(self) -> set[int]:
        late = set(self.flow.backward_inputs)
        found: set[int] = set()
        for unit, nodes in enumerate(self.units):
            own = self._eager[unit] == (BACKWARD,) and any(n in self.flow.once for n in nodes)
            waits = any(r in late for n in nodes for r in n.all_input_nodes) or not found.isdisjoint(self.needs[unit])
            if own or waits:
                found.add(unit)
        return found

    def storages_of(self, values: Iterable[object]) -> set[int]:
        """The storages of some values, but those of inputs and attributes."""
        return {s for value in values if isinstance(value, Node) for s in self.lies.get(value, ())}


class _Half:
    """What one half computes.

    Attributes:
        units: numbers of its units, in graph order.
        inside: the same, to look up.
        before: storages that are there when it begins.
        kept: storages that are there after its end.
    """

    def __init__(self, order: EmissionOrder, units: Collection[int], returned: Iterable[object]) -> None:
        self.order = order
        self.units, self.inside = list(units), frozenset(units)
        returned = [n for n in returned if isinstance(n, Node)]
        given = {r for n in returned if n in order.number and order.number[n] not in self.inside for r in order.lies[n]}
        for unit in self.units:
            if not self.inside.issuperset(order.sources[unit]):
                given |= order.storages_of(r for r in order.reads[unit] if order.number[r] not in self.inside)
        self.before = given
        self.kept = order.storages_of([*order.flow.outputs, *returned])

    def peak(self, order: Iterable[int]) -> int:
        """The most bytes alive at once, but for inputs, if units are computed in this order."""
        made, held, nbytes, kept = self.order.made, self.order.held, self.order.nbytes, self.kept
        left = [0] * len(nbytes)
        for unit in self.units:
            for storage in held[unit]:
                left[storage] += 1
        there = set(self.before)
        live = peak = sum(nbytes[s] for s in there)
        for unit in order:
            for storage in made[unit]:
                if storage not in there:
                    there.add(storage)
                    live += nbytes[storage]
            if live > peak:
                peak = live
            for storage in held[unit]:
                left[storage] -= 1
                if not left[storage] and storage not in kept:
                    live -= nbytes[storage]
        return peak

    def ordered(self, late: Iterable[int], movable: Collection[int], *, at_once: bool = False) -> list[int]:
        """The units in the order of ``late``, but what one needs goes right before it, and some of ``movable`` at once.

        Args:
            late: all units.
            movable: units that go before their turn, if they take no more memory than they free.
            at_once: they go before their turn in any case.
        """
        return _Ordering(self, movable, at_once).run(late)


class _Ordering:
    """One run of `_Half.ordered`."""

    def __init__(self, half: _Half, movable: Collection[int], at_once: bool) -> None:
        order = half.order
        self.half, self.movable, self.at_once = half, movable, at_once
        self.needs, self.made, self.held, self.nbytes = order.needs, order.made, order.held, order.nbytes
        self.waits: dict[int, int] = {}
        self.users: dict[int, list[int]] = {unit: [] for unit in half.units}
        self.left = [0] * len(order.nbytes)
        """For each storage, how many units still hold it; ``last`` is the sum of their numbers.

        So when one is left, the sum is its number, and no set of holders has to be kept for each storage.
        """
        self.last = [0] * len(order.nbytes)
        for unit in half.units:
            waits = [need for need in self.needs[unit] if need in half.inside]
            self.waits[unit] = len(waits)
            for need in waits:
                self.users[need].append(unit)
            for storage in self.held[unit]:
                self.left[storage] += 1
                self.last[storage] += unit
        self.there = set(half.before)
        self.done: dict[int, None] = {}
        self.ready: list[int] = []  # movable units that have become ready, or the last to hold a storage

    def run(self, late: Iterable[int]) -> list[int]:
        """See `_Half.ordered`."""
        for unit in self.half.units:
            self.consider(unit)
        self.drain()
        for unit in late:
            for needed in self.first(unit):
                self.compute(needed)
                self.drain()
        return list(self.done)

    def first(self, unit: int) -> Iterator[int]:
        """What ``unit`` still needs, each after what it needs itself, and ``unit``."""
        if not self.waits[unit]:
            if unit not in self.done:
                yield unit
            return
        # A stack of its own: chains of what is computed again are longer than Python's recursion goes. Units are given
        # out one by one, and the caller may compute others in between; so what is done is asked each time.
        stack = [(unit, iter(self.needs[unit]))]
        while stack:
            current, needs = stack[-1]
            need = next((n for n in needs if n in self.half.inside and n not in self.done), None)
            if need is not None:
                stack.append((need, iter(self.needs[need])))
                continue
            stack.pop()
            if current not in self.done:
                yield current

    def compute(self, unit: int) -> None:
        """Append a unit, and look at those that it makes ready or leaves alone with a storage."""
        self.done[unit] = None
        self.there.update(self.made[unit])
        for storage in self.held[unit]:
            self.left[storage] -= 1
            self.last[storage] -= unit
            if self.left[storage] == 1:
                self.consider(self.last[storage])
        for user in self.users[unit]:
            self.waits[user] -= 1
            self.consider(user)

    def consider(self, unit: int) -> None:
        """Note a unit that may be computed now."""
        if not self.waits[unit] and unit in self.movable:
            heapq.heappush(self.ready, unit)

    def drain(self) -> None:
        """Compute what may go at once."""
        while self.ready:
            unit = heapq.heappop(self.ready)
            # What is not taken now comes back when it is the last to hold a storage, for that is when it frees more
            # than before. So each unit is looked at about as often as it holds storages.
            if unit not in self.done and (self.at_once or self.growth(unit) <= 0):
                self.compute(unit)

    def growth(self, unit: int) -> int:
        """Bytes that a unit takes, less those that it is the last to hold."""
        taken = sum(self.nbytes[s] for s in self.made[unit] if s not in self.there)
        return taken - sum(self.nbytes[s] for s in self.held[unit] if self.left[s] == 1 and s not in self.half.kept)
