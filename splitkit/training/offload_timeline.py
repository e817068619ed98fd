"""The timeline of a training step whose saved values wait on the host: how long it waits, and how much memory it takes.

Each direction of the link has one copy engine, which copies in the order in which copies were asked for, beside the
computation. A value may be copied out as soon as it is made. Its memory is free once the copy is complete and
forward has read it for the last time; all of it is on the host when forward ends. In backward its memory is taken
when the copy back is asked for::

    forward     a   b   c   d  |  d'  c'  b'  a'     backward
    out            [ a ]       |
    back                       |      [ a ]          a is not on the device from the end of the one to the start of
                                                     the other

Backward mirrors forward: run backwards in time, a value leaves the device after its first reader. So one rule finds
when memory is free in both halves (`absent_from`). `OffloadTimeline.run` then judges the result; it alone says how
many seconds and bytes a plan takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.costs.links import HostLink
from splitkit.graph.storages import value_of
from splitkit.memory.graph_memory import is_dense
from splitkit.plans.parts import Offloaded
from splitkit.training.choices import Choice, Ints, Savings
from splitkit.training.flow import JointFlow, is_size
from splitkit.training.peaks import Peaks, PeakTrace


def why_not_moved(flow: JointFlow, value: Node) -> str:
    """Return why a value cannot go to the host, whatever the plan; an empty string if it can."""
    tensor, roots = value_of(value), flow.storages.under(value)
    if is_size(value) or not isinstance(tensor, Tensor):
        return "it is not a tensor"
    if not roots:
        return "it lies in the memory of an input or parameter, which the caller holds"
    if tensor.layout is not torch.strided or not all(isinstance(size, int) for size in tensor.shape):
        return "it is not strided, or has symbolic sizes"
    if len(roots) > 1 or flow.storages.nbytes[roots[0]] != tensor.numel() * tensor.element_size():
        return "it is a part of its memory: name the value that it is a view of"
    if not is_dense(tensor):
        return "its elements overlap or have gaps between them"
    if roots[0] in {root for e in flow.effects.values() for node in e.writes for root in flow.storages.under(node)}:
        return "a node writes to its memory"
    return ""


# Which values of a joint graph can be moved to the host, and why others cannot.


@dataclass(frozen=True)
class HostTransfer:
    """A saved storage that goes to the host and back.

    Attributes:
        item: the allocation of the `PeakTrace`.
        release: the step of forward after which its memory is free.
        fetch: the step of backward before which the copy back is asked for.
    """

    item: int
    release: int
    fetch: int


@dataclass(frozen=True, eq=False)
class OffloadRun:
    """A simulated step with transfers.

    Attributes:
        transfers: the transfers.
        waits: seconds that forward and backward wait for copies.
        trace: the run, with the bytes that are alive on the device.
        host: the bytes that are on the host when forward ends.
    """

    transfers: tuple[HostTransfer, ...]
    waits: tuple[float, float]
    trace: PeakTrace
    host: int

    @property
    def peak(self) -> int:
        """The most bytes alive on the device at once."""
        return self.trace.peak

    @property
    def exposed(self) -> float:
        """The seconds that the step waits for copies."""
        return sum(self.waits)


@dataclass(frozen=True, eq=False)
class OffloadTimeline:
    """The steps of one choice, with their times, and what may be offloaded.

    Attributes:
        trace: the run without transfers.
        seconds: the time of each step.
        link: the link to the host.
        first: for each allocation of forward, the first step of backward that reads it.
        values: allocation that may be offloaded -> its value.
    """

    trace: PeakTrace
    seconds: list[float]
    link: HostLink
    first: Ints
    values: dict[int, Node]

    @cached_property
    def _copies(self) -> dict[int, tuple[float, float]]:
        """Item -> the seconds of its copy to the host and back."""
        sizes = {item: int(self.trace.nbytes[item]) for item in self.values}
        return {item: (self.link.out.seconds(n), self.link.back.seconds(n)) for item, n in sizes.items()}

    def absent(self, items: Sequence[int]) -> Ints:
        """Return for each step the bytes of these items that need not be on the device: the most that offload frees."""
        return _spans(len(self.seconds), self.trace.nbytes, [(i, self._left(i), int(self.first[i])) for i in items])

    def fits(self, items: Sequence[int], budget: int) -> bool:
        """Return whether some transfers of these items keep to a budget."""
        return bool((self.trace.timeline - self.absent(items) <= budget).all())

    def transfers(self, items: Iterable[int], budget: int) -> tuple[HostTransfer, ...] | None:
        """Return transfers within a budget that wait little, each at the earliest or the latest moment; or ``None``."""
        # Of values that are read first by the same node, the small ones come last, so that what is taken grows late.
        trace, end = self.trace, len(self.seconds)
        chosen = sorted(items, key=lambda item: (int(trace.nbytes[item]), item))
        early, excess = trace.forward, (trace.timeline - budget).tolist()
        sizes = {i: int(trace.nbytes[i]) for i in chosen}
        out = [(int(trace.born[i]), self._left(i), sizes[i], self._copies[i][0]) for i in chosen]
        back = [((f := end - 1 - int(self.first[i])), f, sizes[i], self._copies[i][1]) for i in chosen]
        gone = absent_from(excess[:early], self.seconds[:early], out)
        come = absent_from(excess[early:][::-1], self.seconds[early:][::-1], back) if gone is not None else None
        if gone is None or come is None:
            return None
        return tuple(HostTransfer(i, g - 1, end - c) for i, g, c in zip(chosen, gone, come, strict=True))

    def run(self, transfers: Sequence[HostTransfer]) -> OffloadRun:
        """Return the run with these transfers."""
        trace, early = self.trace, self.trace.forward
        spans = [(one.item, one.release, one.fetch) for one in transfers]
        timeline = trace.timeline - _spans(len(self.seconds), trace.nbytes, spans)
        items = [one.item for one in transfers]
        freed = ((one.release, one.item) for one in transfers)
        out = self._waits(((int(trace.born[item]), item) for item in items), freed, False)
        by_read = sorted(transfers, key=lambda t: (int(self.first[t.item]), t.item))
        reads = ((int(self.first[item]), item) for item in items)
        waits = out, self._waits(((t.fetch, t.item) for t in by_read), reads, True)
        assert all(0 <= one.release < early <= one.fetch <= self.first[one.item] for one in transfers)
        host = sum(int(trace.nbytes[one.item]) for one in transfers)
        return OffloadRun(tuple(transfers), waits, replace(trace, timeline=timeline), host)

    def _waits(self, starts: Iterable[tuple[int, int]], needs: Iterable[tuple[int, int]], late: bool) -> float:
        """Return the seconds that forward, or backward if ``late``, waits for copies.

        Args:
            starts: (step, item): the copies that start after the step, or before it in backward, in their order.
            needs: (step, item): the copies that must be complete then.
            late: whether it is backward.
        """
        asked, wanted = _by_step(starts), _by_step(needs)
        clock = engine = waited = 0.0
        done: dict[int, float] = {}
        early = self.trace.forward
        for step in range(early, len(self.seconds)) if late else range(early):
            clock += 0.0 if late else self.seconds[step]
            for item in asked.get(step, ()):
                done[item] = engine = max(engine, clock) + self._copies[item][late]
            wait = max((done[item] - clock for item in wanted.get(step, ())), default=0.0)
            if wait > 0:
                clock, waited = clock + wait, waited + wait
            clock += self.seconds[step] if late else 0.0
        return waited

    def _left(self, item: int) -> int:
        return int(self.trace.left[item])

    def described(self, nodes: Sequence[Node], transfers: Iterable[HostTransfer]) -> tuple[Offloaded, ...]:
        """Return the transfers as a plan has them; ``nodes``: those of the graph, by position."""
        steps = [nodes[i] for i in self.trace.steps.tolist()]
        found = [Offloaded(self.values[t.item], steps[t.release], steps[t.fetch]) for t in transfers]
        return tuple(found)

    def transfers_of(self, nodes: Sequence[Node], offloaded: Iterable[Offloaded]) -> list[HostTransfer]:
        """Return what `described` described."""
        steps, early = [nodes[i] for i in self.trace.steps.tolist()], self.trace.forward
        items = {value: item for item, value in self.values.items()}
        made = {node: step for step, node in enumerate(steps[:early])}
        read = {node: step for step, node in enumerate(steps[early:], early)}
        found = []
        for one in offloaded:
            item = items[one.value]
            release = self._left(item) if one.release is None else made[one.release]
            found.append(HostTransfer(item, release, int(self.first[item]) if one.fetch is None else read[one.fetch]))
        return found


def _by_step(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for step, item in pairs:
        found.setdefault(step, []).append(item)
    return found


def _spans(steps: int, nbytes: Ints, spans: Iterable[tuple[int, int, int]]) -> Ints:
    """Return the bytes of (item, after this step, before that step), summed for each step."""
    change = np.zeros(steps + 1, dtype=np.int64)
    for item, after, before in spans:
        change[after + 1] += nbytes[item]
        change[before] -= nbytes[item]
    return np.cumsum(change)[:steps]


Item = tuple[int, int, int, float]
"""What leaves the device: the step that makes it, the last step that reads it, its bytes, the seconds of its copy."""


def absent_from(excess: Sequence[int], seconds: Sequence[float], items: Sequence[Item]) -> list[int] | None:
    """Return the step from which each item is absent, such that steps wait as little as possible.

    Items are copied one after the other, in the order in which they are made. Before a step whose excess is larger than
    what is absent, the step waits for the next copy to end. An item is absent at the end at the latest.

    Args:
        excess: for each step, the bytes that must be absent while it runs.
        seconds: the time of each step.
        items: in any order.

    Returns:
        For each item a step, or their number; ``None`` if the items are not enough.
    """
    made, read = (_by_step((int(item[field]), number) for number, item in enumerate(items)) for field in (0, 1))
    done, found = [0.0] * len(items), [len(seconds)] * len(items)
    waiting: list[tuple[float, int]] = []
    clock = engine = 0.0
    gone = 0
    for step, (over, took) in enumerate(zip(excess, seconds, strict=True)):
        while waiting and (waiting[0][0] <= clock or gone < over):
            end, number = heapq.heappop(waiting)
            clock = max(clock, end)
            found[number] = step
            gone += items[number][2]
        if gone < over:
            return None
        clock += took
        for number in made.get(step, ()):
            done[number] = engine = max(engine, clock) + items[number][3]
        for number in read.get(step, ()):
            heapq.heappush(waiting, (done[number], number))
    return found


class OffloadModel:
    """Makes the timelines of the choices of one joint graph.

    Attributes:
        savings: the choices.
        peaks: simulates their memory.
        link: the link to the host.
        seconds: node, by position in the graph -> its time.
    """

    def __init__(self, savings: Savings, peaks: Peaks, costs: Costs, link: HostLink) -> None:
        self.savings, self.peaks, self.link = savings, peaks, link
        priced = set(savings.flow.nodes)  # the members of a tuple cost nothing
        self.seconds = [costs.seconds(node) if node in priced else 0.0 for node in peaks.nodes]
        self._value = {value for value in savings.values if not why_not_moved(savings.flow, value)}
        self._storage = [savings.flow.storages.under(value) for value in savings.values]

    def timeline(self, choice: Choice, trace: PeakTrace) -> OffloadTimeline:
        """Return the timeline of a choice whose run is known."""
        first, values = self.peaks.first_reads(trace), dict[int, Node]()
        saved = [self._storage[v] for v in np.flatnonzero(choice.saved).tolist()]
        held = [roots[0] for roots in saved if len(roots) == 1]
        alone = {root for root in held if held.count(root) == 1} if len(set(held)) < len(held) else set(held)
        alone -= {root for roots in saved if len(roots) != 1 for root in roots}
        taken = {self._storage[v][0]: self.savings.values[v] for v in np.flatnonzero(choice.saved).tolist()}
        some = trace.saved[: len(first)] & (trace.dies[: len(first)] < len(trace.steps))
        for item in np.flatnonzero(some).tolist():
            root = int(trace.slot[item])
            if root in alone and (value := taken[root]) in self._value and int(trace.nbytes[item]):
                values[item] = value
        return OffloadTimeline(trace, [self.seconds[i] for i in trace.steps.tolist()], self.link, first, values)
