"""Which nodes of a parent only check what a call gives it."""

from __future__ import annotations

import torch
from handgraphs import graph_of

from splitkit.graph.input_overlap import CHECKS, check_nodes, refuse_objects


def test_checks_and_what_is_read_for_them_alone():
    def write(g):
        x = g.placeholder("x")
        alone, both, computed = g.get_attr("alone"), g.get_attr("both"), g.call_function(torch.sin, (x,))
        inside = g.call_function(getattr, (alone, "data"))
        g.call_function(refuse_objects, (inside, computed))
        g.call_function(CHECKS[0], ([both, x],))
        g.output(g.call_function(torch.add, (x, both)))

    root = torch.nn.Module()
    root.alone, root.both = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    names = {node.name for node in check_nodes(graph_of(write, root).graph)}
    assert names == {"alone", "getattr_1", refuse_objects.__name__, getattr(CHECKS[0], "__name__", "refuse_shared")}
