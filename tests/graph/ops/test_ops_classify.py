from __future__ import annotations

import random as python_random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opnodes import ROOT, X, Y, call, module, names, stranger
from torch import fx, nn

from splitkit.graph.ops import effects_of, is_tuple
from splitkit.graph.ops.facts import PURE

aten = torch.ops.aten


def test_nodes_that_compute_nothing() -> None:
    graph = fx.Graph()
    for node in (graph.placeholder("x"), graph.get_attr("w"), graph.output(())):
        assert effects_of(node, ROOT) is PURE


@pytest.mark.parametrize("op", ["call_function", "call_method"])
def test_the_unknown_may_do_anything(op: str) -> None:
    for target in (stranger, python_random.random) if op == "call_function" else ("frobnicate",):
        e = effects_of(call(target, X, [Y], op=op), ROOT)
        assert (names(e.writes), names(e.aliases)) == ({"x", "y"}, {"x", "y"})
        assert e.random and e.impure and not e.known


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


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.ones(3)

    def forward(self, x: Any) -> Any:
        return x + self.t


@pytest.mark.parametrize("traced", [True, False])
def test_a_plain_tensor_of_a_called_module_is_read(traced: bool) -> None:
    plain = Plain()
    node, root = module(fx.symbolic_trace(plain) if traced else plain)
    assert any(t is root.m.t for t in effects_of(node, root).reads_state)


def test_a_module_that_is_called_many_times_is_looked_into_once() -> None:
    inner: nn.Module = Plain()
    inner = fx.symbolic_trace(inner)
    for _ in range(40):
        root = nn.Module()
        root.m = inner
        graph = fx.Graph(root)
        x = graph.placeholder("x")
        graph.output(graph.call_module("m", (graph.call_module("m", (x,)),)))
        inner = fx.GraphModule(root, graph)
    node, root = module(inner)
    start = time.perf_counter()
    assert len(effects_of(node, root).reads_state) == 1
    assert time.perf_counter() - start < 1


def test_it_is_quick() -> None:
    node = call(aten.addmm.default, X, Y, X)
    effects_of(node, ROOT)
    start = time.perf_counter()
    for _ in range(2000):
        effects_of(node, ROOT)
    assert (time.perf_counter() - start) / 2000 < 50e-6
