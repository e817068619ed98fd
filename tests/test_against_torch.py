"""Where torch's split_module gives a wrong result in silence: its outcome beside ours."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module as torch_split_module

import splitkit as sk
from splitkit.testing import assert_same


def graph_of(write):
    """A GraphModule around a function that writes a graph and names its nodes."""
    graph = fx.Graph()
    root = nn.Module()
    root.register_buffer("state", torch.zeros(4, 2))

    def call(name, target, *args):
        op = "call_method" if isinstance(target, str) else "call_function"
        return graph.create_node(op, target, args, name=name)

    graph.output(write(call, graph))
    return fx.GraphModule(root, graph)


def a_write_before_a_read(call, graph):
    x = graph.placeholder("x")
    call("p0", "add_", x, 1)
    return call("p1", torch.mul, x, 2)


def a_buffer_write_before_its_read(call, graph):
    x, state = graph.placeholder("x"), graph.get_attr("state")
    call("p0", "add_", state, 1)
    return call("p1", torch.add, x, state)


def a_write_into_a_cache_before_it_is_read(call, graph):
    x, state = graph.placeholder("x"), graph.get_attr("state")
    call("p0", torch.ops.aten.index_copy_.default, state, 0, call("p0_b", torch.arange, 4), x)
    return call("p1", torch.sum, state, 0)


def a_write_through_a_view_before_the_base_is_read(call, graph):
    x = graph.placeholder("x")
    view = call("p0", "view", x, -1)
    written = call("p1", "add_", view, 1)
    return call("p2", torch.sum, x), written


def independent_random_parts(call, graph):
    x = graph.placeholder("x")
    return call("p0", torch.rand_like, x), call("p1", torch.rand_like, x)


def grad_mode_that_two_parts_set(call, graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call("p0_off", torch._C._set_grad_enabled, False)
    a = call("p0", torch.sin, x)
    call("p1_on", torch._C._set_grad_enabled, True)
    return a, call("p1", torch.tan, y)


CASES = [
    a_write_before_a_read,
    a_buffer_write_before_its_read,
    a_write_into_a_cache_before_it_is_read,
    a_write_through_a_view_before_the_base_is_read,
    independent_random_parts,
    grad_mode_that_two_parts_set,
]


def label(node):
    return int(node.name[1])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_torch_is_wrong_in_silence_and_splitkit_is_right(case):
    gm = graph_of(case)
    inputs = [torch.ones(4, 2) for n in gm.graph.nodes if n.op == "placeholder"]
    torchs, ours = torch_split_module(gm, None, label), sk.split_module(gm, None, label)
    assert not sk.compare(gm, torchs, *inputs).same, "torch has been mended: say so in the README"
    assert_same(gm, ours, *inputs)


def test_a_circle_through_a_write_is_wrong_in_silence_in_torch_and_refused_here():
    class Model(nn.Module):
        def forward(self, x):
            a = x + 1
            x.mul_(2)
            return a, x - 3

    gm = fx.symbolic_trace(Model())
    labels = {"add": 0, "mul_": 1, "sub": 0}
    torchs = torch_split_module(gm, None, lambda n: labels[n.name], keep_original_order=True)
    assert not sk.compare(gm, torchs, torch.ones(2)).same
    with pytest.raises(sk.CycleError, match="sub must run after the effect or read of mul_"):
        sk.split_module(gm, None, lambda n: labels[n.name])
    flow = sk.analyze(gm)
    assert_same(gm, sk.split(gm, sk.refine(flow, sk.Plan.of({n: labels[n.name] for n in flow.nodes}))), torch.ones(2))


def test_modules_whose_flat_names_collide():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Module()
            self.a.b = nn.Linear(2, 2)
            self.a_b = nn.Linear(2, 2)

        def forward(self, x):
            return self.a_b(self.a.b(x))

    gm = fx.symbolic_trace(Model())
    x = torch.ones(1, 2)
    assert not torch.equal(torch_split_module(gm, None, lambda n: 0)(x), gm(x))
    assert torch.equal(sk.split_module(gm, None, lambda n: 0)(x), gm(x))


def test_a_part_run_alone_leaves_grad_mode_off_in_torch():
    gm = graph_of(grad_mode_that_two_parts_set)
    torch_split_module(gm, None, label).submod_0(torch.ones(1))
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    sk.split_module(gm, None, label).submod_0(torch.ones(1))
    assert torch.is_grad_enabled()
