"""A lower bound on the peak of every plan: bytes alive at one node, whatever is saved and in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from splitkit.search.recompute.memory_limits import MomentLimits
from splitkit.solvers.cuts.min_cut import INFINITE, Network, min_cut
from splitkit.training.choices import required_by_forward
from splitkit.training.flow import output_nodes
from splitkit.training.joint_storages import STATIC
from splitkit.training.peaks import PeakTrace

_CUTS = 64  # nodes that are looked at


class Bounds:
    """Lower bounds of the peak of every plan of one joint graph, and of every order of its halves.

    While a node runs, what the caller holds is there, what the node reads and makes, and what it takes meanwhile;
    besides, storages from which all can be computed that comes after: at least those of a minimum cut::

        source --inf or 0--> op --nbytes--> storage --inf--> sink     a gradient that backward returns
                             op --inf--> sink                         what waits for the node comes after it
                             op <--inf--- storage                     read by the op

    An op on the sink's side runs after the node. What the node waits for ran before, and of it only what may be
    computed again may run after it too. All else may come after, even any number of times. Views are their storage.

    Attributes:
        moments: who makes and reads what.
    """

    def __init__(self, moments: MomentLimits) -> None:
        peaks, savings = moments.peaks, moments.savings
        flow, self._peaks, self._own = savings.flow, peaks, moments.own
        computed, required = {flow.index[n] for n in peaks.computed}, required_by_forward(flow)
        self._required = {i for i in computed if flow.producer(peaks.nodes[i]) in required} - moments.own
        again = {flow.index[n] for n, fixed in zip(savings.ops, savings.fixed, strict=True) if not fixed}
        self._again = {i for i in computed if flow.index[flow.producer(peaks.nodes[i])] in again}
        self._once = computed - moments.own - self._again
        self._touched, self._made = ([self._roots(s) for s in slots] for slots in (peaks.touched, peaks.storages.made))
        self._reads = [[flow.index[r] for r in node.all_input_nodes] for node in peaks.nodes]
        self._users: list[list[int]] = [[] for _ in peaks.nodes]
        for i, reads in enumerate(self._reads):
            for read in reads:
                self._users[read].append(i)
        self._outputs, self._gradients = (
            {s for value in output_nodes(values) for s in self._made[flow.index[value]]}
            for values in (flow.outputs, flow.gradients)
        )

    def peak(self, trace: PeakTrace) -> int:
        """Return a lower bound on the peak of every plan.

        Args:
            trace: the run of a plan, preferably one with a low peak: nodes with the most bytes alive are asked first.
        """
        found = self._bytes_with(self._outputs | self._gradients)  # when backward ends
        asked = 0
        for step in np.argsort(-trace.timeline, kind="stable").tolist():
            node = int(trace.steps[step])
            if trace.timeline[step] <= found or asked == _CUTS:
                break
            if node in self._own or (step < trace.forward and node in self._required):
                found, asked = max(found, self.at(node)), asked + 1
        return found

    def at(self, node: int) -> int:
        """Return a lower bound on the bytes alive while a node runs that only backward can run, or that forward needs.

        Args:
            node: by position in the joint graph.
        """
        late = node in self._own
        half = self._own if late else self._required
        before = _reached(node, self._reads.__getitem__, half)
        after = _reached(node, self._users.__getitem__, half)
        there = self._touched[node] | self._made[node]
        if late:
            there |= self._outputs
            more = self._cut(before | self._once, after - {node}, there)
        else:
            made = {s for i in before for s in self._made[i] if int(self._peaks.storages.maker[s]) in before}
            there |= made & (self._outputs | {s for i in after for s in self._touched[i]})
            more = self._cut(before - self._again, set(), there)
        return self._bytes_with(there) + int(self._peaks.transient[node]) + more

    def _cut(self, before: set[int], after: set[int], there: set[int]) -> int:
        """Return the fewest bytes, besides the storages ``there``, that are alive between ``before`` and ``after``."""
        peaks = self._peaks
        place = len(peaks.nodes) + 2
        roots = [s for s, source in enumerate(peaks.storages.source) if source == s]
        edges = [(0, 2 + i, INFINITE) for i in before]
        edges += [(2 + i, 1, INFINITE) for i in after]
        edges += [(2 + int(peaks.storages.maker[s]), place + s, 0 if s in there else peaks.nbytes[s]) for s in roots]
        edges += [(place + s, 2 + i, INFINITE) for i, slots in enumerate(self._touched) for s in slots]
        edges += [(place + s, 1, INFINITE) for s in self._gradients]
        tails, heads, capacities = np.array(edges, np.int64).T
        return min_cut(Network(place + len(peaks.storages.source), tails, heads, capacities)).value

    def _bytes_with(self, storages: Iterable[int]) -> int:
        """Return the bytes of the inputs and of these storages."""
        return self._peaks.baseline(()) + sum(self._peaks.nbytes[s] for s in storages)

    def _roots(self, slots: Iterable[int]) -> set[int]:
        """Return the storages in which slots lie, as their makers yield them, without the caller's."""
        return {self._peaks.storages.root[s] for s in slots} - {STATIC}


def _reached(start: int, leads_to: Callable[[int], Iterable[int]], inside: set[int]) -> set[int]:
    """Return the nodes reachable from ``start`` inside a set, including ``start``."""
    found, stack = {start}, [start]
    while stack:
        new = {i for i in leads_to(stack.pop()) if i in inside} - found
        found |= new
        stack += new
    return found
