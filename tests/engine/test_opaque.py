"""Opaque code, objects and arrays: each plan of a small graph runs like the whole, or is refused."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter

import numpy as np
import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit import _torch, split_module

X = torch.arange(1.0, 4.0)


def tried(gm, run, labels=(0, 1), **options):
    """How many plans run like the whole, and the codes of those that are refused; none may give anything else."""
    flow, whole, found = sk.analyze(gm), run(gm), Counter()
    for chosen in itertools.product(labels, repeat=len(flow.nodes)):
        plan = dict(zip(flow.nodes, chosen, strict=True))
        try:
            got = run(sk.split(gm, plan, **options).module)
        except sk.SplitError as error:
            found[error.code] += 1
            continue
        assert got == whole, f"{ {n.name: key for n, key in plan.items()} }: {got} instead of {whole}"
        found["right"] += 1
    return found


def values(result):
    return [v.tolist() if isinstance(v, (torch.Tensor, np.ndarray)) else v for v in result]


# ---------------------------------------------------------------- attributes that are bound anew


class Leaf(nn.Module):
    """Binds its own buffer anew, or that of another module."""

    def __init__(self, other=None):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))
        self.other = [other]

    def forward(self, x):
        owner = self.other[0] or self
        owner.state = owner.state + x
        return x * 2


class Leaves(fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Leaf) or super().is_leaf_module(module, name)


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.leaf = Leaf()
        self.other = nn.ModuleDict({"path": Leaf(self.leaf) if way == "list" else self.leaf})

    def forward(self, x):
        before = self.leaf.state
        y = self.leaf(x)
        between = self.leaf.state + 1
        z = self.other["path"](between)
        return y + before, z + self.leaf.state


def bound_anew(way):
    model = Model(way)
    graph = Leaves().trace(model)
    if way == "closure":

        def rebind(x):
            model.leaf.state = model.leaf.state + x
            return x * 2

        for node in list(graph.nodes):
            if node.op == "call_module" and node.target == "other.path":
                node.op, node.target = "call_function", rebind
    gm = fx.GraphModule(model, graph)

    def run(module):
        model.leaf.state = torch.zeros(3)
        return values([*module(X), *module(X), model.leaf.state])

    return gm, run


@pytest.mark.parametrize("options", [{}, {"parameters": "hoist"}, {"lazy": True, "on_cycle": "refine"}], ids=str)
@pytest.mark.parametrize("way", ["own", "list", "closure"])
def test_an_attribute_is_read_between_the_leaves_that_bind_it_anew(way, options):
    gm, run = bound_anew(way)
    found = tried(gm, run, **options)
    assert found["right"] >= 2
    assert set(found) <= {"right", "SK203"}


@pytest.mark.parametrize("keep", [False, True])
def test_split_module_reads_an_attribute_between_the_leaves_that_bind_it_anew(keep):
    gm, run = bound_anew("own")
    calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    where = {n: i for i, n in enumerate(calls)}
    assert run(split_module(gm, None, where.__getitem__, keep_original_order=keep)) == run(gm)


def test_opaque_code_that_reaches_the_graph_module_itself_is_refused():
    root = nn.Module()
    root.register_buffer("state", torch.zeros(3))
    root.leaf = Leaf()
    graph = fx.Graph()
    leaf = graph.call_module("leaf", (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.add, (leaf, graph.get_attr("state"))))
    gm = fx.GraphModule(root, graph)
    where = {"leaf": 0, "add": 1}
    assert sk.split(gm, where)(X).tolist() == (X * 2).tolist()
    gm.leaf.other = [gm]
    with pytest.raises(sk.SplitError, match=r"SK218.*leaf"):
        sk.split(gm, where)


# ---------------------------------------------------------------- ambient state


def wide(x):
    torch.set_default_dtype(torch.float64)
    return x * 1


def without_grad(x):
    torch.set_grad_enabled(False)
    return x * 1


def deterministic(x):
    torch.use_deterministic_algorithms(True)
    return x * 1


def through_a_helper(x):
    return [wide][0](x)


def by_an_import(x):
    from torch import set_default_dtype as choose

    choose(torch.float64)
    return x * 1


def harmless(x):
    return torch.relu(x).view(-1) * 1


def ambient_graph(function):
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    early = graph.call_function(torch.mul, (graph.call_function(torch.zeros, (3,)), weight))
    opaque = graph.call_function(function, (x,))
    late = graph.call_function(torch.mul, (graph.call_function(torch.zeros, (3,)), weight))
    graph.output((early, opaque, late))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(3))
    return fx.GraphModule(root, graph)


def modes(module):
    try:
        out = module(X)
        state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
    return [(t.dtype, t.requires_grad, t.tolist()) for t in out], state


@pytest.mark.parametrize("function", [wide, without_grad, deterministic, through_a_helper, by_an_import])
def test_nothing_moves_across_opaque_code_that_sets_the_ambient_state(function):
    found = tried(ambient_graph(function), modes)
    assert found["right"] >= 6
    assert found["SK203"] >= 6


def test_ops_move_across_opaque_code_whose_bytecode_sets_no_ambient_state():
    def around(function):
        graph = fx.Graph()
        early = graph.call_function(torch.zeros, (3,))
        opaque = graph.call_function(function, (graph.placeholder("x"),))
        graph.output((early, opaque, graph.call_function(torch.cos, (early,))))
        return tried(fx.GraphModule(nn.Module(), graph), modes)

    assert around(harmless) == Counter(right=8)
    assert around(wide)["SK203"] == 2


def opened_around(function, enter):
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    if enter == "autocast":
        handle = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    else:
        graph.call_function(_torch.SET_GRAD, (True,))
    opaque = graph.call_function(function, (x,))
    inside = graph.call_function(torch.mul, (x, weight))
    if enter == "autocast":
        graph.call_function(_torch.EXIT_AUTOCAST, (handle,))
        before = graph.call_function(torch.is_grad_enabled)
        graph.call_function(_torch.SET_GRAD, (True,))
        again = graph.call_function(torch.mul, (x, weight))
        graph.call_function(_torch.SET_GRAD, (before,))
    else:
        graph.call_function(_torch.SET_GRAD, (False,))
        again = graph.call_function(torch.mul, (x, weight))
    graph.output((opaque, inside, again, graph.call_function(torch.mul, (again, weight))))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(3))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("enter", ["autocast", "grad"])
def test_a_region_is_not_opened_again_after_opaque_code_has_changed_it(enter):
    found = tried(opened_around(without_grad, enter), modes, labels=(0, 1, None))
    assert found["right"] >= 6
    assert found["SK217"] >= 6


# ---------------------------------------------------------------- objects and arrays


class Meter:
    inner: Meter

    def __init__(self, depth=1):
        self.total = torch.zeros(3)
        if depth:
            self.inner = Meter(depth - 1)

    def add(self, x):
        self.total = self.total + x
        return self.total * 1

    def sum(self):
        return self.total.sum()

    def __mul__(self, x):
        return self.add(x)


def made_by_code(x) -> Meter:
    meter = Meter()
    meter.add(x)
    return meter


GIVEN = {
    "itself": (Meter, lambda m: m, lambda meter: meter),
    "by name": ("Meter", lambda m: m, lambda meter: meter),
    "or nothing": (Meter | None, lambda m: m, lambda meter: meter),
    "in a list": (list[Meter], lambda m: m[0], lambda meter: [meter]),
    "in a dict": (dict[str, tuple[Meter, int]], lambda m: m["a"][0], lambda meter: {"a": (meter, 1)}),
    "in an object": (Meter, lambda m: m.inner, lambda meter: meter),
    "without a word": (None, lambda m: m, lambda meter: meter),
    "in a list without a word": (None, lambda m: m[0], lambda meter: [meter]),
}


@pytest.mark.parametrize("how", list(GIVEN))
def test_methods_of_an_object_are_no_methods_of_a_tensor(how):
    annotation, read, give = GIVEN[how]

    def forward(x, meter):
        held = read(meter)
        first = held.add(x)
        second = held.sum()
        third = held * first
        return first, second, third

    gm = fx.symbolic_trace(forward)
    next(n for n in gm.graph.nodes if n.target == "meter").type = annotation
    found = tried(gm, lambda module: values(module(X, give(Meter()))), labels=(0, 1, 2))
    assert found["right"] >= 3
    assert set(found) <= {"right", "SK203", "SK219"} - ({"SK219"} if annotation else set())


def test_an_object_that_opaque_code_says_it_makes():
    def forward(x):
        meter = made_by_code(x)
        return meter.add(x), meter.sum(), meter.add(x)

    graph = fx.Graph()
    x = graph.placeholder("x")
    meter = graph.call_function(made_by_code, (x,))
    calls = [graph.call_method(name, (meter, *args)) for name, args in (("add", (x,)), ("sum", ()), ("add", (x,)))]
    graph.output(tuple(calls))
    gm = fx.GraphModule(nn.Module(), graph)
    assert values(gm(X)) == values(forward(X))
    assert tried(gm, lambda module: values(module(X)))["right"] >= 4


def test_a_graph_without_annotations_runs_in_any_order_on_tensors_and_refuses_objects():
    gm = fx.symbolic_trace(lambda x, y: (x.add(1), y.mul(2), x.sum()))
    made = sk.split(gm, {"add": 0, "mul": 1, "sum_1": 0})
    assert values(made(X, X)) == values(gm(X, X))
    with pytest.raises(sk.SplitError, match=r"SK219: x is a Meter.*add"):
        made(Meter(), X)
    stages = sk.split(gm, {"add": 0, "mul": 0, "sum_1": 1})  # in the order of the graph
    assert len(stages.parts) == 2
    assert stages.module._forward_pre_hooks == {}


@pytest.mark.parametrize("annotation", [None, np.ndarray])
@pytest.mark.parametrize("write", ["cumsum", "sort", "put"])
def test_what_an_array_does_in_place_keeps_its_order(annotation, write):
    graph = fx.Graph()
    given, out = graph.placeholder("given"), graph.placeholder("out")
    given.type = out.type = annotation
    early = graph.call_function(np.array, (out,))
    if write == "cumsum":
        done = graph.call_method("cumsum", (given, 0, None, out))
    else:
        done = graph.call_method(write, (out, *((0, 9.0) if write == "put" else ())))
    late = graph.call_function(operator.mul, (out, 2))
    graph.output((early, late, done))
    gm = fx.GraphModule(nn.Module(), graph)
    found = tried(gm, lambda module: values(module(np.arange(3.0), np.array([3.0, 1.0, 2.0]))))
    assert found["right"] >= 4
    assert set(found) <= {"right", "SK203", "SK219"}


# ---------------------------------------------------------------- views


VIEWS = {
    "view": lambda a: a.view(-1),
    "detach": lambda a: a.detach(),
    "t": lambda a: a.t(),
    "select": lambda a: a.select(0, 0),
    "item": lambda a: (a * 1)[0],
    "expand": lambda a: a.unsqueeze(0).expand(2, 2, 2),
}


@pytest.mark.parametrize("name", list(VIEWS))
@pytest.mark.parametrize("grad", [False, True])
def test_a_view_may_run_before_a_write_that_it_will_show(name, grad):
    def forward(x):
        a = x * 2
        a.neg_()
        v = VIEWS[name](a)
        a.mul_(3)
        return v + 1

    gm = fx.symbolic_trace(forward)

    def run(module):
        x = torch.arange(4.0).reshape(2, 2).requires_grad_(grad)
        out = module(x)
        if out.requires_grad:
            out.sum().backward()
        return out.tolist(), None if x.grad is None else x.grad.tolist()

    found = tried(gm, run)
    assert found["right"] >= 14
    view = next(n for n in sk.analyze(gm).nodes if n.name not in ("mul", "neg_", "mul_1", "add"))
    if name != "item":
        where = {n: 0 if n is view else 2 for n in sk.analyze(gm).nodes}
        where[next(n for n in gm.graph.nodes if n.name == "mul")] = 1
        assert run(sk.split(gm, where).module) == run(gm)


@pytest.mark.parametrize("resize", ["unsqueeze_", "t_", "resize_"])
def test_a_view_keeps_its_place_among_changes_of_size(resize):
    def forward(x):
        a = x * 2
        first = a.transpose(0, 1)
        getattr(a, resize)(*((0,) if resize == "unsqueeze_" else (1, 4) if resize == "resize_" else ()))
        second = a.transpose(0, 1)
        return first + 1, second + 1

    gm = fx.symbolic_trace(forward)
    found = tried(gm, lambda module: [(t.shape, t.tolist()) for t in module(torch.arange(4.0).reshape(2, 2))])
    assert found["SK203"] >= 4


def test_a_copy_that_may_be_a_view_is_a_read():
    def forward(x):
        a = x * 2
        b = a.t()
        c = b.reshape(4)
        a.neg_()
        return c + 1

    found = tried(fx.symbolic_trace(forward), lambda module: module(torch.arange(4.0).reshape(2, 2)).tolist())
    assert found["SK203"] >= 4


def test_several_views_at_once_stay_behind_a_write_for_the_sake_of_autograd():
    def forward(x):
        a = x * 2
        a.neg_()
        first, second = a.chunk(2)
        return first + second

    gm = fx.symbolic_trace(forward)

    def run(module):
        x = torch.arange(4.0).requires_grad_()
        module(x).sum().backward()
        return x.grad.tolist()

    assert tried(gm, run)["right"] >= 4


def test_what_was_read_before_opaque_code_is_still_the_old_value_after_it():
    root = nn.Module()
    root.leaf = Leaf()
    graph = fx.Graph()
    x, before = graph.placeholder("x"), graph.get_attr("leaf.state")
    leaf = graph.call_module("leaf", (x,))
    graph.output((graph.call_function(torch.add, (leaf, before)),))
    gm = fx.GraphModule(root, graph)

    def run(module):
        root.leaf.state = torch.zeros(3)
        return values([*module(X), *module(X)])

    assert tried(gm, run)["right"] == 4


# ---------------------------------------------------------------- levels of vmap


class Guarded(nn.Module):
    """A vmap in an autocast block or under no_grad, between two layers in it."""

    def __init__(self, block):
        super().__init__()
        self.block, self.layers = block, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("table", torch.randn(5, 4))

    def forward(self, x):
        with self.block():
            x = self.layers[0](x)
            rows = torch.vmap(lambda row: row * 2)(self.table)
            x = self.layers[1](x) + rows.mean()
        return x * 2


@pytest.mark.parametrize("block", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad])
def test_a_vmap_changes_no_region_and_writes_nothing(block):
    model, x = Guarded(block), torch.randn(3, 4)
    gm = sk.capture(model, x)
    flow = sk.analyze(gm)
    assert not flow.written
    for cut in range(1, len(flow.nodes)):
        split = sk.split(gm, {node: int(i >= cut) for i, node in enumerate(flow.nodes)})
        assert sk.compare(model, split, x).same, cut


# ---------------------------------------------------------------- TorchScript


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return self.norm(self.linear(x)) * self.count


class ScriptLeaves(fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, torch.jit.ScriptModule) or super().is_leaf_module(module, name)


SCRIPTS = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.randn(2, 3), check_trace=False),
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_module_of_torchscript_is_a_leaf_like_any_unknown_module(kind):
    torch.manual_seed(0)
    model = nn.Sequential(SCRIPTS[kind](Counts()), nn.Linear(3, 3))
    graph = ScriptLeaves().trace(model)
    x, plan = torch.randn(2, 3), lambda node: int(node.name == "_1")
    doors = [
        lambda gm: sk.split(gm, plan),
        lambda gm: sk.split(gm, plan, parameters="hoist"),
        lambda gm: copy.deepcopy(sk.split(gm, plan)),
        lambda gm: sk.split_module(gm, None, plan),
        lambda gm: sk.inline(sk.split(gm, plan)),
    ]
    for door in doors:
        whole, cut = (fx.GraphModule(copy.deepcopy(model), graph) for _ in range(2))
        made = door(cut)
        for _ in range(3):
            assert torch.equal(whole(x), made(x))
    assert sk.plan(cut, sk.policies.RoundRobin(2)).parts
