"""One test a bug, named after it: bugs of splitkit that were found and mended."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.costs import unit
from splitkit.plan import Plan
from splitkit.policies import RoundRobin
from splitkit.rewrite import refine
from splitkit.split import split
from splitkit.testing import assert_legal, assert_same


def test_one_tensor_given_twice_was_captured_as_one_input():
    class Model(nn.Module):
        def forward(self, x, labels):
            return x * 2 + labels

    x = torch.ones(2)
    gm = sk.capture(Model(), x, x)
    assert torch.equal(gm(torch.ones(2), torch.zeros(2)), torch.full((2,), 2.0))


def test_nodes_of_another_graph_were_dropped_in_silence(chain):
    other = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    with pytest.raises(sk.PlanError, match="SK201"):
        split(chain, Plan.of(dict.fromkeys(other.graph.nodes, 0)))


def test_refine_let_a_later_visit_read_a_home_that_had_not_run():
    """`a` has copies in 0 and 1; the second visit of 1 has no copy, so it reads the home's, which must come before."""

    class Model(nn.Module):
        def forward(self, x):
            a = x.sin()
            b = a.cos()
            c = b.tan()
            return c + a

    gm = fx.symbolic_trace(Model())
    flow = sk.analyze(gm)
    sin, cos, tan, add = flow.nodes
    plan = refine(flow, Plan.of({sin: [0, 1], cos: 1, tan: 2, add: 1}))
    assert_legal(flow, plan)
    assert_same(gm, split(gm, plan), torch.ones(2))


def test_interleaved_autocast_left_its_state_on_for_the_next_comparison():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    b = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_torch.EXIT_AUTOCAST, (a,))
    graph.call_function(_torch.EXIT_AUTOCAST, (b,))
    graph.output(graph.call_function(torch.mm, (x, x)))
    gm = fx.GraphModule(nn.Module(), graph)
    assert_same(gm, split(gm, RoundRobin(1)), torch.randn(3, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_hooks_of_an_exported_module_did_not_find_their_attributes_on_the_parent():
    gm = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(check_guards=False)
    assert_same(gm, split(gm, lambda node: 0), torch.ones(1, 2))


def test_gradients_of_tied_weights_were_compared_under_two_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.last = nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x).relu())

    model = Tied()
    gm = sk.capture(model, torch.randn(2, 4))
    result = sk.compare(model, split(gm, RoundRobin(3)), torch.randn(2, 4))
    assert result.same and [d.name for d in result.gradients] == ["gradient of first.weight"]


def test_a_failed_write_left_a_temporary_file(tmp_path):
    from splitkit import planfile

    with pytest.raises(TypeError):
        planfile.write(tmp_path / "plan.json", {"not json": object()})
    assert not list(tmp_path.iterdir())


def test_a_policy_class_instead_of_a_policy_was_called(chain):
    with pytest.raises(sk.PolicyError, match="SK301"):
        split(chain, RoundRobin)


def test_views_that_are_buffers_could_not_be_restored_after_a_comparison():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("whole", torch.zeros(2, 2))
            self.register_buffer("turned", self.whole.t())

        def forward(self, x):
            self.whole.copy_(self.linear(x))
            return x @ self.turned

    gm = fx.symbolic_trace(Model())
    assert_same(gm, split(gm, RoundRobin(2), costs=unit(gm)), torch.randn(2, 2))
    assert torch.equal(gm.whole, torch.zeros(2, 2))


def test_exports_guard_call_was_taken_for_a_writer():
    class Model(nn.Module):
        def forward(self, x, y):
            return x.sin() + y.cos()

    gm = torch.export.export(Model(), (torch.ones(2), torch.ones(2))).module()
    flow = sk.analyze(gm)
    assert not any(flow.after[n] for n in flow.nodes)
    assert_same(gm, split(gm, RoundRobin(2)), torch.ones(2), torch.ones(2))


def test_export_lost_a_no_grad_block_around_control_flow():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                z = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
                w = y.tan()
            return y + z + w

    model, x = Branches(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    assert_same(model, gm, x)
    assert_same(model, split(gm, RoundRobin(2)), x)


def test_export_lost_no_grad_inside_autocast():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.no_grad()
        def frozen(self, x):
            return self.linear(x).tanh()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    a = self.linear(x).sin()
                b = self.linear(x)
                c = self.frozen(x)
            with torch.no_grad():
                d = self.linear(x)
                with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                    e = self.linear(x)
                f = self.linear(x)
            return a, b, c, d, e, f

    model, x = Mixed(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    wanted = [v.requires_grad for v in model(x)]
    for made in (gm, split(gm, RoundRobin(1)), split(gm, RoundRobin(3))):
        assert [v.requires_grad for v in made(x)] == wanted == [False, True, False, False, True, False]
        assert_same(model, made, x, tolerance=1e-2)
        with torch.no_grad():
            made(x)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
