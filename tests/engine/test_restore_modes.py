"""An op that raises inside a region leaves the caller's modes as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import some_of_all
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.engine.codegen.restore_modes import restore_modes_on_error


class Net(nn.Module):
    """Fails at an index that is out of range, inside two regions."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.linear(self.table.weight).sum()
            with torch.no_grad():
                y = self.linear(self.table(i)) * 2
            z = self.linear(y + x)
        return self.linear(z.float())


def modes():
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()


DOORS = {
    "capture": lambda gm: gm,
    "copy": copy.deepcopy,
    "own": lambda gm: sk.split(gm, sk.policies.Stages(2)).module,
    "hoist": lambda gm: sk.split(gm, sk.policies.Stages(3), parameters="hoist").module,
    "lazy": lambda gm: sk.split(gm, sk.policies.Stages(2), lazy=True).module,
    "parent": lambda gm: sk.split(gm, lambda n: 0 if n.name == "sum_1" else None).module,
    "split_module": lambda gm: sk.split_module(gm, None, sk.policies.Stages(2)),
    "inline": lambda gm: sk.inline(sk.split(gm, sk.policies.Stages(2))),
    "GraphModule": lambda gm: sk.capture(torch.export.export(Net(), (torch.tensor([1]),)).module()),
}


@pytest.mark.parametrize(("door", "caller"), some_of_all(DOORS, ["grad", "no_grad", "inference"], always=()))
def test_modes_are_the_callers_after_an_error(door, caller):
    module = DOORS[door](sk.capture(Net(), torch.tensor([1])))
    before = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[caller]
    with before():
        now = modes()
        module(torch.tensor([1]))
        assert modes() == now
        with pytest.raises(IndexError):
            module(torch.tensor([9]))
        assert modes() == now
        with pytest.raises(IndexError):
            module.forward(torch.tensor([9]))
        assert modes() == now


def test_parts_that_hand_the_grad_mode_to_each_other_restore_it_together():
    graph = fx.Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    a = graph.call_method("mul", (x, 2))
    graph.call_function(_torch.SET_GRAD, (False,))
    b = graph.call_method("sin", (a,))
    c = graph.call_method("index_select", (b, 0, i))
    graph.call_function(_torch.SET_GRAD, (True,))
    graph.output(graph.call_method("mul", (a, c)))
    gm = fx.GraphModule(nn.Module(), graph)
    count = iter(range(10))
    part = {n: min(next(count), 3) for n in graph.nodes if n.op.startswith("call")}
    module = sk.split_module(gm, None, part.__getitem__, keep_original_order=True)
    module(torch.ones(2), torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError)):
        module(torch.ones(2), torch.tensor([9]))
    assert torch.is_grad_enabled()


def test_every_kind_of_region_is_closed_and_every_setting_put_back():
    closed = []

    def enter():
        return None

    def leave(handle):
        closed.append(handle)

    def push():
        pass

    def pop():
        closed.append("popped")

    sk.extend.register_region("handled", enter, leave)
    sk.extend.register_region("stacked", push, pop, handle=False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    handle = graph.call_function(enter)
    graph.call_function(push)
    graph.call_function(push)
    graph.call_function(pop)
    record = graph.call_function(_torch.ENTER_RECORD, ("here",))
    graph.call_function(_torch.SET_DETERMINISTIC, (True,), {"warn_only": True})
    graph.call_function(_torch.FORBID_HOOKS, ("not here",))
    inference = graph.call_function(_torch.ENTER_INFERENCE, (True,))
    y = graph.call_function(torch.mm, (x, x))
    graph.call_function(_torch.EXIT_INFERENCE, (inference,))
    graph.call_function(_torch.ALLOW_HOOKS)
    graph.call_function(_torch.EXIT_RECORD, (record,))
    graph.call_function(pop)
    graph.call_function(leave, (handle,))
    graph.output(y)
    restore_modes_on_error(graph)
    gm = copy.deepcopy(fx.GraphModule(nn.Module(), graph))
    before = modes(), _torch.deterministic(), _torch.HOOKS_MESSAGE()
    with pytest.raises(RuntimeError):
        gm(torch.ones(2, 3))
    assert closed == ["popped", "popped", None]
    assert (modes(), _torch.deterministic(), _torch.HOOKS_MESSAGE()) == before


def test_code_without_regions_is_what_fx_makes():
    gm = sk.capture(nn.Linear(2, 2), torch.ones(2))
    before = gm.code
    restore_modes_on_error(gm.graph)
    gm.recompile()
    assert gm.code == before and "try" not in before


def test_dynamo_and_strict_export_trace_the_code():
    class Quiet(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x * 2
            return x * y

    x = torch.ones(2, requires_grad=True)
    for module in (sk.capture(Quiet(), x), sk.split(sk.capture(Quiet(), x), sk.policies.Stages(2)).module):
        assert "except BaseException" in module.code or "except BaseException" in module.submod_0.code
        torch._dynamo.reset()
        assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), Quiet()(x))
        torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
        x.grad = None
        assert torch.equal(torch.export.export(module, (x,), strict=True).module()(x), Quiet()(x))


class Vmapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4, 3))

    def forward(self, i):
        rows = torch.vmap(lambda row: self.table.sin().index_select(0, row))(i)
        return rows.cos() + torch.vmap(torch.sin)(rows)


@pytest.mark.parametrize("door", ["capture", "copy", "split", "split_module", "inline"])
def test_an_error_inside_a_vmap_closes_its_level(door):
    given = torch.tensor([[1]])
    gm = sk.capture(Vmapped(), given)
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    plan = {name: int(i >= names.index("cos")) for i, name in enumerate(names)}
    doors = {
        **DOORS,
        "split": lambda gm: sk.split(gm, plan).module,
        "split_module": lambda gm: sk.split_module(gm, None, lambda node: plan[node.name]),
        "inline": lambda gm: sk.inline(sk.split(gm, plan)),
    }
    module = doors[door](gm)
    assert torch.equal(module(given), Vmapped()(given))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        module(torch.tensor([[9]]))
    assert _torch.functorch_depth() == 0
    assert torch.equal(module(given), Vmapped()(given))
