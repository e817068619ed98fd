"""Whether tensors share memory, and the check of a split's inputs, wherever a split is run, traced or compiled."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.passes.split_module import split_module as torchs
from torch.testing._internal.two_tensor import TwoTensor

import splitkit as sk
from splitkit.sharing import blocks, overlap

ROW, NUMBERS = torch.arange(12.0), np.arange(6.0)
with FakeTensorMode():
    FAKE = torch.empty(6)
META = torch.empty(6, device="meta")


def share(a, b, whole=False):
    return any(overlap(x, y) for x in blocks(a, whole) for y in blocks(b, whole))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ROW[::2], ROW[1::2], False),
        (*ROW.chunk(2), False),
        (ROW.view(3, 4)[:, :2], ROW.view(3, 4)[:, 2:], False),
        (ROW.view(3, 4)[:, :2], ROW.view(3, 4)[:, 1:], True),
        (ROW[::2], ROW[::3], True),
        (ROW[1::4], ROW[3::4], False),
        (ROW, ROW.view(3, 4), True),
        (ROW[::2], ROW[1:2].expand(3), False),
        (ROW.view(torch.uint8)[:3], ROW.view(torch.uint8)[3:], False),
        (ROW.view(torch.uint8)[:3], ROW[:1], True),
        (torch.from_numpy(NUMBERS[1:4]), torch.from_numpy(NUMBERS[3:]), True),
        (torch.from_numpy(NUMBERS[1:3]), torch.from_numpy(NUMBERS[3:]), False),
        (META[:3], META[3:], False),
        (META[:4], META[3:], True),
        (META, torch.empty(6, device="meta"), False),
        (FAKE[:4], FAKE[3:], True),
        (FAKE[:3], FAKE[3:], False),
        (ROW[:0], ROW, False),
        (TwoTensor(ROW, ROW.clone()), TwoTensor(ROW.clone(), ROW), True),
        (TwoTensor(ROW[:6], ROW[:6].clone()), TwoTensor(ROW.clone()[:6], ROW.clone()[:6]), False),
        ([ROW[:3], {"k": ROW[6:]}], (ROW[3:6], ROW[7]), True),
    ],
)
def test_tensors_share_memory_if_they_have_a_byte_in_common(a, b, expected):
    assert share(a, b) is share(b, a) is expected


def test_whole_storages_are_compared_where_an_op_may_leave_its_input():
    assert share(ROW[::2], ROW[1::2], whole=True)


def f(x, y):
    a = y * 1
    b = x.add_(10)
    return a - y + b


PARTS = {"mul": 0, "add_": 1, "sub": 0, "add": 2}


class Net(nn.Module):
    """Writes an input, and reads a parameter of a part that runs earlier than the write."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        a = self.one(x)
        b = y.clone()
        y.mul_(2)
        return self.two(a) + b + y


def split_net(**options):
    gm = fx.symbolic_trace(Net())
    return sk.split(gm, lambda n: {"clone": 0, "mul": 0, "mul_": 0}.get(n.name, 1), **options)


def refused(run, *inputs):
    """Whether the check raises, also out of a compiled program."""
    try:
        run(*inputs)
    except Exception as error:
        assert "SK212" in str(error)
        return True
    return False


WAYS = {
    "call": lambda m: m,
    "forward": lambda m: m.forward,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "Interpreter": lambda m: fx.Interpreter(m).run,
    "symbolic_trace": fx.symbolic_trace,
    "Transformer": lambda m: fx.Transformer(m).transform(),
    "node_copy": lambda m: _copied(m),
    "dead code": lambda m: _without_dead_code(m),
    "script": torch.jit.script,
    "trace": lambda m: torch.jit.trace(m, (torch.ones(4), torch.ones(4)), check_trace=False),
    "make_fx": lambda m: torch.fx.experimental.proxy_tensor.make_fx(m)(torch.ones(4), torch.ones(4)),
    "strict export": lambda m: torch.export.export(m, (torch.ones(4), torch.ones(4)), strict=True).module(),
    "export": lambda m: torch.export.export(m, (torch.ones(4), torch.ones(4)), strict=False).module(),
    "decompositions": lambda m: torch.export.export(m, (torch.ones(4), torch.ones(4))).run_decompositions().module(),
}


def _copied(module):
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _without_dead_code(module):
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


@pytest.mark.parametrize("way", WAYS)
def test_the_check_is_there_however_a_split_is_run(way):
    run = WAYS[way](sk.split(fx.symbolic_trace(f), PARTS).module)
    both = torch.zeros(4)
    assert refused(run, both, both)
    assert refused(run, both, both.view(2, 2).view(4))
    row = torch.arange(8.0)
    assert run(*row.clone().chunk(2)).tolist() == f(*row.clone().chunk(2)).tolist()
    assert run(row[::2], row[1::2]).tolist() == f(torch.arange(0, 8.0, 2), torch.arange(1, 8.0, 2)).tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_split_has_the_check(backend):
    torch._dynamo.reset()
    module = torch.compile(sk.split(fx.symbolic_trace(f), PARTS).module, backend=backend, fullgraph=True)
    both, row = torch.zeros(4), torch.arange(8.0)
    assert module(*row.clone().chunk(2)).tolist() == f(*row.clone().chunk(2)).tolist()
    with pytest.raises(Exception):  # noqa: B017  # fx's report of an error is what fullgraph refuses to trace
        module(both, both)


def test_wrapper_subclasses_and_vmap_are_looked_through():
    split = sk.split(fx.symbolic_trace(lambda x, y: f(x, y)), PARTS)
    one, other = torch.zeros(3), torch.zeros(3)
    assert refused(split, TwoTensor(one, other), TwoTensor(one, other))
    assert refused(split, TwoTensor(one, other), TwoTensor(other.clone(), one))
    assert not refused(split, TwoTensor(one, other), TwoTensor(one.clone(), other.clone()))
    batch = torch.zeros(2, 3)
    assert refused(torch.vmap(split), batch, batch)
    assert not refused(torch.vmap(split), batch, batch.clone())


def test_whole_storages_count_where_as_strided_leaves_the_slice():
    def g(x, y):
        a = y * 1
        b = torch.as_strided(x, (8,), (1,), 0).add_(10)
        return a - y + b.sum()

    gm = fx.symbolic_trace(g)
    where = {"mul": 0, "as_strided": 1, "add_": 1, "sub": 0, "sum_1": 1, "add": 2}
    assert refused(sk.split(gm, where), *torch.arange(8.0).chunk(2))


def test_a_node_that_writes_one_input_and_reads_the_other_is_in_order_with_itself():
    def g(x, y, z):
        a = z * 2
        b = x.add_(y)
        return b + 1, a - z.mul_(2)

    gm = fx.symbolic_trace(g)
    split = sk.split(gm, {"mul": 0, "add_": 1, "add": 1, "mul_": 0, "sub": 0})
    both = torch.ones(2)
    assert split(both, both, torch.ones(2))[0].tolist() == [3.0, 3.0]
    assert refused(split, both, torch.ones(2), both)


def test_check_inputs_false_leaves_the_check_out():
    gm, both = fx.symbolic_trace(f), torch.zeros(3)
    for module in (
        sk.split(gm, PARTS, check_inputs=False).module,
        sk.split_module(gm, None, lambda n: PARTS[n.name], check_inputs=False),
        sk.split_module(gm, None, lambda n: PARTS[n.name], partition_affix="pp"),
    ):
        assert "refuse_shared" not in module.code
        module(both, both)


class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize("how", ["set_submodule", "setattr", "_modules", "replace"])
@pytest.mark.parametrize("parameters", ["own", "hoist"])
def test_parts_are_replaced_by_wrappers(how, parameters):
    split = split_net(parameters=parameters)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = fx.symbolic_trace(split.flow.root)(x, y.clone())
    weight = split.flow.root.one.weight
    with torch.no_grad():
        assert refused(split, x, weight)
    for key, name in split.names.items():
        wrapped = Wrap(split.module.get_submodule(name))
        if how == "replace":
            split.replace(key, wrapped)
        elif how == "set_submodule":
            split.module.set_submodule(name, wrapped)
        elif how == "setattr":
            setattr(split.module, name, wrapped)
        else:
            split.module._modules[name] = wrapped
    assert torch.equal(split(x, y.clone()), expected)
    if how == "replace":
        assert refused(split, x, weight)
        assert set(split.qualified_names) == {n for n, _ in split.module.named_parameters()}
        assert split.locations["one.weight"] == ("submod_1.inner.one.weight",) or parameters == "hoist"


def test_replace_names_what_it_does_not_take():
    split = split_net()
    with pytest.raises(sk.PlanError, match=r"SK216: the split has no part 7\n.*0, 1"):
        split.replace(7, nn.Identity())
    with pytest.raises(sk.PlanError, match="SK216: part 0 would be replaced by an object of the class function"):
        split.replace(0, f)


def test_a_part_that_is_an_engine_without_parameters_runs():
    split = split_net()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = split(x, y.clone())
    part = split.parts[1]
    given = [torch.randn(4, 4) for n in part.graph.nodes if n.op == "placeholder"]
    engine = Wrap(torch.jit.freeze(torch.jit.trace(part.eval(), given)))
    split.replace(1, engine)
    assert torch.allclose(split(x, y.clone()), expected)
    split.replace(1, part)
    with torch.no_grad():
        assert refused(split, x, split.flow.root.one.weight)


def test_the_check_goes_when_parts_are_inlined_and_stays_when_they_are_moved():
    split = split_net()
    whole = sk.inline(split)
    assert [n.name for n in whole.graph.nodes] == [n.name for n in split.flow.graph.nodes]
    from splitkit.runtime import to_devices

    moved = to_devices(split, "cpu")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(moved(x, y.clone()), whole(x, y.clone()))
    assert refused(moved, y, y)
    with torch.no_grad():
        assert refused(moved, x, moved.get_parameter("one.weight"))


@pytest.mark.parametrize("what", ["fullgraph", "strict export", "script"])
def test_what_torchs_split_can_do_ours_can(what):
    def go(module):
        torch._dynamo.reset()
        given = torch.ones(4), torch.ones(4)
        if what == "fullgraph":
            return torch.compile(module, backend="eager", fullgraph=True)(*given)
        if what == "script":
            return torch.jit.script(module)(*given)
        return torch.export.export(module, given, strict=True).module()(*given)

    gm = fx.symbolic_trace(f)
    expected = go(torchs(gm, None, lambda n: PARTS[n.name]))
    for lazy in (False, True):
        for parameters in ("own", "hoist"):
            assert torch.equal(go(sk.split(gm, PARTS, parameters=parameters, lazy=lazy).module), expected)
    assert torch.equal(go(sk.split_module(gm, None, lambda n: PARTS[n.name])), expected)
