"""Where torch's split_module gives a wrong result in silence: its outcome beside ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.passes.split_module import split_module as torch_split_module
from torchgraphs import both, by_name, called, graph_of, label, traced

import splitkit as sk
from splitkit.testing import assert_same


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


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_the_result_is_another(case):
    gm = graph_of(case)
    inputs = [torch.ones(4, 2) for n in gm.graph.nodes if n.op == "placeholder"]
    torchs, ours = both(gm, label)
    assert not sk.compare(gm, torchs, *inputs).same, "torch has been mended: say so in the README"
    assert_same(gm, ours, *inputs)


def test_a_cycle_through_a_write_is_not_seen():
    def forward(self, x):
        a = x + 1
        x.mul_(2)
        return a, x - 3

    gm, parts = traced(forward), {"add": 0, "mul_": 1, "sub": 0}
    torchs = torch_split_module(gm, None, by_name(**parts), keep_original_order=True)
    assert not sk.compare(gm, torchs, torch.ones(2)).same
    with pytest.raises(sk.errors.CycleError, match="sub must run after the effect or read of mul_"):
        sk.split_module(gm, None, by_name(**parts), keep_original_order=True)
    flow = sk.analyze(gm)
    mended = sk.extend.refine(flow, sk.Plan.of({n: parts[n.name] for n in flow.nodes}))
    assert_same(gm, sk.split_module(gm, None, mended), torch.ones(2))


def test_independent_parts_run_backwards():
    def forward(self, x):
        return x + 1, x + 2, x + 3

    torchs, ours = both(traced(forward), by_name(add_1=1, add_2=2))
    assert called(torchs) == ["submod_2", "submod_1", "submod_0"]
    assert called(ours) == ["submod_0", "submod_1", "submod_2"]


def test_prints_come_in_another_order(capsys):
    def prints(call, graph):
        call("p0", print, "first")
        call("p1", print, "second")
        return graph.placeholder("x")

    def printed(run):
        run(torch.ones(1))
        return capsys.readouterr().out.split()

    torchs, ours = both(graph_of(prints), label)
    assert printed(torchs) == ["second", "first"]
    assert printed(ours) == ["first", "second"]


def test_asserts_fail_in_another_order():
    def asserts(call, graph):
        x = graph.placeholder("x")
        call("p0", torch._assert, x, "first")
        call("p1", torch._assert, x, "second")
        return x

    torchs, ours = both(graph_of(asserts), label)
    with pytest.raises(AssertionError, match="second"):
        torchs(False)
    with pytest.raises(AssertionError, match="first"):
        ours(False)


def grad_mode_after(run, *inputs):
    """Whether autograd is on after a run that started with it on."""
    with torch.enable_grad():
        run(*inputs)
        return torch.is_grad_enabled()


def test_a_part_run_alone_leaves_grad_mode_off():
    torchs, ours = both(graph_of(grad_mode_that_two_parts_set), label)
    assert not grad_mode_after(torchs.submod_0, torch.ones(1))
    assert grad_mode_after(ours.submod_0, torch.ones(1))


def test_a_part_in_the_middle_run_alone_leaves_grad_mode_off():
    def block(call, graph):
        x = graph.placeholder("x")
        call("p0_off", torch._C._set_grad_enabled, False)
        b = call("p1", torch.cos, call("p0", torch.sin, x))
        call("p2_on", torch._C._set_grad_enabled, True)
        return call("p2", torch.tan, b)

    torchs, ours = both(graph_of(block), label)
    assert not grad_mode_after(torchs.submod_1, torch.ones(1))
    assert grad_mode_after(ours.submod_1, torch.ones(1))


def test_the_whole_split_model_leaves_grad_mode_off():
    gm = graph_of(grad_mode_that_two_parts_set)
    torchs, ours = both(gm, label)
    inputs = torch.ones(1), torch.ones(1)
    assert not grad_mode_after(torchs, *inputs)
    assert grad_mode_after(ours, *inputs) and grad_mode_after(gm, *inputs)


def test_modules_whose_flat_names_collide():
    def forward(self, x):
        return self.a_b(self.a.b(x))

    inner = nn.Module()
    inner.b = nn.Linear(2, 2)
    gm, x = traced(forward, a=inner, a_b=nn.Linear(2, 2)), torch.ones(1, 2)
    torchs, ours = both(gm, by_name())
    assert not torch.equal(torchs(x), gm(x))
    assert torch.equal(ours(x), gm(x))
