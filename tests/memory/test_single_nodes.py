"""The lower bounds of all single nodes, computed in one pass."""

from __future__ import annotations

import pytest
from capturedmodels import captured_example

import splitkit as sk
from splitkit.memory.graph_memory import GraphMemory
from splitkit.memory.saved_storages import activations


@pytest.mark.parametrize("training", [True, False])
def test_single_nodes_are_the_lower_bound_of_each_node(training):
    gm = captured_example("gpt2", layers=1, width=32, heads=2, vocab=200).graph
    flow = sk.analyze(gm)
    order = GraphMemory(flow, activations(gm), training).order([flow.nodes])
    least = [order.lower_bound(i, i + 1) for i in range(order.length)]
    found = [[int(column[i]) for column in order.single_nodes()] for i in range(order.length)]
    assert found == [[s.parameters, s.gradients, s.saved, s.temporary] for s in least]
