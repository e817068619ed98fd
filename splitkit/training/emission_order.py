"""Order the nodes of forward and of backward so that little memory is alive at once.

The problem is that of registers for an expression DAG, NP-hard in general (Sethi 1975). What makes it tractable here is
that autograd's own order of gradients is good and is kept; only what a plan recomputes has to be put somewhere. It goes
right before its first reader, and earlier where it frees at least what it takes (`EmissionOrder` has an example).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from torch.fx import Node

from splitkit.plans.record import Plan
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, output_nodes, save_all_plan


def saved_for_backward(flow: JointFlow, plan: Plan) -> list[Node]:
    """Return what backward takes from forward, in graph order: what it reads but does not compute, and its sizes."""
    read = dict.fromkeys(r for n in plan.members(BACKWARD) for r in n.all_input_nodes if n.op != "placeholder")
    read |= dict.fromkeys(output_nodes(flow.gradients))
    taken = {n for n in read if BACKWARD not in plan[n]}
    for value in (*taken, *flow.backward_inputs):
        taken |= {s for s in flow.symbols(value) if BACKWARD not in plan[s]}
    return sorted(taken, key=flow.index.__getitem__)


class EmissionOrder:
    """The order in which each half of a joint graph computes its nodes. One object serves many plans.

    Nodes that depend on gradients keep the order of the joint graph, which is autograd's. Everything else in backward,
    above all what it recomputes, is computed as late as possible, right before its first reader; but an op that frees
    at least as much memory as it takes is computed at once. Late is not always best: a small result can replace a large
    value that nobody else reads::

        x       8 MiB, saved                 late    g1, g2, m, g3    x is alive until m
        m       2 MiB, computed from x       here    m, g1, g2, g3    m takes its place
        g3      from g2 and m

    Forward keeps the order of eager execution. An op that a plan moved from backward to forward is computed right after
    its inputs if that frees memory, instead of at forward's end, where it was traced.

    To find the order with the lowest peak is NP-hard (Sethi 1975, "Complete register allocation problems"), so these
    are heuristics, and none of them always helps. The order with the lowest peak is taken, the graph's own among
    them. If nothing is recomputed, backward keeps the graph's order. All orders respect data and
    effects (``flow.after``), and members of a tuple follow it at once. An *op* here is a node with its getitems, known
    by number; storages are known by number too. The time is O(E log N) in nodes and edges.
    """

    def __init__(self, flow: JointFlow) -> None:
        self.flow = flow
        ops: dict[Node, list[Node]] = {}
        for node in flow.index:
            if node.op not in ("placeholder", "output"):
                ops.setdefault(flow.producer(node), []).append(node)
        self.ops = list(ops.values())
        """The nodes of each op: one node, or the maker of a tuple and its getitems."""
        self.number = {node: i for i, nodes in enumerate(self.ops) for node in nodes}
        self.nbytes = flow.storages.nbytes
        self.lies = {node: flow.storages.under(node) for node in self.number}
        self.needs: list[tuple[int, ...]] = []
        self.reads: list[tuple[Node, ...]] = []
        self.sources: list[tuple[int, ...]] = []
        """The ops that an op reads."""
        self.made: list[tuple[int, ...]] = []
        self.held: list[tuple[int, ...]] = []
        """The storages that an op makes or reads."""
        for op, nodes in enumerate(self.ops):
            reads = [r for r in dict.fromkeys(r for n in nodes for r in n.all_input_nodes) if r in self.number]
            earlier = (a for n in nodes for a in flow.after[n] if a in self.number)
            before = dict.fromkeys(self.number[b] for b in (*reads, *earlier))
            made = dict.fromkeys(s for n in nodes for s in self.lies[n])
            self.needs.append(tuple(b for b in before if b != op))
            self.reads.append(tuple(r for r in reads if self.number[r] != op))
            self.sources.append(tuple(dict.fromkeys(self.number[r] for r in self.reads[-1])))
            self.made.append(tuple(made))
            self.held.append(tuple(made | dict.fromkeys(s for r in reads for s in self.lies[r])))
        home = save_all_plan(flow)
        self._eager = [home.places.get(nodes[0]) for nodes in self.ops]
        self._gradients = tuple(flow.gradients)
        self.bound = self._bound()
        """The ops of backward that keep autograd's order: they depend on a gradient, or may run only once."""

    def backward(self, members: Iterable[Node]) -> list[Node]:
        """Return the order of backward.

        Args:
            members: all nodes that backward computes, with members of tuples and attributes; inputs are ignored.
        """
        return self.nodes(self.backward_ops(self._numbers(members)))

    def backward_ops(self, ops: Collection[int]) -> list[int]:
        """Return the order of backward's ``ops``, given in ascending order."""
        if not any(self._eager[u] == (FORWARD,) for u in ops):
            return list(ops)
        half = _Half(self, ops, self._gradients)
        free = [u for u in ops if u not in self.bound]
        order = _Ordering(half, set(free)).run([*(u for u in ops if u in self.bound), *free])
        return min(order, half.ops, key=half.peak)

    def forward(self, members: Iterable[Node], saved: Iterable[Node]) -> list[Node]:
        """Return the order of forward.

        Args:
            members: all nodes that forward computes, with members of tuples; inputs are ignored.
            saved: the values that backward takes.
        """
        return self.nodes(self.forward_ops(self._numbers(members), list(saved)))

    def forward_ops(self, ops: Collection[int], saved: Iterable[object]) -> list[int]:
        """Return the order of forward's ``ops``, given in ascending order."""
        moved = {u for u in ops if self._eager[u] == (BACKWARD,)}
        if not moved:
            return list(ops)
        half = _Half(self, ops, saved)
        orders = [_Ordering(half, moved, at_once).run(half.ops) for at_once in (False, True)]
        return min(*orders, half.ops, key=half.peak)

    def nodes(self, ops: Iterable[int]) -> list[Node]:
        """Return the nodes of some ops, in their order."""
        return [node for op in ops for node in self.ops[op]]

    def _numbers(self, members: Iterable[Node]) -> list[int]:
        return sorted({self.number[n] for n in members if n in self.number})

    def _bound(self) -> set[int]:
        late = set(self.flow.backward_inputs)
        found: set[int] = set()
        for op, nodes in enumerate(self.ops):
            own = self._eager[op] == (BACKWARD,) and any(n in self.flow.once for n in nodes)
            waits = any(r in late for n in nodes for r in n.all_input_nodes) or not found.isdisjoint(self.needs[op])
            if own or waits:
                found.add(op)
        return found

    def storages_of(self, values: Iterable[object]) -> set[int]:
        """Return the storages of some values, without those of inputs and attributes."""
        return {s for value in values if isinstance(value, Node) for s in self.lies.get(value, ())}


class _Half:
    """The ops of one half.

    Attributes:
        ops: its ops, in graph order.
        inside: its ops as a set.
        before: storages alive when it begins.
        kept: storages alive after its end.
    """

    def __init__(self, order: EmissionOrder, ops: Collection[int], returned: Iterable[object]) -> None:
        self.order = order
        self.ops, self.inside = list(ops), frozenset(ops)
        returned = [n for n in returned if isinstance(n, Node)]
        given = {r for n in returned if n in order.number and order.number[n] not in self.inside for r in order.lies[n]}
        for op in self.ops:
            if not self.inside.issuperset(order.sources[op]):
                given |= order.storages_of(r for r in order.reads[op] if order.number[r] not in self.inside)
        self.before = given
        self.kept = order.storages_of([*order.flow.outputs, *returned])

    def peak(self, order: Iterable[int]) -> int:
        """Return the peak of this order of the ops, without inputs."""
        made, held, nbytes, kept = self.order.made, self.order.held, self.order.nbytes, self.kept
        left = [0] * len(nbytes)
        for op in self.ops:
            for storage in held[op]:
                left[storage] += 1
        there = set(self.before)
        live = peak = sum(nbytes[s] for s in there)
        for op in order:
            for storage in made[op]:
                if storage not in there:
                    there.add(storage)
                    live += nbytes[storage]
            if live > peak:
                peak = live
            for storage in held[op]:
                left[storage] -= 1
                if not left[storage] and storage not in kept:
                    live -= nbytes[storage]
        return peak


class _Ordering:
    """Orders the ops of a half: what each needs comes right before it, and ``movable`` ops early.

    Attributes:
        half: the half.
        movable: ops that are computed as soon as they are ready, if they take no more memory than they free.
        at_once: compute them as soon as they are ready in any case.
    """

    def __init__(self, half: _Half, movable: Collection[int], at_once: bool = False) -> None:
        order = half.order
        self.half, self.movable, self.at_once = half, movable, at_once
        self.needs, self.made, self.held, self.nbytes = order.needs, order.made, order.held, order.nbytes
        self.waits: dict[int, int] = {}
        self.users: dict[int, list[int]] = {op: [] for op in half.ops}
        self.left = [0] * len(order.nbytes)
        """For each storage, how many ops still hold it; ``last`` is the sum of their numbers.

        When one holder is left, the sum is its number, so no set of holders has to be kept for each storage.
        """
        self.last = [0] * len(order.nbytes)
        for op in half.ops:
            waits = [need for need in self.needs[op] if need in half.inside]
            self.waits[op] = len(waits)
            for need in waits:
                self.users[need].append(op)
            for storage in self.held[op]:
                self.left[storage] += 1
                self.last[storage] += op
        self.there = set(half.before)
        self.done: dict[int, None] = {}
        self.ready: list[int] = []  # movable ops that became ready, or the last holder of a storage

    def run(self, late: Iterable[int]) -> list[int]:
        """Return all ops in the order of ``late``, but for what is computed earlier."""
        for op in self.half.ops:
            self.consider(op)
        self.drain()
        for op in late:
            for needed in self.first(op):
                self.compute(needed)
                self.drain()
        return list(self.done)

    def first(self, op: int) -> Iterator[int]:
        """Yield what ``op`` still needs, each after its own needs, and then ``op``."""
        if not self.waits[op]:
            if op not in self.done:
                yield op
            return
        # An explicit stack, because chains of recomputed ops are longer than Python's recursion limit. The caller may
        # compute other ops between two results, so `done` is looked up each time.
        stack = [(op, iter(self.needs[op]))]
        while stack:
            current, needs = stack[-1]
            need = next((n for n in needs if n in self.half.inside and n not in self.done), None)
            if need is not None:
                stack.append((need, iter(self.needs[need])))
                continue
            stack.pop()
            if current not in self.done:
                yield current

    def compute(self, op: int) -> None:
        """Append an op, and consider the ops that it makes ready, or leaves as the last holder of a storage."""
        self.done[op] = None
        self.there.update(self.made[op])
        for storage in self.held[op]:
            self.left[storage] -= 1
            self.last[storage] -= op
            if self.left[storage] == 1:
                self.consider(self.last[storage])
        for user in self.users[op]:
            self.waits[user] -= 1
            self.consider(user)

    def consider(self, op: int) -> None:
        """Queue an op that may be computed now."""
        if not self.waits[op] and op in self.movable:
            heapq.heappush(self.ready, op)

    def drain(self) -> None:
        """Compute the queued ops that do not increase the memory."""
        while self.ready:
            op = heapq.heappop(self.ready)
            # An op that is not taken now is queued again when it becomes the last holder of a storage: it then frees
            # more. So each op is considered about as often as it holds storages.
            if op not in self.done and (self.at_once or self.growth(op) <= 0):
                self.compute(op)

    def growth(self, op: int) -> int:
        """Return the bytes that an op allocates minus those that it frees as their last holder."""
        taken = sum(self.nbytes[s] for s in self.made[op] if s not in self.there)
        return taken - sum(self.nbytes[s] for s in self.held[op] if self.left[s] == 1 and s not in self.half.kept)
