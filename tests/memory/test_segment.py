"""The memory of a segment equals the definition, counted node by node from what each touches."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from test_peak_bounds import Wide
from zoographs import specimens

import splitkit as sk
from splitkit.memory.graph_memory import GraphMemory
from splitkit.memory.saved_storages import activations
from splitkit.memory.segment import Incidence, OrderMemory, SegmentMemory

ZOO = ["dropout, exported", "many outputs, exported", "mutation, exported", "tied language model, exported"]
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 100}


def touched(incidence: Incidence, start: int, end: int) -> dict[int, list[int]]:
    """Return item -> the positions that touch it in a segment."""
    pairs = [
        (i, p) for p, i in zip(incidence.position.tolist(), incidence.item.tolist(), strict=True) if start <= p < end
    ]
    return {item: [p for _, p in those] for item, those in groupby(sorted(pairs), key=lambda pair: pair[0])}


class Counted:
    """One segment; ``least`` leaves out what is received and sent."""

    def __init__(self, order: OrderMemory, start: int, end: int, least: bool) -> None:
        self.order, self.start, self.end = order, start, end
        read, made = touched(order.reads, start, end), order.made.tolist()
        self.received = set() if least else {v for v in read if made[v] < start}
        sent = set() if least else {v for v in range(len(made)) if start <= made[v] < end <= order.last[v]}
        self.sent = sent
        self.copied = {v for v in sent if end < order.length and order.copied_from[v] >= start}
        self.comes, self.goes = self.storages(self.received), self.storages(sent - self.copied)
        self.apart = self._apart()
        self.adds = touched(order.gradient_reads, start, end)
        self.saves, self.touches = touched(order.saves, start, end), touched(order.storages, start, end)

    def storages(self, values: set[int]) -> set[int]:
        return {s for v, s in zip(*map(list, self.order.value_storages), strict=True) if v in values}

    def _apart(self) -> int:
        order, inputs = self.order, self.storages({v for v in self.received if self.order.made[v] < 0})
        lies = {v: self.storages({v}) for v in self.received}
        total = sum(order.value_bytes[v] for v in self.copied) + sum(order.value_bytes[v] for v in lies if not lies[v])
        for storage in {s for v in lies if len(lies[v]) == 1 for s in lies[v]}:
            come = sum(order.value_bytes[v] for v in lies if lies[v] == {storage})
            total += max(0, come - (0 if storage in inputs else order.storage_bytes[storage]))
        return int(total)

    def bytes_of(self, storages: set[int]) -> int:
        return int(sum(self.order.storage_bytes[s] for s in storages))

    def forward(self, at: int) -> int:
        held = self.comes | self.goes | set(self.saves)
        there = {s for s, where in self.touches.items() if where[0] <= at and (s in held or where[-1] >= at)}
        return self.bytes_of(there | self.comes) + int(self.order.forward[at]) + self.apart

    def backward(self, at: int) -> int:
        order, crosses = self.order, self.comes | self.goes
        total = self.bytes_of(crosses | {s for s, where in self.saves.items() if where[0] <= at}) + self.apart
        come = {int(order.gradient_of[v]): int(order.value_bytes[v]) for v in self.sent if order.gradient_of[v] >= 0}
        total += int(sum(order.value_bytes[v] for v in self.sent if order.gradient_of[v] >= 0))
        new = [0]
        for item, where in self.adds.items():
            nbytes, parameter = int(order.gradient_bytes[item]), bool(order.is_parameter[item])
            first = where[0] if parameter else max(self.start, int(order.gradient_made[item]))
            total += nbytes * (first <= at <= where[-1])
            if at in where:
                total += nbytes * (at != where[-1] or item in come)
                new.append(nbytes * (at != where[-1] and not parameter))
        return total + max(new) + int(order.backward[at])

    def held(self) -> SegmentMemory:
        order, run = self.order, range(self.start, self.end)
        owned = touched(order.parameters, self.start, self.end)
        parameters = int(sum(order.parameter_bytes[p] for p in owned))
        lasting = self.bytes_of(self.comes | self.goes) + self.apart
        saved = self.bytes_of(self.comes | self.goes | set(self.saves)) + self.apart
        forward = max(map(self.forward, run), default=self.bytes_of(self.comes) + self.apart)
        if not order.training:
            return SegmentMemory(parameters, 0, 0, forward)
        backward = max(map(self.backward, run), default=lasting)
        trained = int(sum(order.trained_bytes[p] for p in owned))
        return SegmentMemory(parameters, trained, saved, max(0, forward - saved, backward - saved))


def graph_of(name: str) -> torch.fx.GraphModule:
    if name == "wide":
        return sk.capture(Wide(), torch.randn(4, 4))
    if name in ZOO:
        return specimens()[name].graph
    return captured_example(name, **SMALL).graph


@pytest.mark.parametrize("name", these_first(["wide", *ZOO], ["mixtral"]))
def test_a_segment_is_what_is_counted_node_by_node(name):
    flow, drawn = sk.analyze(graph_of(name)), random.Random(0)
    held = activations(flow)
    for training in (True, False):
        order = GraphMemory(flow, held, training).order([flow.nodes])
        ends = [sorted((drawn.randint(0, order.length), drawn.randint(0, order.length))) for _ in range(8)]
        for start, end in [[0, order.length], [0, 0], *ends]:
            assert order.segment(start, end) == Counted(order, start, end, least=False).held(), (start, end)
            assert order.lower_bound(start, end) == Counted(order, start, end, least=True).held(), (start, end)


def test_an_input_beside_a_view_of_it_takes_memory_twice():
    """The view comes from another stage in memory of its own; the input, whose storage it was in, is there besides."""

    class Beside(torch.nn.Module):
        def forward(self, x):
            turned = x.t()
            return torch.exp(x.sin() @ turned.sin()), x.cos()

    flow = sk.analyze(sk.capture(Beside(), torch.randn(8, 8)))
    order, nbytes = GraphMemory(flow, activations(flow), training=False).order([flow.nodes]), 8 * 8 * 4
    assert [node.name for node in flow.nodes[:3]] == ["t", "sin", "sin_1"]
    assert order.segment(1, 3).temporary == 4 * nbytes  # input, view, and both sines
    assert order.segment(0, 3).temporary == 3 * nbytes  # the view is made here
