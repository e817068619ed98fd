from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opnodes import ROOT, X, Y, call, names
from torch import fx, nn

from splitkit.ops import effects_of, is_tuple

aten = torch.ops.aten


class Body(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("w", torch.ones(3))

    def forward(self, x: Any, y: Any) -> Any:
        return self.function(self, x, y)


BODIES = [
    # function, writes, aliases, random, impure, state written
    (lambda self, x, y: x + y * self.w, False, False, False, False, 0),
    (lambda self, x, y: (x + y).relu_(), False, False, False, False, 0),
    (lambda self, x, y: x.view(-1).relu_() + y, True, False, False, False, 0),
    (lambda self, x, y: x.view(-1), False, True, False, False, 0),
    (lambda self, x, y: F.dropout(x + y), False, False, True, False, 0),
    (lambda self, x, y: self.w.add_(x) * y, False, False, False, False, 1),
]


@pytest.mark.parametrize("row", BODIES)
def test_bodies(row: tuple[Any, ...]) -> None:
    function, writes, aliases, random, impure, state = row
    body = fx.symbolic_trace(Body(function))
    root = nn.Module()
    root.body = body
    graph = fx.Graph(root)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    attribute = graph.get_attr("body")
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    nodes = [graph.call_module("body", (x, y)), graph.call_function(wrap, (False, attribute, x, y))]
    for node in nodes:
        e = effects_of(node, root)
        assert e.known
        assert names(e.writes) == ({"x", "y"} if writes else set())
        assert names(e.aliases) == ({"x", "y"} if aliases else set())
        assert (e.random, e.impure, len(e.writes_state)) == (random, impure, state)
        assert is_tuple(node, root) is False
    loop = graph.call_function(torch.ops.higher_order.while_loop, (attribute, attribute, (x,), (y,)))
    assert names(effects_of(loop, root).aliases) == {"x", "y"}


def test_a_higher_order_operator_without_a_body_is_unknown() -> None:
    assert not effects_of(call(torch.ops.higher_order.cond, X, Y), ROOT).known


def test_exported_regions() -> None:
    class M(nn.Module):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = F.dropout(x * 2)
            return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))

    gm = torch.export.export(M(), (torch.ones(3),)).module()
    assert isinstance(gm, fx.GraphModule)
    known = [effects_of(n, gm) for n in gm.graph.nodes]
    assert all(e.known for e in known)
    assert sum(e.random for e in known) == 1
    assert not any(e.writes or e.impure for e in known)
