"""Copies of nodes keep all there is to a node."""

from __future__ import annotations

import torch
from torch import fx

from splitkit.engine.codegen.writer import Writer


def test_copies_keep_all_there_is_to_a_node():
    graph = fx.Graph()
    x = graph.placeholder("x", torch.Tensor)
    y = graph.call_function(torch.add, (x, [x, slice(None, x)]), {"alpha": x}, name="sum_7", type_expr=int)
    y.meta["mark"] = "mine"
    to = fx.Graph()
    write = Writer(to)
    value = write.placeholder("x", x.type)
    copied = write.copy(y, lambda node: value)
    assert (copied.name, copied.op, copied.target, copied.type) == ("sum_7", "call_function", torch.add, int)
    assert str((copied.args, copied.kwargs)) == str((y.args, y.kwargs)) and copied.all_input_nodes == [value]
    assert copied.meta == y.meta and copied.meta is not y.meta
    assert write.copy(y, lambda node: value, torch.sub, "other").name == "other"
    assert write.copy(y, lambda node: value).name not in ("sum_7", "other")  # they are taken
    to.output(copied)
    to.lint()
