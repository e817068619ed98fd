"""Facts: order edges, copy bans, followers, module paths."""

from __future__ import annotations

import operator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from handgraphs import graph_of
from torch import fx, nn
from torch.nn.utils import parametrizations

import splitkit as sk
from splitkit import costs
from splitkit.errors import GraphError
from splitkit.frontends.joint_capture import capture
from splitkit.graph.dataflow import analyze, crossing_values, module_path
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same


def build(write, root=None):
    """Write a graph with a function of (call, get, x, y); names are kept in a dict."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = {"x": x, "y": y}

    def call(name, target, *args, **kwargs):
        make = graph.call_method if isinstance(target, str) else graph.call_function
        node = make(target, args, kwargs)
        node.name = name
        made[name] = node
        return node

    graph.output(write(call, graph.get_attr, x, y))
    gm = fx.GraphModule(root or nn.Module(), graph)
    return analyze(gm), {n.name: n for n in gm.graph.nodes}


def after(flow, nodes, name):
    return {n.name for n in flow.after[nodes[name]]}


def test_the_drawing_of_hazards_in_effects_py():
    def write(call, get, x, y):
        a = call("a", "add_", x, 1)
        z = call("z", torch.mul, x, 2)
        w = call("w", "mul_", x, 3)
        return a, z, w

    flow, n = build(write)
    assert after(flow, n, "a") == set()
    assert after(flow, n, "z") == {"a"}
    assert after(flow, n, "w") == {"a", "z"}
    assert set(flow.once) == {n["a"], n["w"]}


def test_a_write_through_a_view_reaches_the_base_and_other_views():
    def write(call, get, x, y):
        base = call("base", torch.sin, x)
        one = call("one", "view", base, -1)
        two = call("two", "t", base)
        call("write", "fill_", one, 0.0)
        return call("read_base", torch.cos, base), call("read_two", torch.cos, two), call("other", torch.cos, y)

    flow, n = build(write)
    assert after(flow, n, "read_base") == after(flow, n, "read_two") == {"write"}
    assert after(flow, n, "other") == set()
    assert {m.name for m in flow.once} == {"base", "one", "two", "write"}
    assert "written by another node" in flow.once[n["base"]]


def test_two_names_of_one_tensor_and_views_of_it_are_one_class():
    root = nn.Module()
    root.register_buffer("a", torch.zeros(4))
    root.register_buffer("b", root.a)
    root.register_buffer("part", root.a[:2])
    root.register_buffer("c", torch.zeros(4))

    def write(call, get, x, y):
        call("write", "add_", get("a"), x)
        return [call(f"read_{k}", torch.sin, get(k)) for k in ("b", "part", "c")]

    flow, n = build(write, root)
    assert after(flow, n, "read_b") == after(flow, n, "read_part") == {"write"}
    assert after(flow, n, "read_c") == set()


def test_a_reference_is_no_read():
    root = nn.Module()
    root.register_buffer("a", torch.zeros(4))
    graph = fx.Graph()
    early = graph.get_attr("a")
    write = graph.call_method("add_", (early, 1))
    late = graph.get_attr("a")
    read = graph.call_function(torch.sin, (late,))
    again = graph.call_method("add_", (early, 1))
    graph.output((read, again))
    flow = analyze(fx.GraphModule(root, graph))
    assert flow.after[again] == (write, read) or set(flow.after[again]) == {write, read}
    assert late not in flow.after


def test_random_ops_keep_their_order_and_prints_theirs():
    def write(call, get, x, y):
        a = call("a", torch.rand_like, x)
        call("p", print, "one")
        b = call("b", torch.nn.functional.dropout, x, 0.5, True)
        call("q", print, "two")
        return a, b

    flow, n = build(write)
    assert after(flow, n, "b") == {"a"}
    assert after(flow, n, "q") == {"p"}
    assert after(flow, n, "p") == set()
    assert flow.once[n["a"]] == "it draws random numbers"


def test_checks_keep_their_place_among_prints_and_are_free_among_themselves():
    def write(call, get, x, y):
        check = torch.ops.aten._assert_async.msg
        call("c1", check, x, "no")
        call("c2", check, y, "no")
        call("p", print, "one")
        call("c3", check, y, "no")
        return x

    flow, n = build(write)
    assert after(flow, n, "c2") == set()
    assert after(flow, n, "p") == {"c1", "c2"}
    assert after(flow, n, "c3") == {"p"}


def test_inputs_whose_example_values_share_memory_are_one_class():
    shared = torch.zeros(4)
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = shared, shared[:2]
    write = graph.call_method("add_", (x, 1))
    read = graph.call_function(torch.sin, (y,))
    graph.output((write, read))
    flow = analyze(fx.GraphModule(nn.Module(), graph))
    assert flow.after[read] == (write,)


def test_members_of_tuples_follow_their_producer_also_when_nested():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4)

        def forward(self, x):
            y, (h, c) = self.rnn(x)
            a, b = y.chunk(2, -1)
            return a + b, h[0], c[:, None], x[0]

    gm = fx.symbolic_trace(Nested())
    flow = analyze(gm)
    producer = {n.name: flow.producer(n).name for n in flow.followers}
    assert set(producer.values()) == {"rnn", "chunk"}
    indexing = [n for n in gm.graph.nodes if n.target is operator.getitem and n not in flow.followers]
    assert {n.args[0].name for n in indexing if n.args[0].op == "placeholder"} == {"x"}
    assert flow.is_placeable(next(n for n in indexing if n.args[0].op == "placeholder"))


def test_a_graph_is_asked_for():
    with pytest.raises(GraphError, match="SK101.*not on Linear"):
        analyze(nn.Linear(2, 2))


def test_an_attribute_that_is_not_there_is_named():
    root = nn.Module()
    root.w = nn.Parameter(torch.ones(1))
    graph = fx.Graph()
    graph.output(graph.get_attr("w"))
    gm = fx.GraphModule(root, graph)
    del gm.w
    with pytest.raises(GraphError, match="SK104.*'w'"):
        analyze(gm)


def _parametrized(wrapper):
    graph, root = fx.Graph(), nn.Module()
    root.owner = nn.Linear(2, 2)
    graph.output(graph.call_function(torch.mm, (graph.placeholder("x"), graph.get_attr("owner.weight"))))
    gm = fx.GraphModule(root, graph)
    wrapper(gm.owner)
    return gm


@pytest.mark.parametrize("wrapper", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_a_weight_that_is_computed_at_each_read_is_refused_and_the_analysis_does_not_read_it(wrapper):
    gm = _parametrized(wrapper)
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    with pytest.raises(GraphError, match=r"SK104.*owner\.weight.*anew"):
        analyze(gm)
    assert all(torch.equal(before[name], value) for name, value in gm.state_dict().items())


def test_both_remedies_for_a_computed_weight_work():
    x = torch.randn(2, 2)
    gm = _parametrized(parametrizations.weight_norm)
    assert sk.compare(gm, sk.split(sk.capture(gm, x), lambda node: 0), x).same
    torch.nn.utils.parametrize.remove_parametrizations(gm.owner, "weight")
    assert sk.compare(gm, sk.split(gm, lambda node: 0), x).same


def test_a_property_that_returns_what_is_stored_is_no_computation():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = nn.Parameter(torch.ones(2, 2))

        stored = property(lambda self: self.held)
        doubled = property(lambda self: self.held * 2)

    for name, refused in (("stored", False), ("doubled", True)):
        graph, root = fx.Graph(), nn.Module()
        root.owner = Owner()
        graph.output(graph.call_function(torch.relu, (graph.get_attr(f"owner.{name}"),)))
        gm = fx.GraphModule(root, graph)  # it copies the value; a wrapper that is put in later computes
        gm.owner = Owner()
        with pytest.raises(GraphError, match="SK104") if refused else nullcontext():
            analyze(gm)


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ({"a": ("", "Model"), "b": ("h.0.attn", "Attention")}, "h.0.attn"),
        ({"b": ("h.0@1", "Block")}, "h.0"),
        ({"b": ("L['self'].h[0].mlp", "MLP")}, "h.0.mlp"),
        ({"b": ("L['self']._modules['h']._modules['3']", "Block")}, "h.3"),
        ({}, ""),
    ],
)
def test_module_paths_of_every_capture(stack, path):
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = stack
    assert module_path(node) == path


def test_time_is_linear_in_the_graph():
    """A write after many reads, many times: order edges must not grow with the square."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(60):
        for _ in range(50):
            graph.call_function(torch.sin, (x,))
        graph.call_method("add_", (x, 1))
    graph.output(x)
    flow = analyze(fx.GraphModule(nn.Module(), graph))
    assert sum(map(len, flow.after.values())) <= 3 * len(flow.index)


class Owner(nn.Module):
    """Two weights that are halves of one memory, a scale under two names, a constant, and a body with a layer."""

    def __init__(self):
        super().__init__()
        memory = torch.zeros(8)
        self.low, self.high = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("again", self.scale.view(2, 2))
        self.shift = torch.ones(3)
        self.body, self.layer = nn.Linear(4, 4), nn.BatchNorm1d(4)


def test_what_a_node_owns_is_each_memory_once():
    root, graph = Owner(), fx.Graph()
    x = graph.placeholder("x")
    names = ("low", "high", "scale", "again", "shift", "low")
    read = graph.call_function(torch.cat, ([graph.get_attr(name) for name in names],))
    hidden = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "one", x))
    called = graph.call_module("layer", (hidden,))
    graph.output((read, called))
    flow = analyze(fx.GraphModule(root, graph))
    read, hidden, called = (n for n in flow.nodes)
    assert list(map(id, flow.owned(read))) == list(map(id, (root.low, root.high, root.scale, root.shift)))
    assert flow.owned(hidden) == (root.body.weight, root.body.bias)  # of the body that it is given
    assert len(flow.owned(called)) == len([*root.layer.parameters(), *root.layer.buffers()]) == 5
    assert flow.owned(read, hidden, read) == (*flow.owned(read), *flow.owned(hidden))
    assert costs.unit(flow.root).param_bytes(read) == 4 * (4 + 4 + 4 + 3)
    assert costs.unit(flow.root).param_bytes(hidden) == 4 * (16 + 4)


def test_crossing_bytes_count_each_value_once_at_every_cut():
    class Model(nn.Module):
        def forward(self, x):
            a, b = x.sin().chunk(2)
            c = a.cos()
            return c + b + a

    gm = capture(Model(), torch.ones(4, 4))
    flow = analyze(gm)
    half = 2 * 4 * 4
    nbytes = crossing_values(flow, costs.unit(gm), flow.nodes)[1, :-1]
    assert nbytes.tolist() == [
        0,
        2 * half,
        2 * half,
        3 * half,
        2 * half,
    ]


def test_an_item_of_a_list_is_read_after_the_write_before_it():
    def write(g):
        x = g.placeholder("x")
        made = g.call_function(list, ((1, 2, 3),))
        g.call_function(operator.setitem, (made, 0, 7))
        g.output(g.call_function(torch.add, (x, g.call_function(operator.getitem, (made, 0)))))

    gm = graph_of(write)
    with pytest.raises(sk.errors.CycleError, match="getitem must run after the effect or read of setitem"):
        sk.split(gm, {"list_1": 0, "setitem": 1, "getitem": 0, "add": 0})
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.zeros(2))


def test_a_called_module_waits_for_writes_to_its_weights():
    """`Linear` only reads state, and is one of the nodes that effects concern all the same."""

    def write(g):
        x = g.placeholder("x")
        weight = g.call_function(torch.ops.aten.detach.default, (g.get_attr("linear.weight"),))
        g.call_function(torch.ops.aten.add_.Scalar, (weight, 1.0))
        y = g.call_module("linear", (x,))
        g.call_function(torch.ops.aten.mul_.Scalar, (weight, 3.0))
        g.output(y)

    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    gm = graph_of(write, root)
    parts = {"detach_default": 0, "add__scalar": 0, "linear": 1, "mul__scalar": 0}
    with pytest.raises(sk.errors.CycleError):
        sk.split(gm, parts)


def test_buffers_of_one_memory_in_two_storages_are_one_class():
    memory = np.zeros(3, dtype=np.float32)
    root = nn.Module()
    root.register_buffer("a", torch.from_numpy(memory))
    root.register_buffer("b", torch.from_numpy(memory))

    def write(g):
        x = g.placeholder("x")
        g.call_method("add_", (g.get_attr("a"), x))
        g.output(g.call_function(torch.mul, (g.get_attr("b"), 2)))

    flow = analyze(graph_of(write, root))
    assert flow.after[flow.nodes[1]] == (flow.nodes[0],)


@pytest.mark.parametrize(
    "edit",
    [
        lambda other, x, a, b, out: setattr(a, "args", (other, 1)),
        lambda other, x, a, b, out: setattr(b, "args", ([a, other],)),
        lambda other, x, a, b, out: setattr(b, "kwargs", {"dim": other}),
        lambda other, x, a, b, out: setattr(out, "args", ({"r": [a, other]},)),
        lambda other, x, a, b, out: setattr(a, "args", (x, slice(other, 1))),
        lambda other, x, a, b, out: setattr(a, "args", (b, 1)),
        lambda other, x, a, b, out: setattr(a, "args", (a, 1)),
    ],
)
def test_a_node_of_another_graph_is_refused_by_every_verb(edit):
    graph, other = fx.Graph(), fx.Graph().placeholder("z")
    x = graph.placeholder("x")
    a = graph.call_function(torch.add, (x, 1))
    b = graph.call_function(torch.cat, ([a, x],))
    out = graph.output({"r": [a, b]})
    gm = fx.GraphModule(nn.Module(), graph)
    edit(other, x, a, b, out)
    for verb in (analyze, capture, lambda m: sk.split(m, lambda n: 0), lambda m: sk.split_module(m, None, id)):
        with pytest.raises(GraphError, match="SK111"):
            verb(gm)


@pytest.mark.parametrize("write", [torch._foreach_add_, operator.setitem, "append"])
def test_members_of_a_list_that_is_written_to_do_not_follow_it(write):
    """They would run where the list is made, before the write."""

    def reads(call, get, x, y):
        parts = call("parts", torch.chunk, x, 2)
        early = call("early", operator.getitem, parts, 0)
        call("write", write, parts, *((0, y) if write is operator.setitem else (1,)))
        return early, call("late", operator.getitem, parts, 0)

    flow, n = build(reads)
    assert not flow.followers
    assert after(flow, n, "late") == {"write"} and "early" in after(flow, n, "write")


@pytest.mark.parametrize(
    ("item", "together"), [(0, True), ("key", True), (slice(1), True), (None, False), (..., False)]
)
def test_an_item_that_a_tensor_does_not_have_stays_with_its_maker(item, together):
    """The maker returns what nobody knows; an index of tensors alone (None, an ellipsis) makes a view."""

    def write(call, get, x, y):
        made = call("made", "unknown_method", x)
        return call("item", operator.getitem, made, item)

    flow, n = build(write)
    assert (flow.followers.get(n["item"]) is n["made"]) is together
