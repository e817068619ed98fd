"""Remedies of errors about plans and their parts (SK2xx)."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from carried import Remedy, refusal
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.extend import Part, prune, rematerialize
from splitkit.graph.dataflow import analyze
from splitkit.graph.ops import declared as declarations
from splitkit.plans.record import Plan
from splitkit.policies import SaveAll, Stages

X = torch.linspace(0.1, 1, 4)


class Chain(nn.Module):
    def forward(self, x):
        return (x + 1) * 2 - 3


class Writes(nn.Module):
    """Writes a buffer that another node reads, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(4))

    def forward(self, x):
        y = x * self.state
        self.state.add_(x)
        return y.sin() + nn.functional.dropout(x, 0.5, True)


def chain():
    return fx.symbolic_trace(Chain())


def by_name(gm):
    return {n.name: n for n in gm.graph.nodes}


def same(gm, plan, *inputs, **options):
    """Whether the split computes what the graph computes, from the same state and seed."""
    inputs = inputs or (X,)
    made = sk.split(copy.deepcopy(gm) if not isinstance(plan, Plan) else gm, plan, **options)
    whole = copy.deepcopy(gm)
    torch.manual_seed(0)
    want = whole(*inputs)
    torch.manual_seed(0)
    return all(torch.equal(a, b) for a, b in zip(leaves(made(*inputs)), leaves(want), strict=True))


def leaves(value):
    return value if isinstance(value, tuple) else (value,)


class Key:
    """A key that equals everything, or (``sane``) only itself."""

    def __init__(self, sane):
        self.sane = sane

    def __eq__(self, other):
        return self is other if self.sane else True

    def __hash__(self):
        return 0


class Named:
    """Two keys whose text is the same."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def keyed(key):
    gm = chain()
    return sk.split(gm, dict.fromkeys(("add", "mul", "sub"), key))


def cyclic(**options):
    return same(chain(), {"add": 0, "mul": 1, "sub": 0}, **options)


def relayed(left=()):
    gm = chain()
    plan = Plan.of({n: 0 for n in analyze(gm).nodes if n.name not in left})
    return sk.extend.relay(analyze(gm), plan)


SIMPLE = [
    Remedy(
        "SK206",
        "Use 'plain' or 'checkpoint'.",
        lambda: Part(0, call="twice"),
        (lambda: Part(0, call="plain"), lambda: Part(0, call="checkpoint")),
    ),
    Remedy("SK206", "Use a whole number, 1 or more.", lambda: Part(0, replicas=0), lambda: Part(0, replicas=1)),
    Remedy(
        "SK206",
        "Use torch.device('cuda:0').",
        lambda: Part(0, device="cuda:0"),
        lambda: Part(0, device=torch.device("cuda:0")),
    ),
    Remedy("SK206", "Name the part.", lambda: Part(None), lambda: Part("rest")),
    Remedy(
        "SK206",
        "Name parts with ints, strings, devices or tuples of these.",
        lambda: Part([1]),
        (lambda: Part(1), lambda: Part("one"), lambda: Part(torch.device("cpu")), lambda: Part((1, "one"))),
    ),
    Remedy(
        "SK206",
        "Use 'direct' or 'relay'.",
        lambda: replace(Plan.of({}), routing="pigeon"),
        (lambda: replace(Plan.of({}), routing="direct"), lambda: replace(Plan.of({}), routing="relay")),
    ),
    Remedy("SK205", "Give a mapping: Plan.of({node: part}).", lambda: Plan.of([0, 1]), lambda: Plan.of({})),
    Remedy(
        "SK204",
        "Use nodes, or the names in [n.name for n in gm.graph.nodes], as keys.",
        lambda: sk.split(chain(), {"nosuch": 0}),
        (
            lambda: same(chain(), {n.name: 0 for n in chain().graph.nodes if n.op.startswith("call")}),
            lambda: (gm := chain()) and sk.split(gm, {n: 0 for n in gm.graph.nodes if n.op.startswith("call")})(X),
        ),
    ),
    Remedy(
        "SK203",
        "Give these nodes one part, or say on_cycle='refine' to visit a part several times, 'merge' to join the parts.",
        cyclic,
        (
            lambda: same(chain(), {"add": 0, "mul": 0, "sub": 0}),
            lambda: cyclic(on_cycle="refine"),
            lambda: cyclic(on_cycle="merge"),
        ),
    ),
    Remedy(
        "SK211",
        "Its __eq__ must return True only for equal keys. {...}",
        lambda: keyed(Key(False)),
        (lambda: keyed(Key(True)), lambda: keyed(0)),
    ),
    Remedy("SK209", "Give every node a part, as Stages does.", lambda: relayed({"mul"}), relayed),
    Remedy(
        "SK216",
        "Its parts are {...}.",
        lambda: sk.split(chain(), Stages(2)).replace(7, nn.Identity()),
        lambda: sk.split(chain(), Stages(2)).replace(0, nn.Identity()),
    ),
    Remedy(
        "SK216",
        "Pass a torch.nn.Module, for example one whose forward calls the object.",
        lambda: sk.split(chain(), Stages(1)).replace(0, torch.sin),
        lambda: Calls.in_place_of(torch.sin),
    ),
]


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)

    @classmethod
    def in_place_of(cls, function):
        made = sk.split(chain(), Stages(1))
        made.replace(0, cls(function))
        return torch.equal(made(X), function(X))


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


def test_a_plan_of_another_graph(tmp_path):
    gm, edited = chain(), chain()
    plan = sk.plan(gm, Stages(2))
    plan.save(tmp_path / "plan.json")
    with refusal("SK201", "Plan again after editing the graph, or load the plan with Plan.load(path, gm.graph)."):
        sk.split(edited, plan)
    assert same(edited, sk.plan(edited, Stages(2)))
    assert same(edited, Plan.load(tmp_path / "plan.json", edited.graph))


@pytest.mark.parametrize("name", ["dropout", "add_"])
def test_a_node_that_runs_once(name):
    gm = fx.symbolic_trace(Writes())
    flow, nodes = analyze(gm), by_name(gm)
    once = Plan.of({n: int(n.name == "add") for n in flow.nodes})
    with refusal("SK202", "Give it one part. splitkit.extend.rematerialize never copies such nodes."):
        sk.split(gm, once.place({nodes[name]: (0, 1)}))
    assert same(gm, once)
    copied = rematerialize(flow, once, 1)
    assert copied[nodes[name]] == (0,) and copied[nodes["sin"]] == (0, 1)


def test_a_cycle_through_unknown_code():
    gm = with_code(seemingly_changes_a_mode)
    where = {"cos": 0, "seemingly_changes_a_mode": 1, "zeros": 0, "add": 1}
    with refusal(
        "SK203",
        (
            "Give these nodes one part, or say on_cycle='refine' to visit a part several times, 'merge' to join the "
            "parts. The effects of {...} are unknown: declare them with splitkit.extend.declare."
        ),
    ):
        sk.split(gm, where)
    assert same(gm, dict.fromkeys(where, 0))
    assert same(gm, where, on_cycle="refine")
    assert same(gm, where, on_cycle="merge")
    with declared(seemingly_changes_a_mode):
        assert same(gm, where)


def seemingly_changes_a_mode(x):
    torch.set_default_dtype(torch.get_default_dtype())
    return x * 1


@contextmanager
def declared(function):
    sk.extend.declare(function)
    try:
        yield
    finally:
        declarations._DECLARED.pop(function)


def with_code(function):
    """A graph that makes tensors before and after a function that it does not know."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.cos, (x,))
    opaque = graph.call_function(function, (before,))
    after = graph.call_function(torch.zeros, (4,))
    graph.output((after, graph.call_function(torch.add, (before, opaque))))
    return fx.GraphModule(nn.Module(), graph)


def test_one_place_twice():
    gm = chain()
    add = by_name(gm)["add"]
    with refusal("SK205", "Use Plan.of({node: part}) to give each node one part."):
        Plan({add: (0, 0)})
    assert Plan.of({add: 0}).home(add) == 0


def test_a_part_that_a_plan_lacks():
    gm = chain()
    flow, plan = analyze(gm), sk.plan(gm, Stages(2))
    with refusal("SK206", "Its parts are {...}.") as told:
        sk.extend.merge(flow, plan, 9, 0)
    assert told.value.remedy == f"Its parts are {list(plan.parts)}."
    assert same(gm, sk.extend.merge(flow, plan, *plan.parts))


def test_names_in_a_file(tmp_path):
    gm = chain()
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
    with refusal("SK206", "Name parts with ints, strings, devices or tuples of these."):
        Plan.of(dict.fromkeys(nodes, frozenset("a"))).save(tmp_path / "plan.json")
    for key in (1, "one", torch.device("cpu"), (1, "one")):
        Plan.of(dict.fromkeys(nodes, key)).save(tmp_path / "plan.json")
        assert same(gm, Plan.load(tmp_path / "plan.json", gm.graph))


def test_a_checkpointed_effect():
    gm = fx.symbolic_trace(Writes())
    nodes = by_name(gm)
    parts = {0: Part(0, call="checkpoint"), 1: Part(1)}
    where = dict.fromkeys(analyze(gm).nodes, (0,))
    with refusal("SK207", "Move the node to another part, or use call='plain' for that part."):
        sk.split(gm, Plan(where, parts))
    plain = Plan(where, {0: Part(0, call="plain")})
    assert same(gm, plain)
    moved = Plan({n: (0,) if n is nodes["sin"] else (1,) for n in where}, parts)
    with refusal("SK203", "Give these nodes one part"):
        sk.split(gm, moved)  # sin reads and is read by part 1
    assert same(gm, Plan({n: (0,) if n in (nodes["add"], nodes["sin"]) else (1,) for n in where}, parts))


def test_a_node_in_no_part():
    gm = chain()
    nodes = by_name(gm)
    dropped = Plan({nodes["add"]: (), nodes["mul"]: (0,), nodes["sub"]: (0,)})
    with refusal("SK208", "Give it a part. splitkit.extend.prune drops only nodes that nothing needs."):
        sk.split(gm, dropped)
    whole = dropped.place({nodes["add"]: (0,)})
    assert same(gm, whole) and prune(analyze(gm), whole)[nodes["add"]] == (0,)


def test_inputs_that_share_memory():
    def run(x, y):
        early = y * 1
        x.add_(1)
        return y - early

    gm = fx.symbolic_trace(run)
    another, kept = {"mul": 1, "add_": 0, "sub": 1}, {"mul": 0, "add_": 1, "sub": 2}
    x = torch.ones(4)
    with refusal(
        "SK212",
        "{...}, or split into parts that keep the order of the graph. splitkit.split(..., check_inputs=False) leaves "
        "this check out.",
    ):
        sk.split(gm, another)(x, x)
    assert torch.equal(sk.split(gm, another)(x.clone(), x), run(x.clone(), x))
    assert torch.equal(sk.split(gm, kept)(x, x), run(x, x))
    sk.split(gm, another, check_inputs=False)(x, x)


class WritesLater(nn.Module):
    """Its second graph writes the buffer that the backward of the first one reads."""

    def __init__(self, copies=False, writes=True):
        super().__init__()
        self.linear, self.copies, self.writes = nn.Linear(4, 4), copies, writes
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        h = self.linear(x) * (self.b.clone() if self.copies else self.b)
        torch._dynamo.graph_break()
        if self.writes:
            self.write()
        return h.sum() + self.linear(x).sum()

    def write(self):
        self.b.add_(1)


def test_a_later_graph_writes_a_buffer():
    x = torch.randn(3, 4)
    torch._dynamo.reset()
    with refusal("SK215", "Read a copy (buffer.clone()), or write to it after backward."):
        sk.apply(WritesLater(), SaveAll(), x)
    for model in (WritesLater(copies=True), WritesLater(writes=False)):
        torch._dynamo.reset()
        plain = copy.deepcopy(model)
        trained = sk.apply(model, SaveAll(), x)
        for _ in range(2):
            losses = []
            for one, run in ((model, trained), (plain, plain)):
                losses.append(run(x))
                losses[-1].backward()
                if not one.writes:
                    one.write()
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_unknown_code_in_a_region():
    graph = fx.Graph()
    x = graph.placeholder("x")
    handle = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    first = graph.call_function(torch.sin, (x,))
    inside = graph.call_function(torch.cos, (graph.call_function(seemingly_changes_a_mode, (first,)),))
    graph.call_function(_torch.EXIT_AUTOCAST, (handle,))
    graph.output(graph.call_function(torch.neg, (inside,)))
    gm = fx.GraphModule(nn.Module(), graph)
    apart = {"sin": 0, "seemingly_changes_a_mode": 0, "cos": 1, "neg": 1}
    with refusal(
        "SK217",
        (
            "Put {...} and all nodes after it in the region into one part, or declare its effects with "
            "splitkit.extend.declare."
        ),
    ):
        sk.split(gm, apart)
    assert same(gm, {**apart, "seemingly_changes_a_mode": 1})
    with declared(seemingly_changes_a_mode):
        assert same(gm, apart)


def test_code_that_reaches_the_graph_module():
    class Leaf(nn.Module):
        def forward(self, x):
            return x * 2

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(4))

    def made(attribute):
        root = nn.Module()
        root.register_buffer("state", torch.zeros(4))
        root.holder, root.leaf = Holder(), Leaf()
        graph = fx.Graph()
        leaf = graph.call_module("leaf", (graph.placeholder("x"),))
        graph.output(graph.call_function(torch.add, (leaf, graph.get_attr(attribute))))
        return fx.GraphModule(root, graph)

    where = {"leaf": 0, "add": 1}
    gm = made("state")
    gm.leaf.other = [gm]
    with refusal(
        "SK218",
        "Keep the attributes that it changes in a submodule, or declare its effects with splitkit.extend.declare.",
    ):
        sk.split(gm, where)
    kept = made("holder.state")
    kept.leaf.other = [kept.holder]  # the submodule, and not the graph module
    assert torch.equal(sk.split(kept, where)(X), X * 2)
    with declared(Leaf):
        assert torch.equal(sk.split(gm, where)(X), X * 2)


class Meter:
    def __init__(self):
        self.total = torch.zeros(4)

    def add(self, x):
        self.total = self.total + 1
        return self.total

    def sum(self):
        return self.total.sum()


def test_an_object_as_input():
    def run(x, y):
        return x.add(1), y.mul(2), x.sum()

    gm, where = fx.symbolic_trace(run), {"add": 0, "mul": 1, "sum_1": 0}
    with refusal(
        "SK219",
        (
            "Annotate the input in forward ({...}: {...}), so that the graph knows it, and split again. "
            "splitkit.split(..., check_inputs=False) leaves this check out."
        ),
    ):
        sk.split(gm, where)(Meter(), X)
    run.__annotations__["x"] = Meter
    gm = fx.symbolic_trace(run)
    want = gm(Meter(), X)
    again = {"add": 0, "mul": 0, "sum_1": 1}
    for made in (sk.split(gm, again), sk.split(gm, again, check_inputs=False)):
        assert all(torch.equal(a, b) for a, b in zip(want, made(Meter(), X), strict=True))
