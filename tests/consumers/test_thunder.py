"""lightning-thunder's splitter, which is not installed here: its callback, its call, and what it does to the result.

Mirrored from thunder/dynamo/splitter.py: regions of supported and unsupported nodes in graph order, a callback with a
memory, names that it parses and changes, a deep copy.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.policies import BySupport

# Dynamo 2.11 refuses a graph that enters and leaves autocast, whoever has cut it out.
COMPILES_AUTOCAST = torch.__version__ >= "2.13"


class Model(nn.Module):
    """Supported ops with ``sinc`` and ``lgamma`` between, and a tuple that crosses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x, y = self.a(x).relu().chunk(2, -1)
        z = torch.sinc(torch.cat([x, y], -1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b(z)
        return torch.lgamma(z.float().abs() + 1).sum() + x.mean(), y


def is_supported(node):
    return "sinc" not in str(node.target) and "lgamma" not in str(node.target)


@pytest.fixture
def graph():
    caught = []

    def backend(gm, example):
        caught.append((gm, example))
        return gm

    torch.compiler.reset()
    model, x = Model(), torch.randn(4, 8)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    ((gm, example),) = caught
    return gm, example, model, x


def thunder_callback(asked):
    """Counts the changes between supported and unsupported; must be asked once a node, in graph order."""
    state = {"previous": None, "count": 0}
    supported = set()

    def callback(node):
        assert node.op not in ("placeholder", "get_attr", "output") and node not in asked
        asked.append(node)
        if state["previous"] is not None and state["previous"] != is_supported(node):
            state["count"] += 1
        state["previous"] = is_supported(node)
        if is_supported(node):
            supported.add(state["count"])
        return state["count"]

    return callback, supported


def test_the_call_and_what_is_done_with_the_result(graph):
    gm, example, model, x = graph
    asked = []
    callback, supported = thunder_callback(asked)
    original = sk.split_module(
        gm, root_m=None, split_callback=callback, keep_original_order=True, keep_original_node_name=True
    )
    assert asked == [n for n in gm.graph.nodes if n.op.startswith("call_")]
    assert all(m.graph.find_nodes(op="output") for m in (original, *original.children()))
    split = copy.deepcopy(original)
    renamed = []
    for node in list(split.graph.nodes):
        if node.name.startswith("submod"):
            assert node.op == "call_module" and node.target == node.name
            part = getattr(split, node.name)
            for inner in part.graph.nodes:
                if inner.op == "placeholder":
                    assert isinstance(inner.meta["example_value"], torch.Tensor)
                elif inner.op == "output":
                    assert all("example_value" in n.meta for n in inner.all_input_nodes)
            kind = "thunder" if int(node.name.replace("submod_", "")) in supported else "inductor"
            name = node.name.replace("submod", kind)
            split.add_submodule(name, torch.compile(part, backend="aot_eager") if COMPILES_AUTOCAST else part)
            split.delete_submodule(node.name)
            node.target = node.name = name
            renamed.append(name)
    split.recompile()
    assert renamed == ["thunder_0", "inductor_1", "thunder_2", "inductor_3", "thunder_4"]
    for got, expected in zip(split(*example), model(x), strict=True):
        torch.testing.assert_close(got, expected)
    names = {n.name for part in original.children() for n in part.graph.nodes if n.op == "call_function"}
    assert {n.name for n in gm.graph.nodes if "sinc" in n.name or "lgamma" in n.name} <= names


def test_the_policy_makes_as_many_parts_as_the_callback_or_fewer(graph):
    gm, example, model, x = graph
    made = sk.split(gm, BySupport(is_supported, unsupported="parts"))
    assert list(made.parts) == [0, 1, 2, 3, 4]
    for key, part in made.parts.items():
        assert {is_supported(n) for n in made.subgraphs[key].nodes if n in made.flow.nodes} == {key % 2 == 0}, part
    for got, expected in zip(made(*example), model(x), strict=True):
        assert torch.equal(got, expected)
