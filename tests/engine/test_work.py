"""The work of a split grows with nodes and edges, whatever the graph: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
from campaigns import some_of_all
from longgraphs import SHAPES
from torch import fx
from torch.fx import Node
from worklines import lines_run

import splitkit as sk

LENGTH = 12


def _labels(gm: fx.GraphModule, part: Callable[[int, int], int]) -> dict[Node, int]:
    placed = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    return {n: part(i, len(placed)) for i, n in enumerate(placed)}


def in_many(gm: fx.GraphModule) -> object:
    """A part for every four nodes, each with its parameters."""
    return sk.split(gm, _labels(gm, lambda i, n: i // 4))


def as_they_stand(gm: fx.GraphModule) -> object:
    """State ops and attributes where the graph has them."""
    return sk.split_module(gm, None, _labels(gm, lambda i, n: i // 4).__getitem__, keep_original_order=True)


def visited(gm: fx.GraphModule) -> object:
    """Parts in a cycle, visited several times."""
    return sk.split(gm, _labels(gm, lambda i, n: i % 2), on_cycle="refine", lazy=True)


WAYS: Mapping[str, Callable[[fx.GraphModule], object]] = {
    run.__name__: run for run in (in_many, as_they_stand, visited)
}


STATE_OPS = ("regions", "saved_modes")
"""The shapes that each way treats in code of its own."""
PAIRS = [*some_of_all([shape for shape in SHAPES if shape not in STATE_OPS], WAYS, ()), *product(STATE_OPS, WAYS)]


@pytest.mark.parametrize(("shape", "way"), PAIRS)
def test_twice_the_graph_is_twice_the_work(shape, way):
    """Shapes without state ops in one of the ways, in turn; in the others as a campaign."""
    make, run = SHAPES[shape], WAYS[way]
    run(make(4))  # what is found once a process
    short, long = make(LENGTH), make(2 * LENGTH)
    one, two = lines_run(lambda: run(short)), lines_run(lambda: run(long))
    assert two.total() < 2.15 * one.total()
    # A walk of another kind shows first at its own line.
    grown = {line: (one[line], count) for line, count in two.items() if count > LENGTH and count > 3 * one[line] + 20}
    assert not grown
