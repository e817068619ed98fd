"""Orders made from tables touch what the graph says, whatever the parts, copies and homes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from campaigns import these_first
from torch.fx import Node
from zoographs import every_specimen

import splitkit as sk
from splitkit.memory.graph_memory import GraphMemory, NodeMemory
from splitkit.memory.saved_storages import activations
from splitkit.memory.segment import Incidence, OrderMemory
from splitkit.testing import models

Copy = tuple[Node, int]
MODELS = {
    "t5": {"layers": 1, "width": 32, "heads": 2, "vocab": 100},
    "mixtral": {"layers": 1, "width": 32, "heads": 2, "vocab": 100},
}


class Slow:
    """An order, built copy by copy from the definition."""

    def __init__(self, memory: GraphMemory, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> None:
        self.memory, self.known = memory, memory.activations
        self.copies: list[Copy] = [(node, part) for part, nodes in enumerate(parts) for node in nodes]
        self.home = {node: part for node, part in self.copies if homes.get(node, part) == part}
        self.made: dict[Copy, int] = {(n, -1): -1 for n in memory.flow.graph.find_nodes(op="placeholder")}
        for at, (node, part) in enumerate(self.copies):
            self.made |= {(made, part): at for made in memory.nodes[node].makes}
        self.number = {copy: i for i, copy in enumerate(self.made)}

    def source(self, value: Node, part: int) -> Copy:
        """Return the copy that a part reads."""
        own = (value, -1 if value.op == "placeholder" else part)
        return own if own in self.made else (value, self.home[self.memory.flow.producer(value)])

    def gradient(self, of: object, part: int) -> object:
        """Return the gradient of a value, of the base of a view, or of a parameter."""
        if not isinstance(of, Node):
            return of
        copy = self.source(of, part)
        viewed = self.memory.views.get(copy[0])
        if viewed is not None:
            return self.gradient(viewed, copy[1])
        return copy if self.memory.training and copy[0] in self.known.requires else None

    def row(self, at: int) -> tuple[NodeMemory, int]:
        node, part = self.copies[at]
        return self.memory.nodes[node], part


def touched(incidence: Incidence) -> list[tuple[int, int]]:
    return list(zip(incidence.position.tolist(), incidence.item.tolist(), strict=True))


def check(memory: GraphMemory, order: OrderMemory, slow: Slow) -> None:
    """Compare every array of an order with the definition."""
    keys = {key: i for i, key in enumerate(memory.owned)}
    graded = dict[int, set[object]]()
    storages, saves, reads, parameters = set(), set(), set(), set()
    for at in range(order.length):
        row, part = slow.row(at)
        reads |= {(at, slow.number[slow.source(read, part)]) for read in row.reads}
        saves |= {(at, s) for s in row.saves}
        lie = [s for read in row.reads for s in slow.known.values[read]]
        storages |= {(at, s) for s in (*row.storages, *row.saves, *lie)}
        parameters |= {(at, keys[key]) for key in row.parameters}
        view = memory.views.get(slow.copies[at][0])
        graded[at] = {slow.gradient(c, part) for c in row.contributes if c is not view}
    assert touched(order.storages) == sorted(storages)
    assert touched(order.saves) == sorted(saves)
    assert touched(order.reads) == sorted(reads)
    assert touched(order.parameters) == sorted(parameters)
    assert order.made.tolist() == list(slow.made.values())
    number: dict[object, int] = {}
    for (node, part), at in slow.number.items():
        own = slow.gradient(node, part)
        assert (own is None) == (order.gradient_of[at] < 0)
        if own is not None:
            assert number.setdefault(own, int(order.gradient_of[at])) == order.gradient_of[at]
    assert len(set(number.values())) == len(number)
    first = int((~order.is_parameter).sum())
    number |= {key: first + i for key, i in keys.items()}
    assert touched(order.gradient_reads) == sorted((at, number[g]) for at, own in graded.items() for g in own)
    last = list(slow.made.values())
    for at, value in reads:
        last[value] = max(last[value], at)
    outputs = memory.flow.graph.output_node().all_input_nodes
    loss = [node for node in outputs if node in slow.known.requires and node.meta["val"].numel() == 1]
    for node in loss if memory.training and len(loss) == 1 else outputs:
        if node in slow.known.values and node.op != "get_attr":
            last[slow.number[slow.source(node, -1)]] = order.length
    assert order.last.tolist() == last
    for incidence in (order.storages, order.saves, order.reads, order.parameters, order.gradient_reads):
        check_neighbours(incidence, order.length)


def check_neighbours(incidence: Incidence, length: int) -> None:
    """Check the previous and next touch of each pair's item, and where the pairs of each position begin."""
    where: dict[int, list[int]] = {}
    for position, item in touched(incidence):
        where.setdefault(item, [-1]).append(position)
    after = {(item, at): then for item, row in where.items() for at, then in pairwise([*row, length])}
    before = {(item, at): first for item, row in where.items() for first, at in pairwise(row)}
    assert incidence.before.tolist() == [before[item, at] for at, item in touched(incidence)]
    assert incidence.after.tolist() == [after[item, at] for at, item in touched(incidence)]
    first = np.searchsorted(incidence.position, np.arange(length))
    assert incidence.starts.tolist() == [*first.tolist(), len(incidence.position)]


def divided(flow: sk.extend.Dataflow, seed: int) -> tuple[list[list[Node]], dict[Node, int]]:
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
def test_orders_of_a_model_match_the_definition(name: str) -> None:
    example = models.build(name, **MODELS[name])
    flow = sk.analyze(sk.capture(example.model, *example.args, **example.kwargs))
    for training in (True, False):
        memory = GraphMemory(flow, activations(flow), training)
        for seed in range(2):
            parts, homes = divided(flow, seed)
            check(memory, memory.order(parts, homes), Slow(memory, parts, homes))


def test_orders_of_the_zoo_match_the_definition() -> None:
    for specimen in every_specimen():
        sk.extend.propagate(specimen.graph, *specimen.inputs)
        flow = sk.analyze(specimen.graph)
        memory = GraphMemory(flow, activations(flow), training=True)
        for seed in range(2):
            parts, homes = divided(flow, seed)
            check(memory, memory.order(parts, homes), Slow(memory, parts, homes))
