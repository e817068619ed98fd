"""The contract on random graphs: whatever torch's split_module makes of them, splitkit's makes, name for name."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from campaigns import every_third
from torch import fx, nn
from torchgraphs import TUPLE_RETURN, both, called, written

NAMES = ["x", "arg_0", "arg_1", "add", "getitem", "submod_0", "self_1", "size", "in_1", "a_b", "_x", "cat_1"]


class Writer:
    """Appends random nodes, some with awkward names, to a graph; one value after the other."""

    def __init__(self, choose: random.Random) -> None:
        self.choose, self.graph, self.attributes = choose, fx.Graph(), {}
        self.values = [self.graph.placeholder(name) for name in choose.sample(NAMES, 3)]

    def value(self):
        return self.choose.choice(self.values[-6:])

    def add(self, op, target, *args, **kwargs):
        name = self.choose.choice(NAMES) if self.choose.random() < 0.4 else None
        type_expr = self.choose.choice([None, torch.Tensor])
        self.values.append(self.graph.create_node(op, target, args, kwargs, name, type_expr))
        return self.values[-1]

    def attribute(self):
        target = self.choose.choice(["w", "inner.w", "state"])
        if target not in self.attributes:
            self.attributes[target] = self.graph.get_attr(target)
        self.add("call_function", torch.add, self.value(), self.attributes[target])

    def module(self):
        self.add("call_module", self.choose.choice(["inner.linear", "linear", "deep.0.0"]), self.value())

    def method(self):
        self.add("call_method", self.choose.choice(["sin", "relu"]), self.value())

    def keywords(self):
        self.add("call_function", torch.add, input=self.value(), other=self.value(), alpha=2)

    def nested(self):
        self.add("call_function", torch.stack, [self.value(), self.value()], dim=0)

    def parts_of_a_tuple(self):
        self.add("call_function", torch.chunk, self.value(), 2)
        self.add("call_function", operator.getitem, self.values.pop(), 0)

    def operators(self):
        self.add("call_function", self.choose.choice([operator.add, operator.mul]), self.value(), self.value())


def random_graph(choose: random.Random) -> fx.GraphModule:
    root = nn.Module()
    root.w, root.linear, root.inner = nn.Parameter(torch.ones(2)), nn.Linear(2, 2), nn.Module()
    root.inner.w, root.inner.linear = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    root.deep = nn.Sequential(nn.Sequential(nn.Tanh()))
    root.register_buffer("state", torch.ones(2))
    writer = Writer(choose)
    kinds = [writer.attribute, writer.module, writer.method, writer.keywords, writer.nested, writer.operators]
    for _ in range(choose.randint(4, 16)):
        choose.choice([*kinds, writer.parts_of_a_tuple])()
    outputs = [writer.value() for _ in range(3)]
    writer.graph.output(choose.choice([outputs[0], tuple(outputs), {"a": outputs[0], "b": outputs[1:]}]))
    return fx.GraphModule(root, writer.graph)


def random_parts(choose: random.Random, gm: fx.GraphModule):
    """A part that no earlier one waits for; new parts are numbered as they appear, as torch's order needs it."""
    parts: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            first = max((parts.get(n, 0) for n in node.all_input_nodes), default=0)
            parts[node] = choose.randint(first, min(3, max(parts.values(), default=-1) + 1))
            if node.target is operator.getitem:
                parts[node] = parts[node.args[0]]
    return parts


def random_flags(choose: random.Random) -> dict[str, object]:
    flags = {"keep_original_node_name": choose.random() < 0.5, "keep_original_input_name": choose.random() < 0.5}
    if TUPLE_RETURN:
        flags["tuple_return"] = choose.random() < 0.5
    return flags


@pytest.mark.parametrize("seed", every_third(range(200), 1))
def test_a_random_graph(seed):
    choose = random.Random(seed)
    gm = random_graph(choose)
    parts, flags = random_parts(choose, gm), random_flags(choose)
    torchs, ours = both(gm, parts.get, keep_original_order=True, **flags)
    assert called(ours) == called(torchs)
    assert written(ours) == written(torchs)
    for part in called(torchs):
        assert ours.get_submodule(part).code == torchs.get_submodule(part).code
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in torchs.named_modules()]
    assert list(ours.state_dict()) == list(torchs.state_dict())
