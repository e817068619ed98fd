"""Lines made of tables touch what the graph says, whatever the parts, copies and homes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from campaigns import these_first
from torch.fx import Node

import splitkit as sk
from splitkit.memory.autograd import activations
from splitkit.memory.lines import Units
from splitkit.memory.linetables import LineNode
from splitkit.memory.stretch import Line
from splitkit.memory.touches import Touches
from splitkit.testing import models
from splitkit.testing.graphzoo import zoo

Copy = tuple[Node, int]
MODELS = {
    "t5": {"layers": 1, "width": 32, "heads": 2, "vocab": 100},
    "mixtral": {"layers": 1, "width": 32, "heads": 2, "vocab": 100},
}


class Slow:
    """A line copy by copy, from the definition."""

    def __init__(self, units: Units, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> None:
        self.units, self.known = units, units.activations
        self.copies: list[Copy] = [(node, part) for part, nodes in enumerate(parts) for node in nodes]
        self.home = {node: part for node, part in self.copies if homes.get(node, part) == part}
        self.made: dict[Copy, int] = {(n, -1): -1 for n in units.flow.graph.find_nodes(op="placeholder")}
        for at, (node, part) in enumerate(self.copies):
            self.made |= {(made, part): at for made in units.units[node].makes}
        self.number = {copy: i for i, copy in enumerate(self.made)}

    def source(self, value: Node, part: int) -> Copy:
        """Whose copy a part reads."""
        own = (value, -1 if value.op == "placeholder" else part)
        return own if own in self.made else (value, self.home[self.units.flow.producer(value)])

    def gradient(self, of: object, part: int) -> object:
        """The gradient of a value, of what it is a view of, or of a parameter."""
        if not isinstance(of, Node):
            return of
        copy = self.source(of, part)
        viewed = self.units._views.get(copy[0])
        if viewed is not None:
            return self.gradient(viewed, copy[1])
        return copy if self.units.training and copy[0] in self.known.requires else None

    def lists(self, at: int) -> tuple[LineNode, int]:
        node, part = self.copies[at]
        return self.units.units[node], part


def touched(touches: Touches) -> list[tuple[int, int]]:
    return list(zip(touches.position.tolist(), touches.item.tolist(), strict=True))


def check(units: Units, line: Line, slow: Slow) -> None:
    """Everything that a line says, by the definition."""
    keys = {key: i for i, key in enumerate(units._owned)}
    graded = dict[int, set[object]]()
    storages, saves, reads, parameters = set(), set(), set(), set()
    for at in range(line.length):
        unit, part = slow.lists(at)
        reads |= {(at, slow.number[slow.source(read, part)]) for read in unit.reads}
        saves |= {(at, s) for s in unit.saves}
        lie = [s for read in unit.reads for s in slow.known.values[read]]
        storages |= {(at, s) for s in (*unit.storages, *unit.saves, *lie)}
        parameters |= {(at, keys[key]) for key in unit.parameters}
        view = units._views.get(slow.copies[at][0])
        graded[at] = {slow.gradient(c, part) for c in unit.contributes if c is not view}
    assert touched(line.storages) == sorted(storages)
    assert touched(line.saves) == sorted(saves)
    assert touched(line.reads) == sorted(reads)
    assert touched(line.parameters) == sorted(parameters)
    assert line.made.tolist() == list(slow.made.values())
    number: dict[object, int] = {}
    for (node, part), at in slow.number.items():
        own = slow.gradient(node, part)
        assert (own is None) == (line.gradient_of[at] < 0)
        if own is not None:
            assert number.setdefault(own, int(line.gradient_of[at])) == line.gradient_of[at]
    assert len(set(number.values())) == len(number)
    first = int((~line.is_parameter).sum())
    number |= {key: first + i for key, i in keys.items()}
    assert touched(line.gradient_reads) == sorted((at, number[g]) for at, own in graded.items() for g in own)
    last = list(slow.made.values())
    for at, value in reads:
        last[value] = max(last[value], at)
    for node in units.flow.graph.output_node().all_input_nodes:
        if node in slow.known.values and node.op != "get_attr":
            last[slow.number[slow.source(node, -1)]] = line.length
    assert line.last.tolist() == last
    for touches in (line.storages, line.saves, line.reads, line.parameters, line.gradient_reads):
        check_neighbours(touches, line.length)


def check_neighbours(touches: Touches, length: int) -> None:
    """Where each pair's item was touched before and is after, and where the pairs of a position begin."""
    where: dict[int, list[int]] = {}
    for position, item in touched(touches):
        where.setdefault(item, [-1]).append(position)
    after = {(item, at): then for item, row in where.items() for at, then in pairwise([*row, length])}
    before = {(item, at): first for item, row in where.items() for first, at in pairwise(row)}
    assert touches.before.tolist() == [before[item, at] for at, item in touched(touches)]
    assert touches.after.tolist() == [after[item, at] for at, item in touched(touches)]
    first = np.searchsorted(touches.position, np.arange(length))
    assert touches.starts.tolist() == [*first.tolist(), len(touches.position)]


def divided(flow: sk.Dataflow, seed: int) -> tuple[list[list[Node]], dict[Node, int]]:
    """Random parts of consecutive nodes, some of them copied to later parts."""
    draw = random.Random(seed)
    count = draw.randint(1, 5)
    cuts = [0, *sorted(draw.choices(range(len(flow.nodes) + 1), k=count - 1)), len(flow.nodes)]
    parts = [{*flow.nodes[a:b]} for a, b in pairwise(cuts)]
    homes = {node: part for part, nodes in enumerate(parts) for node in nodes}
    for node in flow.nodes:
        for part in range(homes[node] + 1, count):
            if seed % 2 and draw.random() < 0.1:
                parts[part].add(node)
    several = {node: home for node, home in homes.items() if sum(node in part for part in parts) > 1}
    return [sorted(part, key=flow.index.__getitem__) for part in parts], several


@pytest.mark.parametrize("name", these_first([*MODELS][:1], [*MODELS][1:]))
def test_a_line_of_a_model_is_as_defined(name: str) -> None:
    example = models.build(name, **MODELS[name])
    flow = sk.analyze(sk.capture(example.model, *example.args, **example.kwargs))
    for training in (True, False):
        units = Units(flow, activations(flow), training)
        for seed in range(3):
            parts, homes = divided(flow, seed)
            check(units, units.line(parts, homes), Slow(units, parts, homes))


def test_a_line_of_the_zoo_is_as_defined() -> None:
    for specimen in zoo():
        sk.propagate(specimen.graph, *specimen.inputs)
        flow = sk.analyze(specimen.graph)
        units = Units(flow, activations(flow), training=True)
        for seed in range(4):
            parts, homes = divided(flow, seed)
            check(units, units.line(parts, homes), Slow(units, parts, homes))
