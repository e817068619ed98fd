"""Rows: every value goes down, each part is a band of its own, and modules keep their names."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from smallnets import loss_or_sum
from steeredpages import GPT2, SMALL, priced
from torch import nn

import splitkit as sk
from splitkit.graph.dataflow import waits_for
from splitkit.view.data.joint_ladder import ladder_rows


def thirds(gm):
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    return sk.plan(gm, lambda n: 3 * place[n] // len(place))


def rows(gm, plan):
    flow = sk.analyze(gm)
    order = sorted({plan.home(n) for n in flow.nodes})
    part = {n: order.index(plan.home(n)) for n in flow.nodes}
    return flow, part, ladder_rows(flow, part)


@pytest.mark.parametrize("name", these_first(["gpt2", "mixtral"], ["t5", "vit"]))
def test_values_go_down_and_parts_are_bands(name):
    gm = priced(name, **GPT2 if name == "gpt2" else {"layers": 2} if name == "vit" else SMALL)[0].root
    plan = thirds(gm)
    flow, part, found = rows(gm, plan)
    assert all(found.of[read] <= found.of[n] for n in flow.nodes for read in waits_for(flow, n))
    assert all(found.parts[found.of[n]] == part[n] for n in flow.nodes)
    assert list(found.parts) == sorted(found.parts) and set(found.of.values()) == set(range(len(found)))
    assert len(set(found.names)) == len(found) < len(flow.nodes) / 3


def test_names_are_those_of_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Module()
            self.body.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
            self.body.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            for layer in self.body.layers:
                x = layer(x)
            return self.head(self.body.norm(x)) * 2

    gm = sk.capture(Net(), torch.randn(3, 4))
    _, _, found = rows(gm, sk.plan(gm, lambda n: 0))
    assert found.names == ("body.layers.0", "body.layers.1", "body.norm", "head", "(top level)")
    first = next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)))
    _, _, found = rows(gm, sk.plan(gm, lambda n: int(n is not first)))
    assert found.names[:2] == ("body.layers.0", "body.layers.0 (part 2)") and found.parts[:2] == (0, 1)


def test_backward_of_a_joint_graph_stands_beside_its_forward():
    joint = sk.capture_joint(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(3, 4), loss=loss_or_sum
    )
    flow = sk.analyze(joint.graph_module)
    found = ladder_rows(flow, {})
    assert found.backward and found.backward < set(flow.nodes) and set(found.of) == set(flow.nodes)
    assert {found.of[n] for n in found.backward} == set(range(len(found)))


def flat(ops):
    """A graph without modules: chains of ``ops`` ops in all, each of 9 whose values are read inside the chain."""

    def forward(x):
        for _ in range(ops // 9):
            y = x + 1
            z = (y * 2, y * 3, y * 4)
            x = torch.relu((z[0] * z[1] + z[2]) - y)
        return x

    class Flat(nn.Module):
        def forward(self, x):
            return forward(x)

    return sk.capture(Flat(), torch.randn(3, 4))


def test_a_model_without_modules_is_divided_where_few_values_are_alive():
    gm = flat(900)
    flow, _, found = rows(gm, sk.plan(gm, lambda n: 0))
    assert all(found.of[read] <= found.of[n] for n in flow.nodes for read in waits_for(flow, n))
    sizes = [sum(1 for n in flow.nodes if found.of[n] == row) for row in range(len(found))]
    assert sum(sizes) == len(flow.nodes) and 15 < len(found) < 50 and max(sizes) <= 60
    assert found.names[0].startswith(f"(top level) · {flow.nodes[0].name} … ")
    crossing = [
        {read for n in flow.nodes if found.of[n] >= row for read in waits_for(flow, n) if found.of[read] < row}
        for row in range(1, len(found))
    ]
    assert all(len(values) == 1 for values in crossing)  # one is the least; inside a chain up to four are alive


def test_a_module_of_many_ops_is_divided_into_the_modules_inside_it():
    class Block(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(40))))

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.inner = Block(["encoder", "decoder"])

        def forward(self, x):
            return self.model.inner(x)

    gm = sk.capture(Wrapper(), torch.randn(3, 4))
    _, _, found = rows(gm, sk.plan(gm, lambda n: 0))
    assert found.names[:2] == ("model.inner.encoder.0", "model.inner.encoder.1") and len(found) == 80

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Block([])
            for half in ("left", "right"):
                setattr(self.body, half, Block([]))
                for i in range(60):
                    setattr(getattr(self.body, half), f"part{i}", nn.Linear(4, 4))

        def forward(self, x):
            return self.body(x)

    gm = sk.capture(Named(), torch.randn(3, 4))
    _, _, found = rows(gm, sk.plan(gm, lambda n: 0))
    assert found.names == ("body.left", "body.right")
