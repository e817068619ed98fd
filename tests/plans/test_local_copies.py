"""The part that reads a size or a number computes it again, with work that grows linearly."""

from __future__ import annotations

import operator
import sys

import pytest
import torch
from handgraphs import graph_of
from torch import fx

import splitkit as sk
from splitkit.plans.rewrite import is_small, recompute_locally, recompute_sizes
from splitkit.testing import assert_same


def test_a_long_chain_of_numbers_needs_no_deep_recursion():
    def write(g):
        x = g.placeholder("x")
        y = g.call_function(torch.sin, (x,))
        y.meta["val"] = torch.ones(())
        number = g.call_method("item", (y,))
        number.meta["val"] = 1.0
        for _ in range(2000):
            number = g.call_function(operator.add, (number, 1.0))
            number.meta["val"] = 1.0
        g.output(g.create_node("call_function", torch.mul, (y, number), name="last"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, lambda node: int(node.name == "last")), torch.ones(()))


def test_the_work_grows_with_the_number_of_sizes_of_one_tensor():
    def calls(count):
        def write(g):
            x = g.placeholder("x")
            y = g.call_function(torch.sin, (x,))
            for _ in range(count):
                size = g.call_method("size", (y,))
                x = g.call_method("view", (x, size))
                y.meta["val"] = x.meta["val"] = torch.ones(2)
                size.meta["val"] = torch.Size([2])
            g.output(x)

        gm = graph_of(write)
        part = {n: 0 if n.target == "size" else i // 8 for i, n in enumerate(gm.graph.nodes)}
        seen = [0]
        sys.setprofile(lambda frame, event, arg: seen.__setitem__(0, seen[0] + 1))
        try:
            sk.plan(gm, part.__getitem__)
        finally:
            sys.setprofile(None)
        return seen[0]

    assert calls(800) < 5 * calls(200)


def sizes(write, places):
    """Node -> its parts, once each small value is computed by the parts that read it."""
    flow = sk.analyze(graph_of(write))
    found = {node: (places[node.name],) for node in flow.nodes}
    recompute_locally(flow, found)
    return {node.name: keys for node, keys in found.items()}


def size_of(g, name, tensor):
    size = g.create_node("call_method", "size", (tensor,), name=name)
    size.meta["val"] = torch.Size([2])
    return size


def value_of(g, name, target, *args):
    node = g.create_node("call_function", target, args, name=name)
    node.meta["val"] = torch.ones(2)
    return node


def test_a_size_goes_to_its_reader_where_the_tensor_is_there_already():
    def write(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        made = value_of(g, "made", torch.sin, x)
        size = size_of(g, "size", made)
        both = value_of(g, "both", torch.add, made, y)  # so that part 1 has what is asked
        seen = value_of(g, "seen", torch.mul, y, both)
        g.output((g.create_node("call_method", "view", (seen, size), name="view"), both, made))

    assert sizes(write, {"made": 0, "size": 0, "both": 1, "seen": 1, "view": 1})["size"] == (1,)
    assert sizes(write, {"made": 0, "size": 0, "both": 0, "seen": 1, "view": 1})["size"] == (
        0,
    )  # made would cross for it
    assert sizes(write, {"made": 0, "size": 0, "both": 1, "seen": 0, "view": 0})["size"] == (0,)  # it is there


def test_a_size_that_others_read_at_home_stays_there_as_well():
    def write(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        made = value_of(g, "made", torch.sin, x)
        size = size_of(g, "size", made)
        here = g.create_node("call_method", "view", (made, size), name="here")
        there = g.create_node("call_method", "view", (value_of(g, "both", torch.add, made, y), size), name="there")
        g.output((here, there))

    assert sizes(write, {"made": 0, "size": 0, "here": 0, "both": 1, "there": 1})["size"] == (0, 1)


def test_a_size_that_is_asked_before_a_write_is_not_asked_again():
    """`resize_` makes it another one; and a copy of what must run before it might close a cycle of parts."""

    def write(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        made = value_of(g, "made", torch.sin, x)
        size = size_of(g, "size", made)
        written = g.create_node("call_method", "resize_", (made, 3), name="written")
        both = value_of(g, "both", torch.add, made, y)
        g.output((written, g.create_node("call_method", "view", (both, size), name="view")))

    assert sizes(write, {"made": 0, "size": 0, "written": 0, "both": 1, "view": 1})["size"] == (0,)


@pytest.mark.parametrize(
    ("value", "small"),
    [
        (torch.Size([2]), True), (1.5, True), (3, True), (True, True), (torch.float32, True),
        (torch.device("cpu"), True),
        (slice(1), True), ((1, 2.0), True), ((), True), ((1, "a"), False), ([1], False), (torch.ones(()), False),
        ((torch.ones(1),), False),
    ],
)  # fmt: skip
def test_what_is_small_by_its_value(value, small):
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value
    assert is_small(node) == small


@pytest.mark.parametrize(
    ("op", "target", "args", "kwargs", "small"),
    [
        ("call_method", "size", (), {}, True),
        ("call_method", "size", (0,), {}, False),
        ("call_method", "size", (), {"dim": 0}, False),
        ("call_method", "view", (), {}, False),
        ("call_function", getattr, ("shape",), {}, True),
        ("call_function", getattr, ("device",), {}, True),
        ("call_function", getattr, ("T",), {}, False),
        ("call_function", torch.sin, ("shape",), {}, False),
    ],
)
def test_what_is_small_where_no_value_is_known(op, target, args, kwargs, small):
    graph = fx.Graph()
    assert is_small(graph.create_node(op, target, (graph.placeholder("x"), *args), kwargs)) == small


def asks(write, places):
    flow = sk.analyze(graph_of(write))
    plan = recompute_sizes(flow, sk.Plan.of({node: places[node.name] for node in flow.nodes}))
    return {node.name: keys for node, keys in plan.items()}


def test_readers_of_a_whole_size_ask_again():
    def write(g, target="size", *args):
        x = g.placeholder("x")
        made = value_of(g, "made", torch.sin, x)
        size = g.create_node("call_method" if target == "size" else "call_function", target, (made, *args), name="size")
        here = g.create_node("call_function", torch.add, (made, size), name="here")
        g.output((here, g.create_node("call_method", "view", (x, size), name="there")))

    places = {"made": 0, "size": 0, "here": 0, "there": 1}
    assert asks(write, places)["size"] == (0, 1)
    assert asks(lambda g: write(g, getattr, "shape"), places)["size"] == (0, 1)
    assert asks(lambda g: write(g, getattr, "device"), places)["size"] == (0,)
    assert asks(write, places | {"here": 1})["size"] == (1,)  # nobody reads it at home any more


def test_a_size_that_is_asked_before_its_tensor_is_resized_crosses():
    def write(g):
        x = g.placeholder("x")
        made = value_of(g, "made", torch.sin, x)
        size = size_of(g, "size", made)
        written = g.create_node("call_method", "resize_", (made, 3), name="written")
        g.output((written, g.create_node("call_method", "view", (x, size), name="view")))

    assert asks(write, {"made": 0, "size": 0, "written": 0, "view": 1})["size"] == (0,)
