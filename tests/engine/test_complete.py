from __future__ import annotations

import pytest
import torch
from handgraphs import graph_of
from torch import fx, nn
from zoographs import specimens

from splitkit.engine.split import split
from splitkit.errors import PlanError
from splitkit.frontends.joint_capture import capture
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import PARENT, Part
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine
from splitkit.testing import assert_same

ZOO = specimens()


def test_every_node_gets_a_place():
    gm = ZOO["tied language model"].graph
    flow = analyze(gm)
    half = refine(flow, Plan.of(dict.fromkeys(flow.nodes[::2], 0)))
    whole = split(gm, half).plan
    assert set(whole) == set(gm.graph.nodes)
    for node, keys in whole.items():
        if node.op in ("placeholder", "output"):
            assert keys == (PARENT,)
        elif node in flow.followers:
            assert keys == whole[flow.followers[node]]
        elif node.op == "get_attr":
            assert set(keys) == {k for u in node.users for k in whole[u]}
        else:
            assert keys == half.places.get(node, (PARENT,))


def test_hoisted_tensors_stay_in_the_host_and_bodies_do_not():
    gm = ZOO["higher-order regions"].graph
    whole = split(gm, lambda node: 0, parameters="hoist").plan
    attributes = {n.target: keys for n, keys in whole.items() if n.op == "get_attr"}
    bodies = {t for t in attributes if isinstance(gm.get_submodule(str(t).split(".")[0]), fx.GraphModule)}
    assert bodies and all(attributes[t] == (0,) for t in bodies)
    assert all(keys == (PARENT,) for t, keys in attributes.items() if t not in bodies)


def test_foreign_nodes_are_refused(chain):
    other = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    plan = Plan.of({n: 0 for n in other.graph.nodes if n.op.startswith("call")})
    with pytest.raises(PlanError, match="SK201: the plan places"):
        split(chain, plan)


@pytest.mark.parametrize(
    ("name", "node", "reason"),
    [
        ("dropout", "dropout", "draws random numbers"),
        ("mutation", "add_", "writes memory"),
        ("mutation", "norm", "writes memory"),
        ("mutation", "mul", "memory is written by another node"),
    ],
)
def test_copies_of_what_may_run_once_are_refused_with_the_reason(name, node, reason):
    gm = ZOO[name].graph
    flow = analyze(gm)
    found = next(n for n in flow.nodes if n.name == node)
    with pytest.raises(PlanError, match=rf"SK202: {node} is planned in \[0, 1\], but .*{reason}"):
        split(gm, Plan.of({n: [0, 1] if n is found else 0 for n in flow.nodes}))


def checkpointed(gm, keys):
    flow = analyze(gm)
    size = -(-len(flow.nodes) // 3)
    parts = {k: Part(k, call="checkpoint" if k in keys else "plain") for k in range(3)}
    return Plan({n: (i // size,) for i, n in enumerate(flow.nodes)}, parts)


@pytest.mark.parametrize("name", ["tied language model", "tied language model, exported", "dropout", "skips"])
def test_a_checkpointed_part_gives_the_same_and_keeps_less(name):
    specimen = ZOO[name]
    made = split(specimen.graph, checkpointed(specimen.graph, {0, 1}))
    assert_same(specimen.graph, made, *specimen.inputs)
    assert saved(made, specimen.inputs) < saved(specimen.graph, specimen.inputs)


def saved(module, inputs):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        module(*inputs)
    return sum(kept)


@pytest.mark.parametrize("name", ["mutation", "mutation, exported", "key-value cache"])
def test_effects_in_a_checkpointed_part_are_refused(name):
    with pytest.raises(PlanError, match="SK207: part .* is checkpointed and would run .* again"):
        split(ZOO[name].graph, checkpointed(ZOO[name].graph, {0, 1, 2}))


def test_a_checkpointed_reader_of_what_is_written_later_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(2))

        def forward(self, x):
            y = x * self.state
            self.state.add_(x)
            return y.sin()

    gm = fx.symbolic_trace(Model())
    flow = analyze(gm)
    labels = {n.name: n for n in flow.nodes}
    parts = {"early": Part("early", call="checkpoint")}
    plan = Plan({labels["mul"]: ("early",), labels["add_"]: ("late",), labels["sin"]: ("late",)}, parts)
    with pytest.raises(PlanError, match="SK207.*run mul again.*another node writes the memory that it reads"):
        split(gm, plan)


class Masked(nn.Module):
    """Writes memory that its forward has made, as T5 writes its bias of attention."""

    def forward(self, x):
        y = x * 2
        y.add_(x.sin())
        mask = torch.zeros_like(x)
        mask[0].fill_(1.0)
        return (y * mask).tanh() + y


def test_a_checkpointed_part_may_write_memory_that_it_makes_and_no_other_part_writes():
    model, x = Masked(), torch.randn(3, 2, requires_grad=True)
    gm = capture(model, x)
    nodes = [n for n in analyze(gm).nodes if n.op == "call_function"]

    def two(first, *keys):
        places = {n: (0 if i < first else 1,) for i, n in enumerate(nodes)}
        return split(gm, Plan(places, {k: Part(k, call="checkpoint" if k in keys else "plain") for k in range(2)}))

    names = [n.name for n in nodes]
    assert_same(model, two(len(nodes), 0), x)
    assert_same(model, two(names.index("tanh"), 0, 1), x)
    assert_same(model, two(names.index("add_") + 1, 0, 1), x)
    for keys in ((0,), (1,)):  # the first part makes what the second one writes
        with pytest.raises(PlanError, match="SK207.*would run"):
            two(names.index("add_"), *keys)


def test_a_checkpointed_part_that_draws_from_a_generator_of_its_own_is_refused():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.bernoulli, (x,), {"generator": g.get_attr("generator")}))

    root = nn.Module()
    root.generator = torch.Generator()
    gm = graph_of(write, root)
    parts = {0: Part(0, call="checkpoint")}
    with pytest.raises(PlanError, match="SK207.*bernoulli"):
        split(gm, Plan(dict.fromkeys(analyze(gm).nodes, (0,)), parts))
    assert len(split(gm, lambda node: 0).parts) == 1


def test_a_checkpointed_part_that_draws_from_a_generator_that_it_is_given_is_refused():
    def write(g):
        x, generator = g.placeholder("x"), g.placeholder("generator")
        x.meta["val"] = torch.ones(2)
        g.output(g.call_function(torch.bernoulli, (x,), {"generator": generator}))

    gm = graph_of(write, nn.Module())
    with pytest.raises(PlanError, match="SK207.*bernoulli"):
        split(gm, Plan(dict.fromkeys(analyze(gm).nodes, (0,)), {0: Part(0, call="checkpoint")}))


def test_opaque_code_elsewhere_does_not_forbid_checkpoints():
    class Custom(nn.Module):
        def forward(self, x):
            return x.exp()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.custom, self.b, self.c = nn.Linear(2, 2), Custom(), nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            x = torch.tanh(self.a(x * self.scale))
            return self.c(torch.relu(self.b(self.custom(torch.sin(x))))) * self.scale

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Custom) or super().is_leaf_module(m, name)

    model = Model()
    gm = fx.GraphModule(model, Tracer().trace(model))
    where = {"mul": 0, "a": 0, "tanh": 0, "sin": 1, "custom": 1, "b": 1, "relu": 1, "c": 2, "mul_1": 2}
    nodes = {n.name: n for n in gm.graph.nodes}

    def checkpointed(*keys):
        parts = {k: Part(k, call="checkpoint" if k in keys else "plain") for k in range(3)}
        return split(gm, Plan({nodes[n]: (k,) for n, k in where.items()}, parts))

    assert_same(model, checkpointed(0, 2), torch.ones(3, 2, requires_grad=True))
    with pytest.raises(PlanError, match="SK207.*custom"):
        checkpointed(1)
    where |= {"tanh": 1, "custom": 2, "b": 2, "relu": 2}  # custom may write what it is given
    with pytest.raises(PlanError, match="SK207.*sin .*written by another node"):
        checkpointed(1)


def test_a_node_that_others_read_must_be_somewhere(chain, nodes):
    n = nodes(chain)
    with pytest.raises(PlanError, match="SK208: add is in no part of the plan, but mul reads it"):
        split(chain, Plan({n["add"]: (), n["mul"]: (0,), n["sub"]: (0,)}))
    dropped = split(chain, Plan({n["add"]: (0,), n["mul"]: (0,), n["sub"]: (0,)}))
    assert dropped.module(torch.ones(1)) == 1


def test_a_node_with_an_effect_must_be_somewhere():
    def write(g):
        x = g.placeholder("x")
        g.create_node("call_method", "add_", (x, 1), name="written")
        g.output(x)

    gm = graph_of(write)
    (written,) = (node for node in gm.graph.nodes if node.name == "written")
    with pytest.raises(PlanError, match="SK208: written is in no part of the plan, but it writes memory"):
        split(gm, Plan({written: ()}))
