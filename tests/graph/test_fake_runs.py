"""Values that a run on fakes notes are those of their node, whatever later nodes do to them."""

from __future__ import annotations

import torch
from handgraphs import graph_of
from torch import nn

from splitkit.graph.fake_runs import propagate
from splitkit.graph.node_values import nodes_without_values


def test_a_later_change_of_the_shape_is_not_this_nodes():
    def write(g):
        made = g.call_function(torch.sin, (g.placeholder("x"),))
        g.output((made, g.call_method("unsqueeze_", (made, 0))))

    gm = graph_of(write)
    assert [node.name for node in nodes_without_values(gm.graph)] == ["x", "sin", "unsqueeze_"]
    propagate(gm, torch.ones(3))
    shapes = {node.name: tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.op != "output"}
    assert shapes == {"x": (3,), "sin": (3,), "unsqueeze_": (1, 3)} and nodes_without_values(gm.graph) == []


def test_nothing_real_is_changed():
    norm = nn.BatchNorm1d(2)
    gm = torch.fx.symbolic_trace(nn.Sequential(norm))
    given = torch.ones(4, 2)
    propagate(gm, given)
    assert norm.num_batches_tracked == 0 and torch.equal(given, torch.ones(4, 2))
    assert [node.op for node in gm.graph.nodes if "val" in node.meta] == ["placeholder", "call_module"]
