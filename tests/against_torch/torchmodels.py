"""Graphs of every kind that torch's split_module splits rightly, and callbacks to split them by."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node
from torchgraphs import Label, dynamo


class Documented(nn.Module):
    """The model of torch's docstring: a module used twice, a parameter, a method with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.param = nn.Parameter(torch.rand(3, 4))
        self.linear = nn.Linear(4, 5)

    def forward(self, x, y):
        z = self.linear(x + self.param).clamp(min=0.0, max=1.0)
        w = self.linear(y).clamp(min=0.0, max=1.0)
        return z + w


class Nested(nn.Module):
    """Modules, parameters and buffers below other modules, read again late."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)))
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.rand(4))
        self.inner.register_buffer("shift", torch.rand(4))

    def forward(self, x):
        y = self.blocks(x * self.inner.scale)
        return (y + self.inner.shift).tanh() * self.inner.scale + x


class Tied(nn.Module):
    """One tensor under two names, and one read twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x @ self.embedding.weight.t()
        return self.head(F.linear(x, self.embedding.weight.t()))


class Tuples(nn.Module):
    """Ops that give tuples, and a nested output that names a value twice and an input."""

    def forward(self, x):
        left, right = torch.split(x, 2)
        values, indices = (left * right).topk(2)
        return {"sum": values + 1, "both": (indices, [left, values])}, x


class Branches(nn.Module):
    """Skips, and values that several parts read."""

    def forward(self, x, y, scale=2.0, *, bias=None):
        a, b = x + y, x * y
        c, d = a.sin() * scale, b.cos()
        e = torch.stack([c, d, a], dim=0)
        return e.sum(0) + b, c.relu() - a


class Dead(nn.Module):
    """An op that nobody reads, and inputs called as torch may call those of parts."""

    def forward(self, arg_1, arg_0):
        alive = arg_0.sin() - arg_1
        arg_1.cos()
        return alive.exp().tanh(), arg_1


class Sizes(nn.Module):
    """Sizes that ops compute with."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        rows = x.size(0) * y.size(1)
        z = self.linear(x).relu()
        z = z.reshape(rows, -1) if rows > 1 else z
        return (z.sum() * y).tanh() + rows, z.cos()


def exported(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    """An exported module, but with a plain signature: torch loses the pytrees of the exported one."""
    gm = torch.export.export(model, inputs, strict=False).module(check_guards=False)
    gm.graph.set_codegen(fx.graph.CodeGen())
    for node in gm.graph.find_nodes(op="get_attr"):  # the second name of a tied weight, which nobody reads
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def rand(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes)


def ids() -> torch.Tensor:
    return torch.randint(8, (3,))


LAYERS = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))

GRAPHS: dict[str, Callable[[], tuple[fx.GraphModule, tuple[Any, ...]]]] = {
    "documented": lambda: (fx.symbolic_trace(Documented()), (rand(3, 4), rand(3, 4))),
    "nested": lambda: (fx.symbolic_trace(Nested()), (rand(3, 4),)),
    "tied": lambda: (fx.symbolic_trace(Tied()), (ids(),)),
    "tuples": lambda: (fx.symbolic_trace(Tuples()), (rand(4, 3),)),
    "branches": lambda: (fx.symbolic_trace(Branches()), (rand(3, 4), rand(3, 4))),
    "dead": lambda: (fx.symbolic_trace(Dead()), (rand(3), rand(3))),
    "written": lambda: (fx.symbolic_trace(nn.Sequential(*LAYERS)), (rand(3, 4),)),
    "exported": lambda: (exported(Nested(), rand(3, 4)), (rand(3, 4),)),
    "exported tied": lambda: (exported(Tied(), ids()), (ids(),)),
    "exported tuples": lambda: (exported(Tuples(), rand(4, 3)), (rand(4, 3),)),
    "dynamo": lambda: dynamo(Nested(), rand(3, 4)),
    "dynamic sizes": lambda: dynamo(Sizes(), rand(6, 4), rand(3, 4), dynamic=True),
    "dynamic branches": lambda: dynamo(Branches(), rand(6, 4), rand(6, 4), rand(4), dynamic=True),
}


def three_runs(gm: fx.GraphModule) -> Label:
    """Thirds of the graph, one after the other."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    return with_producers({n: i * 3 // len(nodes) for i, n in enumerate(nodes)})


def three_levels(gm: fx.GraphModule) -> Label:
    """Thirds by depth in the graph: parts are interleaved, yet no two wait for each other."""
    depth: dict[Node, int] = {}
    for node in gm.graph.nodes:
        depth[node] = max((depth[n] + 1 for n in node.all_input_nodes), default=0)
    return with_producers({n: d * 3 // (max(depth.values()) + 1) for n, d in depth.items()})


def in_turn(gm: fx.GraphModule) -> Label:
    """Parts 0, 1, 2, 0, 1, 2 ..."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    return with_producers({n: i % 3 for i, n in enumerate(nodes)})


def with_producers(parts: dict[Node, Any]) -> Label:
    """Each getitem in the part of the node that it takes apart, as splitkit has it in any case."""
    for node in parts:
        if node.target is operator.getitem:
            parts[node] = parts.get(node.args[0], parts[node])
    return parts.__getitem__


CUTS = [three_runs, three_levels]

DEALT = ["documented", "tuples", "exported tuples"]
