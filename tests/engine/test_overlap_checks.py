"""The check of a split's inputs for memory that they share, wherever a split is run, traced or compiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from memorygraphs import Elsewhere, Wrapped
from torch import fx, nn
from torch.fx.passes.split_module import split_module as torchs
from torch.testing._internal.two_tensor import TwoTensor

import splitkit as sk


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


@fx.wrap
def unknown(x):
    return x * 1


APART = {
    "1-d": lambda t: (t[::2], t[1::2]),
    "halves": lambda t: t.view(4, 12).chunk(2, -1),
    "qkv": lambda t: t.view(2, 3, 2, 4).unbind(1)[:2],
    "rows": lambda t: (t.view(8, 6)[::2], t.view(8, 6)[1::2]),
    "parts of complex numbers": lambda t: torch.view_as_complex(t.view(24, 2)).view(6, 4).resolve_conj(),
    "channels last": lambda t: t.view(1, 3, 4, 4).to(memory_format=torch.channels_last).chunk(3, 1)[:2],
}


@pytest.mark.parametrize("slices", APART)
@pytest.mark.parametrize("elsewhere", [unknown, lambda a: torch.as_strided(a, (1,), (1,))])
def test_slices_that_are_apart_are_accepted_though_a_node_may_leave_the_slice_of_another_tensor(slices, elsewhere):
    def g(x, y):
        a = y * 1
        b = x.add_(10)
        return elsewhere(a) - y, b * 1

    gm = fx.symbolic_trace(g)
    split = sk.split(gm, lambda node: int(node.name == "add_"))
    results = []
    for run in (gm, split):
        given = APART[slices](torch.arange(48.0))
        given = (given.real, given.imag) if isinstance(given, torch.Tensor) else given
        results.append([*run(*given), *given])
    assert all(map(torch.equal, *results))
    row = torch.arange(6.0)
    assert refused(split, row, row) and refused(split, row[:4:2], row[2::2])


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
    with pytest.raises(sk.errors.PlanError, match=r"SK216: the split has no part 7\n.*0, 1"):
        split.replace(7, nn.Identity())
    with pytest.raises(sk.errors.PlanError, match="SK216: part 0 would be replaced by a function"):
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


def two_inputs_one_written():
    root = nn.Module()
    root.register_buffer("buf", torch.zeros(3))
    graph = fx.Graph()
    x, y, buffer = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("buf")
    a = graph.call_function(torch.mul, (y, 1))
    graph.call_method("add_", (x, 10))
    r = graph.call_function(torch.sub, (a, y))
    graph.output((r, graph.call_function(torch.add, (r, buffer))))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", ["own", "hoist", "lazy", "split_module"])
def test_inputs_that_share_memory_are_refused_where_one_is_written(make, copied):
    gm = two_inputs_one_written()
    where = {"mul": "A", "add_": "B", "sub": "A", "add": "A"}
    if make == "split_module":
        module = sk.split_module(gm, None, lambda n: where[n.name])
    elif make == "lazy":
        module = sk.split(gm, where, lazy=True).module
    else:
        module = sk.split(gm, where, parameters=make).module
    module = copied(module)
    t, buffer = torch.zeros(3), next(module.buffers())
    calls = [
        ((t, t), {}),
        ((), {"x": t, "y": t}),
        ((t, t.view(3)), {}),
        ((t, torch.from_numpy(t.numpy())), {}),
        ((buffer, t), {}),
    ]
    for args, kwargs in calls:
        with pytest.raises(sk.SplitError, match="SK212"):
            module(*args, **kwargs)
    assert module(torch.zeros(3), t)[0].tolist() == [0.0] * 3


def test_inputs_that_share_memory_are_fine_where_parts_keep_the_order_or_nothing_is_written():
    gm = two_inputs_one_written()
    made = sk.split(gm, {"mul": 0, "add_": 1, "sub": 2, "add": 2})
    t = torch.zeros(3)
    assert not made.module._forward_pre_hooks and made(t, t)[0].tolist() == [-10.0] * 3
    reads = fx.symbolic_trace(lambda x, y: (x + y) * torch.sin(x))
    module = sk.split(reads, {"add": 0, "sin": 1, "mul": 0}).module
    assert not module._forward_pre_hooks and torch.equal(module(t, t), reads(t, t))


def test_an_input_in_a_dict_that_is_a_buffer_which_batch_norm_writes_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, given):
            early = given["mean"] * 1
            return self.norm(x), given["mean"] - early

    net = Net()
    gm = sk.capture(net, torch.randn(4, 3), {"mean": torch.zeros(3)})
    first = next(n for n in gm.graph.nodes if "mul" in n.name)
    last = next(n for n in gm.graph.nodes if "sub" in n.name)
    module = sk.split(gm, lambda n: "A" if n in (first, last) else "B").module
    assert module(torch.randn(4, 3), {"mean": torch.zeros(3)})[1].tolist() == [0.0] * 3
    with pytest.raises(sk.SplitError, match="SK212"):
        module(torch.randn(4, 3), {"mean": net.norm.running_mean})


def test_an_empty_tensor_may_be_given_twice():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = graph.call_function(torch.mul, (y, 1))
    b = graph.call_method("add_", (x, 10))
    graph.output((graph.call_function(torch.sub, (a, y)), b))
    gm = fx.GraphModule(nn.Module(), graph)
    made = sk.split(gm, lambda n: "B" if n.target == "add_" else "A")
    nothing = torch.zeros(0)
    assert made(nothing, nothing)[0].shape == (0,)
    with pytest.raises(sk.errors.PlanError, match="SK212"):
        made(both := torch.ones(2), both)


def test_a_buffer_of_a_submodule_is_compared_too():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = nn.Module()
            self.held.register_buffer("state", torch.ones(4))

        def forward(self, x):
            early = x * 1
            self.held.state.add_(x)
            return early - x

    gm = fx.symbolic_trace(Deep())
    where = {n.name: "B" if n.name.startswith("add_") else "A" for n in gm.graph.nodes if n.op.startswith("call")}
    for parameters in ("own", "hoist"):
        split = sk.split(gm, where, parameters=parameters)
        (state,) = split.module.buffers()
        assert split(torch.ones(4)).tolist() == [0.0] * 4
        assert refused(split, state)


def test_a_replacement_without_some_of_the_parameters_is_not_asked_for_them():
    split = split_net()
    key, first = next((key, part) for key, part in split.parts.items() if len(list(part.parameters())) > 1)
    prefix = f"{split.names[key]}."
    names = {name: of for name, of in split.qualified_names.items() if name.startswith(prefix)}
    tensors = dict(split.module.named_parameters())
    kept = next(iter(names))

    class Fewer(nn.Module):
        def __init__(self):
            super().__init__()
            self.renamed = nn.ParameterList([tensors[kept]])
            self.inner = [first]  # hidden from the module

        def forward(self, *args):
            return self.inner[0](*args)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = split(x, y.clone())
    split.replace(key, Fewer())
    now = {name: of for name, of in split.qualified_names.items() if name.startswith(prefix)}
    assert len(names) > 1 and now == {f"{prefix}renamed.0": names[kept]}
    assert torch.equal(split(x, y.clone()), expected)


def test_a_wrapper_that_names_nothing_may_be_any_memory_and_each_remedy_works():
    gm, memory = fx.symbolic_trace(f), torch.zeros(3)
    for shared in (memory, torch.zeros(3)):
        with pytest.raises(sk.SplitError, match=r"SK212: x and y may share memory(.|\n)*__tensor_flatten__"):
            sk.split(gm, PARTS)(Elsewhere(memory), shared)
    assert sk.split(gm, PARTS)(Wrapped(torch.zeros(3)), torch.zeros(3)).sum() == 30
    assert sk.split(gm, PARTS | {"sub": 2})(Elsewhere(memory), memory).sum() == 0
    assert sk.split(gm, PARTS, check_inputs=False)(Elsewhere(torch.zeros(3)), torch.zeros(3)).sum() == 30
