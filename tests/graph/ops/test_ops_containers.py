"""Lists and iterators are written, joined and used up by Python's functions and methods."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opnodes import ROOT, X, Y, call, method, names
from torch import fx

from splitkit.graph.ops import effects_of, is_tuple


def after(*steps: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """The last of a chain of nodes, each made from the one before."""
    node = fx.Graph().placeholder("x")
    for step in steps:
        node = step(node)
    return node


def of(target: Any, *more: Any) -> Callable[[fx.Node], fx.Node]:
    return lambda node: node.graph.call_function(target, (node, *more))


def by(name: str, *more: Any) -> Callable[[fx.Node], fx.Node]:
    return lambda node: node.graph.call_method(name, (node, *more))


@pytest.mark.parametrize("make", [iter, reversed, enumerate, zip], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "use", [next, list, tuple, sum, min, max, zip, enumerate, any, sorted], ids=lambda f: f.__name__
)
def test_who_reads_an_iterator_uses_it_up(make: Any, use: Any) -> None:
    node = after(of(make), of(use))
    e = effects_of(node, ROOT)
    assert e.writes == e.aliases == node.args[:1]
    assert not effects_of(after(of(list), of(use)), ROOT).writes or use is next


@pytest.mark.parametrize("name", ["sort", "append", "extend", "reverse", "pop", "add", "clear", "__iadd__"])
def test_methods_of_containers_may_write_them(name: str) -> None:
    node = after(of(list), by(name))
    e = effects_of(node, ROOT)
    assert e.writes == e.aliases == node.args[:1]


@pytest.mark.parametrize("name", ["index", "count", "keys", "values", "items", "get", "copy"])
def test_methods_that_only_read_containers(name: str) -> None:
    e = effects_of(after(of(dict), by(name, 0)), ROOT)
    assert e.known and e.aliases and not (e.writes or e.impure or e.random)


def test_a_sort_that_nobody_reads_may_be_that_of_a_list() -> None:
    node = method("sort", X)
    assert not effects_of(node, ROOT).known
    node.graph.call_function(operator.getitem, (node, 0))
    assert effects_of(node, ROOT).known
    assert effects_of(after(of(torch.relu), by("sort")), ROOT).known  # of a tensor


@pytest.mark.parametrize("target", [operator.iadd, operator.iconcat, operator.ior])
def test_a_list_that_grows_holds_what_was_added(target: Any) -> None:
    e = effects_of(call(target, X, Y), ROOT)
    assert (names(e.writes), names(e.aliases)) == ({"x"}, {"x", "y"})
    node = call(target, X, Y)
    node.all_input_nodes[0].meta["val"] = torch.ones(1)
    assert names(effects_of(node, ROOT).aliases) == {"x"} or target is operator.iconcat


def test_sums_of_containers_hold_their_items() -> None:
    assert effects_of(after(of(list), of(operator.add, (1,))), ROOT).aliases
    assert effects_of(after(of(dict), of(operator.or_, {})), ROOT).aliases
    assert not effects_of(after(of(torch.relu), of(operator.or_, 1)), ROOT).aliases


def test_sums_that_share_operands_take_no_exponential_time() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(1500):
        x = graph.call_function(operator.add, (x, graph.call_function(operator.mul, (x, 2))))
    start = time.perf_counter()
    assert is_tuple(x, ROOT) is False
    assert effects_of(x, ROOT).aliases == ()
    assert time.perf_counter() - start < 1
