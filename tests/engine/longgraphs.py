"""Graphs of any length, one for each kind of walk that an analysis could be tempted to repeat at every node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch


def _made(build: Callable[[fx.Graph, Node], Node], root: nn.Module | None = None) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule(root or nn.Module(), graph)


def _loop(step: Callable[[fx.Graph, Node, int], Node], length: int) -> fx.GraphModule:
    def build(graph: fx.Graph, x: Node) -> Node:
        for i in range(length):
            x = step(graph, x, i)
        return x

    return _made(build)


def sums(length: int) -> fx.GraphModule:
    """``x = x + relu(x)``."""
    return _loop(lambda g, x, i: g.call_function(operator.add, (x, g.call_function(torch.relu, (x,)))), length)


def sums_behind(length: int) -> fx.GraphModule:
    """``x = relu(x) + x``, with the sum as the second operand of the next."""
    return _loop(lambda g, x, i: g.call_function(operator.add, (g.call_function(torch.relu, (x,)), x)), length)


def members(length: int) -> fx.GraphModule:
    """``x = x[0]``, and a method of each."""

    def step(g: fx.Graph, x: Node, i: int) -> Node:
        item = g.call_function(operator.getitem, (x, 0))
        return g.call_method("relu", (item,)) if i % 2 else item

    return _loop(step, length)


def members_only(length: int) -> fx.GraphModule:
    """``x = x[0]`` again and again, and a method of each."""

    def build(g: fx.Graph, x: Node) -> Node:
        items = []
        for _ in range(length):
            x = g.call_function(operator.getitem, (x, 0))
            items.append(g.call_method("add", (x, 1)))
        return g.call_function(torch.stack, (items,))

    return _made(build)


def fields(length: int) -> fx.GraphModule:
    """``x = x.data``, and a method of each that an array has, too."""

    def build(g: fx.Graph, x: Node) -> Node:
        items = []
        for _ in range(length):
            x = g.call_function(getattr, (x, "data"))
            items.append(g.call_method("sort", (x,)))
            items.append(g.call_method("clip", (x, items[-1], items[-1])))
        return g.call_function(torch.stack, (items,))

    return _made(build)


def methods(length: int) -> fx.GraphModule:
    """``x = x.clip(low, high)``: a numpy array would take the last as the place to write to."""

    def step(g: fx.Graph, x: Node, i: int) -> Node:
        return g.call_method("clip", (x, g.call_method("min", (x,)), g.call_method("max", (x,))))

    return _loop(step, length)


def sorts(length: int) -> fx.GraphModule:
    """``x = x.sort(); x = x.add(1)``: in place, if it is a list."""

    def step(g: fx.Graph, x: Node, i: int) -> Node:
        twice = g.call_function(operator.mul, (g.call_method("sort", (x,)), 2))
        return g.call_method("add", (twice, 1))

    return _loop(step, length)


def tuples(length: int) -> fx.GraphModule:
    """``xs = xs + (relu(xs[-1]),)``."""

    def build(g: fx.Graph, x: Node) -> Node:
        whole = g.call_function(torch.chunk, (x, 2))
        for _ in range(length):
            last = g.call_function(operator.getitem, (whole, -1))
            whole = g.call_function(operator.add, (whole, (g.call_function(torch.relu, (last,)),)))
        return g.call_function(operator.getitem, (whole, -1))

    return _made(build)


def lists(length: int) -> fx.GraphModule:
    """A list that grows in place."""

    def build(g: fx.Graph, x: Node) -> Node:
        whole = g.call_function(list, ((x,),))
        for _ in range(length):
            whole = g.call_function(operator.iadd, (whole, [g.call_function(torch.relu, (x,))]))
        return g.call_function(torch.stack, (whole,))

    return _made(build)


def wide(length: int) -> fx.GraphModule:
    """All read one value, and one reads all."""

    def build(g: fx.Graph, x: Node) -> Node:
        return g.call_function(torch.stack, ([g.call_function(torch.relu, (x,)) for _ in range(length)],))

    return _made(build)


def inputs(length: int) -> fx.GraphModule:
    """An input for every node, as Dynamo lifts parameters."""

    def build(g: fx.Graph, x: Node) -> Node:
        for y in [g.placeholder(f"p{i}") for i in range(length)]:
            x = g.call_function(torch.add, (x, y))
        return x

    return _made(build)


def writes(length: int) -> fx.GraphModule:
    """Each writes the input and each reads it."""
    return _loop(lambda g, x, i: g.call_function(torch.relu, (g.call_method("add_", (x, 1)),)), length)


def writes_of_one(length: int) -> fx.GraphModule:
    """Views of one input that are written, and read by others."""

    def build(g: fx.Graph, x: Node) -> Node:
        read = []
        for _ in range(length):
            g.call_method("mul_", (g.call_method("view", (x, -1)), 2))
            read += [g.call_function(torch.sin, (x,)), g.call_function(torch.cos, (x,))]
        return g.call_function(torch.stack, (read,))

    return _made(build)


def random(length: int) -> fx.GraphModule:
    """Random numbers, printed."""

    def build(g: fx.Graph, x: Node) -> Node:
        for _ in range(length):
            x = g.call_function(torch.add, (x, g.call_function(torch.rand_like, (x,))))
            g.call_function(print, (x,))
        return x

    return _made(build)


def regions(length: int) -> fx.GraphModule:
    """Autocast and grad mode around every other node."""

    def build(g: fx.Graph, x: Node) -> Node:
        for i in range(length):
            enter = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
            g.call_function(_torch.SET_GRAD, (bool(i % 2),))
            x = g.call_function(torch.matmul, (x, x))
            g.call_function(_torch.EXIT_AUTOCAST, (enter,))
            x = g.call_function(torch.relu, (x,))
        g.call_function(_torch.SET_GRAD, (True,))
        return x

    return _made(build)


def saved_modes(length: int) -> fx.GraphModule:
    """The grad mode is read, overwritten and put back around each node."""

    def build(g: fx.Graph, x: Node) -> Node:
        for _ in range(length):
            before = g.call_function(torch.is_grad_enabled)
            g.call_function(_torch.SET_GRAD, (False,))
            x = g.call_function(torch.relu, (x,))
            g.call_function(_torch.SET_GRAD, (before,))
        return x

    return _made(build)


def _nested(length: int, leaf: Callable[[], nn.Module]) -> nn.Module:
    """``blocks.0.inner.leaf`` ..."""
    root = nn.Module()
    root.blocks = nn.ModuleList(nn.ModuleDict({"inner": nn.ModuleDict({"leaf": leaf()})}) for _ in range(length))
    return root


def parameters(length: int) -> fx.GraphModule:
    """A parameter with a long name for every node."""

    def build(g: fx.Graph, x: Node) -> Node:
        for i in range(length):
            x = g.call_function(torch.mul, (x, g.get_attr(f"blocks.{i}.inner.leaf.weight")))
        return x

    return _made(build, _nested(length, lambda: nn.LayerNorm(2)))


def one_parameter(length: int) -> fx.GraphModule:
    """One parameter that every node reads, and a buffer that every node writes."""

    def build(g: fx.Graph, x: Node) -> Node:
        for _ in range(length):
            x = g.call_function(torch.mul, (x, g.get_attr("blocks.0.inner.leaf.weight")))
            g.call_method("add_", (g.get_attr("blocks.0.inner.leaf.running_mean"), 1))
        return x

    return _made(build, _nested(1, lambda: nn.BatchNorm1d(2)))


def modules(length: int) -> fx.GraphModule:
    """A module for every node."""

    def build(g: fx.Graph, x: Node) -> Node:
        for i in range(length):
            x = g.call_module(f"blocks.{i}.inner.leaf", (x,))
        return x

    return _made(build, _nested(length, lambda: nn.BatchNorm1d(2)))


def one_module(length: int) -> fx.GraphModule:
    """One graph, as long as the graph that calls it, is called by every node."""
    root = nn.Module()
    root.body = _loop(lambda g, x, i: g.call_function(torch.relu, (x,)), length)

    def build(g: fx.Graph, x: Node) -> Node:
        for _ in range(length):
            x = g.call_module("body", (x,))
        return g.call_function(operator.getitem, (x, 0))

    return _made(build, root)


class _Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def opaque(length: int) -> fx.GraphModule:
    """Code that nothing is known of, among ops and attributes."""

    def build(g: fx.Graph, x: Node) -> Node:
        for i in range(length):
            x = g.call_module(f"blocks.{i}.inner.leaf", (x,))
            x = g.call_function(torch.mul, (x, g.get_attr("w")))
        return x

    root = _nested(length, _Leaf)
    root.w = nn.Parameter(torch.ones(2))
    return _made(build, root)


def sizes(length: int) -> fx.GraphModule:
    """Each reads the size of the one before it."""

    def step(g: fx.Graph, x: Node, i: int) -> Node:
        size = g.call_method("size", (x,))
        return g.call_method("view", (g.call_function(torch.relu, (x,)), size))

    return _loop(step, length)


def symbolic(length: int) -> fx.GraphModule:
    """Values with a size that is a symbol, and the symbol as a node."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = torch.cat([x, x])[: x.shape[0]].relu()
        return x

    return make_fx(chain, tracing_mode="symbolic")(torch.ones(4))


def same_names(length: int) -> fx.GraphModule:
    """Modules whose names are one when their dots are underscores."""
    root = nn.Module()
    root.a = nn.ModuleDict({f"b_{i}": nn.ReLU() for i in range(length)})
    for i in range(length):
        setattr(root, f"a_b_{i}", nn.ReLU())

    def build(g: fx.Graph, x: Node) -> Node:
        for i in range(length):
            x = g.call_module(f"a.b_{i}", (g.call_module(f"a_b_{i}", (x,)),))
        return x

    return _made(build, root)


SHAPES: Mapping[str, Callable[[int], fx.GraphModule]] = {
    make.__name__: make
    for make in (
        *(sums, sums_behind, members, members_only, fields, methods, sorts, tuples, lists, wide, inputs, writes),
        *(writes_of_one, random, regions, saved_modes, parameters, one_parameter, modules, one_module, opaque, sizes),
        *(symbolic, same_names),
    )
}
