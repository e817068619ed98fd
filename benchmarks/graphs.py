"""Synthetic graphs of any size for `scale`: five shapes of networks, with work and costs of values drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitkit.solvers.placement.problem import Problem, Slot

Readings = list[tuple[int, ...]]
"""For each node the earlier nodes that it reads."""

_VALUE_COST = 0.3  # of the mean work, to move the mean value


def chain(count: int, random: np.random.Generator) -> Readings:
    """A chain in which every eighth node also reads one of up to 64 nodes before it."""
    reads: Readings = []
    for node in range(count):
        far = node - int(random.integers(2, 65))
        skip = (far,) if far >= 0 and random.random() < 1 / 8 else ()
        reads.append((node - 1, *skip) if node else ())
    return reads


def cells(count: int, random: np.random.Generator) -> Readings:
    """Cells like those of NASNet: each reads the two before it, in five blocks of two branches, and joins them."""
    reads: Readings = [()]
    last = before = 0
    while len(reads) < count:
        states = [before, last]
        for _ in range(5):
            ends = []
            for _ in range(2):
                source = states[int(random.integers(len(states)))]
                for _ in range(int(random.integers(1, 4))):
                    reads.append((source,))
                    source = len(reads) - 1
                ends.append(source)
            reads.append(tuple(sorted(set(ends))))
            states.append(len(reads) - 1)
        reads.append(tuple(sorted(set(states[2:]))))
        before, last = last, len(reads) - 1
    return reads[:count]


def transformer(count: int, random: np.random.Generator) -> Readings:
    """Blocks of attention and MLP with residuals, four experts in every other block, and one mask that all read."""
    reads: Readings = [(), ()]
    mask, stream = 0, 1

    def node(*sources: int) -> int:
        reads.append(tuple(sorted(set(sources))))
        return len(reads) - 1

    block = 0
    while len(reads) < count:
        normed = node(stream)
        query, key, value = (node(normed) for _ in range(3))
        scores = node(node(node(query), node(key)), mask)
        stream = node(stream, node(node(node(scores), value)))
        normed = node(stream)
        if block % 2:
            router = node(normed)
            experts = [node(node(node(normed, router)), router) for _ in range(int(random.integers(3, 6)))]
            stream = node(stream, node(*experts))
        else:
            stream = node(stream, node(node(node(normed))))
        block += 1
    return reads[:count]


def series_parallel(count: int, random: np.random.Generator) -> Readings:
    """A random two-terminal series-parallel graph: pieces are cut in series, or in two to four branches that join."""
    reads: Readings = [()]

    def grow(size: int, source: int) -> int:
        """Add a piece of about so many nodes that starts from a source; its last node."""
        if size <= 3:
            for _ in range(size):
                reads.append((source,))
                source = len(reads) - 1
            return source
        branches = int(random.integers(2, 5)) if random.random() < 1 / 2 else 1
        if branches == 1:
            first = int(random.integers(1, size))
            return grow(size - first, grow(first, source))
        shares = random.multinomial(size - 1, random.dirichlet(np.ones(branches)))
        reads.append(tuple(sorted({grow(int(share), source) for share in shares})))
        return len(reads) - 1

    grow(count - 1, 0)
    return reads


def layered(count: int, random: np.random.Generator) -> Readings:
    """Layers as wide as eight times the fourth root of the size; a node reads one to three of the last two layers."""
    width = max(4, round(8 * count**0.25))
    reads: Readings = []
    for node in range(count):
        start = max(0, node // width * width - 2 * width)
        before = min(node // width * width, node) - start
        if not before:
            reads.append(())
            continue
        sources = start + before - 1 - random.integers(0, before, int(random.integers(1, 4)))
        reads.append(tuple(sorted(set(sources.tolist()))))
    return reads


KINDS: dict[str, Callable[[int, np.random.Generator], Readings]] = {
    "chain": chain,
    "cells": cells,
    "transformer": transformer,
    "series-parallel": series_parallel,
    "layered": layered,
}


def problem(kind: str, count: int, devices: int, seed: int = 0) -> Problem:
    """A graph of a kind on equal devices without a limit on memory.

    Args:
        kind: of `KINDS`.
        count: of nodes.
        devices: of devices.
        seed: of all that is random.
    """
    random = np.random.default_rng(seed)
    reads = KINDS[kind](count, random)
    seconds = random.lognormal(0.0, 1.0, count)
    cost = _VALUE_COST * random.lognormal(0.0, 0.5, count) * seconds.mean()
    readers: list[list[int]] = [[] for _ in range(count)]
    for node, sources in enumerate(reads):
        for source in sources:
            readers[source].append(node)
    nets = [(float(cost[node]), (node, *those)) for node, those in enumerate(readers) if those]
    edges = [(source, node) for node, sources in enumerate(reads) for source in sources]
    return Problem.of(seconds, nets, edges, [Slot()] * devices)


def module(kind: str, count: int, seed: int = 0) -> fx.GraphModule:
    """A graph of a kind whose nodes compute (4, 64): every fourth is a product with a weight, the others are pointwise.

    Args:
        kind: of `KINDS`.
        count: of nodes, besides input, output and weights.
        seed: of all that is random.
    """
    aten = torch.ops.aten
    graph, root = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    made: list[fx.Node] = []
    for i, sources in enumerate(KINDS[kind](count, np.random.default_rng(seed))):
        read = [made[source] for source in sources] or [x]
        if i % 4 == 0:
            root.register_parameter(f"w{i}", nn.Parameter(torch.ones(64, 64)))
            made.append(graph.call_function(aten.mm.default, (read[0], graph.get_attr(f"w{i}"))))
        elif len(read) > 1:
            made.append(graph.call_function(aten.add.Tensor, (read[0], read[1])))
        else:
            op = (aten.tanh.default, aten.relu.default, aten.sin.default)[i % 3]
            made.append(graph.call_function(op, (read[0],)))
    graph.output((made[-1],))
    with FakeTensorMode():
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty((64, 64) if node.op == "get_attr" else (4, 64))
    return fx.GraphModule(root, graph)
