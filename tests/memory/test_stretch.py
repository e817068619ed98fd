"""The memory of a stretch is that of the definition, counted node by node from what each touches."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import torch
from test_falls import Wide
from zoographs import specimens

import splitkit as sk
from splitkit.memory.autograd import activations
from splitkit.memory.lines import Units
from splitkit.memory.stretch import Line, Stretch
from splitkit.memory.touches import Touches
from splitkit.testing import models

ZOO = ["dropout, exported", "many outputs, exported", "mutation, exported", "tied language model, exported"]
SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 100}


def touched(touches: Touches, start: int, end: int) -> dict[int, list[int]]:
    """Item -> where it is touched in a stretch."""
    pairs = [(i, p) for p, i in zip(touches.position.tolist(), touches.item.tolist(), strict=True) if start <= p < end]
    return {item: [p for _, p in those] for item, those in groupby(sorted(pairs), key=lambda pair: pair[0])}


class Counted:
    """One stretch; ``least`` leaves out what is taken and given."""

    def __init__(self, line: Line, start: int, end: int, least: bool) -> None:
        self.line, self.start, self.end = line, start, end
        read, made = touched(line.reads, start, end), line.made.tolist()
        self.taken = set() if least else {v for v in read if made[v] < start}
        given = set() if least else {v for v in range(len(made)) if start <= made[v] < end <= line.last[v]}
        self.given = given
        self.copied = {v for v in given if end < line.length and line.copied_from[v] >= start}
        self.comes, self.goes = self.storages(self.taken), self.storages(given - self.copied)
        self.apart = self._apart()
        self.adds = touched(line.gradient_reads, start, end)
        self.saves, self.touches = touched(line.saves, start, end), touched(line.storages, start, end)

    def storages(self, values: set[int]) -> set[int]:
        return {s for v, s in zip(*map(list, self.line.lies), strict=True) if v in values}

    def _apart(self) -> int:
        line, inputs = self.line, self.storages({v for v in self.taken if self.line.made[v] < 0})
        lies = {v: self.storages({v}) for v in self.taken}
        total = sum(line.value_bytes[v] for v in self.copied) + sum(line.value_bytes[v] for v in lies if not lies[v])
        for storage in {s for v in lies if len(lies[v]) == 1 for s in lies[v]}:
            come = sum(line.value_bytes[v] for v in lies if lies[v] == {storage})
            total += max(0, come - (0 if storage in inputs else line.storage_bytes[storage]))
        return int(total)

    def bytes_of(self, storages: set[int]) -> int:
        return int(sum(self.line.storage_bytes[s] for s in storages))

    def forward(self, at: int) -> int:
        held = self.comes | self.goes | set(self.saves)
        there = {s for s, where in self.touches.items() if where[0] <= at and (s in held or where[-1] >= at)}
        return self.bytes_of(there | self.comes) + int(self.line.forward[at]) + self.apart

    def backward(self, at: int) -> int:
        line, crosses = self.line, self.comes | self.goes
        total = self.bytes_of(crosses | {s for s, where in self.saves.items() if where[0] <= at}) + self.apart
        come = {int(line.gradient_of[v]): int(line.value_bytes[v]) for v in self.given if line.gradient_of[v] >= 0}
        total += int(sum(line.value_bytes[v] for v in self.given if line.gradient_of[v] >= 0))
        new = [0]
        for item, where in self.adds.items():
            nbytes, parameter = int(line.gradient_bytes[item]), bool(line.is_parameter[item])
            first = where[0] if parameter else max(self.start, int(line.gradient_made[item]))
            total += nbytes * (first <= at <= where[-1])
            if at in where:
                total += nbytes * (at != where[-1] or item in come)
                new.append(nbytes * (at != where[-1] and not parameter))
        return total + max(new) + int(line.backward[at])

    def held(self) -> Stretch:
        line, run = self.line, range(self.start, self.end)
        owned = touched(line.parameters, self.start, self.end)
        parameters = int(sum(line.parameter_bytes[p] for p in owned))
        lasting = self.bytes_of(self.comes | self.goes) + self.apart
        saved = self.bytes_of(self.comes | self.goes | set(self.saves)) + self.apart
        forward = max(map(self.forward, run), default=self.bytes_of(self.comes) + self.apart)
        if not line.training:
            return Stretch(parameters, 0, 0, forward)
        backward = max(map(self.backward, run), default=lasting)
        trained = int(sum(line.trained_bytes[p] for p in owned))
        return Stretch(parameters, trained, saved, max(0, forward - saved, backward - saved))


def graph_of(name: str) -> torch.fx.GraphModule:
    if name == "wide":
        return sk.capture(Wide(), torch.randn(4, 4))
    if name in ZOO:
        return specimens()[name].graph
    model = models.build(name, **SMALL)
    return sk.capture(model.model, *model.args, **model.kwargs)


@pytest.mark.parametrize("name", ["wide", *ZOO, "mixtral"])
def test_a_stretch_is_what_is_counted_node_by_node(name):
    flow, drawn = sk.analyze(graph_of(name)), random.Random(0)
    held = activations(flow)
    for training in (True, False):
        line = Units(flow, held, training).line([flow.nodes])
        ends = [sorted((drawn.randint(0, line.length), drawn.randint(0, line.length))) for _ in range(8)]
        for start, end in [[0, line.length], [0, 0], *ends]:
            assert line.stretch(start, end) == Counted(line, start, end, least=False).held(), (start, end)
            assert line.least(start, end) == Counted(line, start, end, least=True).held(), (start, end)
