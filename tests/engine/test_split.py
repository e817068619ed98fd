"""The parts and the parent: signatures, names, meta, parameters."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from zoographs import specimens

import splitkit as sk
from splitkit.engine.codegen.writer import LeanGraph
from splitkit.engine.split import split
from splitkit.engine.split_module import split_module
from splitkit.errors import CycleError, GraphError, PlanError, PolicyError
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import Part
from splitkit.plans.record import Plan
from splitkit.policies import RoundRobin, Stages
from splitkit.testing import assert_same

ZOO = specimens()


def test_defaults_and_keyword_arguments_are_kept():
    class Model(nn.Module):
        def forward(self, a, b=2.0, scale=1.0):
            return (a + b) * scale

    gm = fx.symbolic_trace(Model())
    made = split(gm, RoundRobin(2))
    x = torch.ones(2)
    for args, kwargs in [((x,), {}), ((x, 3.0), {}), ((x,), {"scale": 5.0}), ((x, 1.0, 2.0), {})]:
        assert torch.equal(made(*args, **kwargs), gm(*args, **kwargs))


def test_variadic_inputs_are_kept():
    class Model(nn.Module):
        def forward(self, a, *rest, **more):
            return a + rest[0] - more["shift"]

    gm = fx.symbolic_trace(Model())
    made = split(gm, RoundRobin(2))
    x = torch.ones(2)
    assert torch.equal(made(x, x * 2, shift=x), gm(x, x * 2, shift=x))


def test_pytrees_in_and_out():
    class Model(nn.Module):
        def forward(self, batch, *, flag):
            return {"sum": batch["a"] + batch["b"][0], "more": [batch["a"].sin() * flag["by"]]}

    batch, flag = {"a": torch.ones(2), "b": [torch.ones(2)]}, {"by": torch.ones(2)}
    gm = sk.capture(Model(), batch, flag=flag)
    made = split(gm, RoundRobin(2))
    out = made(batch, flag=flag)
    assert torch.equal(out["sum"], torch.full((2,), 2.0)) and isinstance(out["more"], list)


def test_meta_training_and_graph_meta_are_carried_over():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU()).eval()
    gm = fx.symbolic_trace(model)
    gm.meta["tag"] = "mine"
    for node in gm.graph.nodes:
        node.meta["val"], node.meta["mark"] = torch.empty(2), node.name
    made = split(gm, Plan.of({n: i % 3 for i, n in enumerate(gm.graph.nodes) if n.op == "call_module"}))
    assert made.module.meta["tag"] == "mine" and "partition_names" in made.module.meta
    assert not any(m.training for m in made.module.modules())
    assert all(n.meta["mark"] == n.name for part in made.parts.values() for n in part.graph.nodes if n.op != "output")
    for node in made.module.graph.nodes:
        assert isinstance(node.meta["val"], torch.Tensor), node


def test_nodes_keep_their_names_and_values_cross_under_theirs():
    specimen = ZOO["many outputs"]
    made = split(specimen.graph, RoundRobin(3))
    for key, copies in made.copies.items():
        assert all(node.name == copied.name for node, copied in copies.items()), key
    for key, sub in made.subgraphs.items():
        inputs = [n.name for n in made.parts[key].graph.nodes if n.op == "placeholder"]
        assert inputs == [n.name for n in sub.inputs]


def test_inputs_and_outputs_are_in_graph_order():
    for specimen in ZOO.values():
        made = split(specimen.graph, RoundRobin(3))
        for sub in made.subgraphs.values():
            for values in (sub.inputs, sub.outputs):
                assert list(values) == sorted(values, key=made.flow.index.__getitem__)


def test_tuples_do_not_cross():
    for name in ("many outputs", "many outputs, exported"):
        made = split(ZOO[name].graph, RoundRobin(4))
        for sub in made.subgraphs.values():
            assert not any(
                u.target is operator.getitem and u in made.flow.followers for v in sub.inputs for u in v.users
            )


class Names(nn.Module):
    """Two modules whose flattened names collide, and attributes called like parts."""

    def __init__(self):
        super().__init__()
        self.a = nn.Module()
        self.a.b = nn.Linear(2, 2)
        self.a_b = nn.Linear(2, 2)
        self.submod_0 = nn.Parameter(torch.full((2,), 5.0))

    def forward(self, x):
        return self.a_b(self.a.b(x)) * self.submod_0


@pytest.mark.parametrize("parameters", ["own", "hoist"])
def test_no_names_collide(parameters):
    gm = fx.symbolic_trace(Names())
    made = split(gm, lambda node: 0, parameters=parameters)
    assert_same(gm, made, torch.ones(3, 2))
    assert_same(gm, split_module(gm, None, lambda node: 0), torch.ones(3, 2))


@pytest.mark.parametrize("parameters", ["own", "hoist"])
@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_the_name_map_is_complete_and_true_both_ways(specimen, parameters):
    made = split(specimen.graph, Stages(3), parameters=parameters)
    attributes = dict(made.module.named_parameters(remove_duplicate=False))
    attributes |= dict(made.module.named_buffers(remove_duplicate=False))
    assert set(made.qualified_names) == set(attributes)
    for name, original in made.qualified_names.items():
        *path, last = original.split(".")
        assert getattr(specimen.graph.get_submodule(".".join(path)), last) is attributes[name]
        assert name in made.locations[original]


def test_tied_weights_are_recorded_as_shared():
    made = split(ZOO["tied language model"].graph, Stages(4))
    tied = [g for g in made.shared if any("embedding" in n for n in g)]
    assert len(tied) == 1 and {n.split(".")[0] for n in tied[0]} == {"submod_0", "submod_3"}
    assert split(ZOO["tied language model, exported"].graph, Stages(4), parameters="hoist").shared == ()


def test_parts_own_what_they_read_under_original_names():
    made = split(ZOO["tied language model, exported"].graph, Stages(2))
    for key, part in made.parts.items():
        read = {str(n.target) for n in made.subgraphs[key].nodes if n.op == "get_attr"}
        assert {n for n, _ in part.named_parameters()} <= read
    hoisted = split(ZOO["tied language model, exported"].graph, Stages(2), parameters="hoist")
    assert not any(list(p.parameters()) for p in hoisted.parts.values())


class Plus(nn.Module):
    def forward(self, x):
        return x + 1


def test_buffers_stay_persistent_or_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("kept", torch.ones(2))
            self.inner.register_buffer("lost", torch.ones(2), persistent=False)

        def forward(self, x):
            return x + self.inner.kept + self.inner.lost

    gm = fx.symbolic_trace(Model())
    gm.inner.register_buffer("lost", gm.inner.lost, persistent=False)  # symbolic_trace makes it persistent
    made = split(gm, lambda node: "all")
    assert list(made.module.state_dict()) == ["submod_all.inner.kept"]
    assert list(gm.state_dict()) == ["inner.kept"]


def test_a_constant_of_the_graph_is_not_in_the_state_of_its_part():
    """A checkpoint of the model does not have it, and did not load into the parts."""
    gm = fx.symbolic_trace(Plus())
    gm.lifted = torch.ones(2)
    with gm.graph.inserting_before(gm.graph.output_node()):
        last = gm.graph.output_node().args[0]
        made = gm.graph.call_function(torch.add, (last, gm.graph.create_node("get_attr", "lifted")))
    gm.graph.output_node().args = (made,)
    gm.recompile()
    module = split(gm, RoundRobin(2)).module
    assert not gm.state_dict() and not module.state_dict()
    assert torch.equal(module(torch.ones(2)), gm(torch.ones(2)))


def test_a_part_run_alone_leaves_the_caller_as_it_was():
    specimen = ZOO["autocast and no_grad"]
    made = split(specimen.graph, RoundRobin(2))
    for key, part in made.parts.items():
        part(*(torch.randn(6, 6) for _ in made.subgraphs[key].inputs))
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"), key


def test_regions_open_only_where_a_node_wants_them():
    made = split(ZOO["autocast and no_grad"].graph, lambda node: node.name)
    code = made.parts["mm"].code
    assert "autocast" not in code and "grad" not in code
    for part in made.parts.values():
        ops = [n.op for n in part.graph.nodes]
        assert "placeholder" not in ops[ops.index("call_function") :]


def test_each_part_is_compiled_once(monkeypatch):
    counted = []
    original = LeanGraph.python_code
    monkeypatch.setattr(LeanGraph, "python_code", lambda self, *a, **k: counted.append(1) or original(self, *a, **k))
    made = split(ZOO["skips"].graph, Stages(4))
    assert len(counted) == len(made.parts) + 1


def test_splits_can_be_copied_and_trained_apart():
    specimen = ZOO["skips"]
    made = split(specimen.graph, Stages(2))
    other = copy.deepcopy(made.module)
    assert_same(made.module, other, *specimen.inputs)
    shared = {id(p) for p in made.module.parameters()} & {id(p) for p in other.parameters()}
    assert not shared


def test_hooks_of_the_original_see_the_original():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    gm = fx.symbolic_trace(model)
    seen = []
    gm.register_forward_pre_hook(lambda m, args: seen.append(m))
    gm.register_forward_hook(lambda m, args, out: out + 1)
    made = split(gm, RoundRobin(2))
    x = torch.ones(1, 2)
    assert torch.equal(made(x), gm(x))
    assert seen == [gm, gm]


def test_a_static_capture_refuses_other_sizes_when_split_too():
    gm = sk.capture(nn.Linear(2, 2), torch.ones(3, 2))
    made = split(gm, lambda node: 0)
    with pytest.raises(RuntimeError, match=r"[Ee]xpected input"):
        made(torch.ones(4, 2))


def test_the_remedies_of_wrong_calls():
    with pytest.raises(GraphError, match=r"(?s)SK101.*splitkit.capture\(model"):
        split(nn.Linear(2, 2), RoundRobin(2))
    with pytest.raises(PolicyError, match="(?s)SK302.*'own' or 'hoist'"):
        split(ZOO["skips"].graph, RoundRobin(2), parameters="both")


def test_plan_checks_without_building_anything(monkeypatch, chain):
    monkeypatch.setattr("splitkit.engine.codegen.emit.emit", None)
    assert len(sk.plan(chain, RoundRobin(2)).parts) == 3
    with pytest.raises(sk.errors.CycleError):
        sk.plan(chain, {"add": 0, "mul": 1, "sub": 0})


def test_torch_signature():
    gm = fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))
    names: dict[str, str] = {}
    made = split_module(gm, None, {"_0_0": 0, "_1": 1}, names, partition_affix="pp", tuple_return=True)
    assert [n.target for n in made.graph.nodes if n.op == "call_module"] == ["submod_pp_0", "submod_pp_1"]
    assert made.meta["partition_names"] == {"submod_pp_0", "submod_pp_1"}
    assert names == {"submod_pp_0.0_0": "0.0", "submod_pp_1.1": "1"}
    assert isinstance(made.submod_pp_0(torch.ones(1, 2)), tuple)
    assert torch.equal(made(torch.ones(1, 2)), gm(torch.ones(1, 2)))


def test_torch_signature_numbers_inputs_on_demand(chain):
    made = split_module(chain, None, lambda n: {"add": 0}.get(n.name, 1), keep_original_input_name=False)
    assert [n.target for n in made.submod_1.graph.nodes if n.op == "placeholder"] == ["arg_0"]


def test_torch_signature_hoists_parameters_and_leaves_none_in_the_parent():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return (x * self.w).sin()

    made = split_module(fx.symbolic_trace(Model()), None, lambda n: None if n.name == "sin" else 0)
    assert [n for n, _ in made.named_parameters()] == ["w"]
    assert [n.name for n in made.graph.nodes if n.op == "call_method"] == ["sin"]


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_torch_signature_gives_the_same_on_the_zoo(specimen):
    flow = sk.analyze(specimen.graph)
    plan = Stages(3).assign(flow, sk.costs.unit(specimen.graph))
    assert_same(
        specimen.graph, split_module(specimen.graph, None, plan), *specimen.inputs, tolerance=specimen.tolerance
    )


class Skipping(nn.Module):
    """part 0: a; part 1: the write; part 2: b, c. `b` reads what is written, `c` reads `a`."""

    def forward(self, x, unused):
        a = x.sin()
        x.add_(1)
        b = x.cos()
        c = torch.stack([a, b])
        return c, a


def test_the_parts_as_a_graph_of_networkx():
    import networkx as nx

    gm = fx.symbolic_trace(Skipping())
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.empty(2, 4) if node.name == "stack" else torch.empty(4)
    flow = sk.analyze(gm)
    sin, add, cos, stack = flow.nodes
    parts = {1: Part(1, torch.device("cpu"))}
    made = split(gm, Plan({sin: (0,), add: (1,), cos: (2,), stack: (2,)}, parts))
    graph = made.to_networkx()
    assert list(graph) == [0, 1, 2]
    of_x = {"inputs": ("x",), "input_bytes": 16}
    assert graph.nodes[0] == {
        "kind": "part", "name": "submod_0", "nodes": 1, "device": None, **of_x, "outputs": ("sin",), "output_bytes": 16,
    }  # fmt: skip
    assert graph.nodes[1] == {
        "kind": "part", "name": "submod_1", "nodes": 1, "device": torch.device("cpu"), **of_x,
        "outputs": (), "output_bytes": 0,
    }  # fmt: skip
    assert graph.nodes[2]["outputs"] == ("stack",) and graph.nodes[2]["output_bytes"] == 32
    assert dict(graph.edges) == {
        (0, 1): {"values": (), "bytes": 0, "effect": True},
        (0, 2): {"values": ("sin",), "bytes": 16, "effect": False},
        (1, 2): {"values": (), "bytes": 0, "effect": True},
    }
    assert list(nx.topological_sort(graph)) == [0, 1, 2]


def test_a_relay_is_a_chain_in_networkx():
    specimen = ZOO["skips"]
    flow = sk.analyze(specimen.graph)
    made = split(specimen.graph, sk.extend.relay(flow, Stages(4).assign(flow, sk.costs.unit(specimen.graph))))
    chain = made.to_networkx()
    assert sorted(chain.edges) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("parameters", ["own", "hoist"])
@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_the_graph_of_parts_tells_every_input(specimen, parameters):
    import networkx as nx

    made = split(specimen.graph, {n.name: i % 2 for i, n in enumerate(sk.analyze(specimen.graph).nodes) if i % 5},
                 on_cycle="refine", parameters=parameters)  # fmt: skip
    graph = made.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    for key, sub in made.subgraphs.items():
        taken = [name for _, _, edge in graph.in_edges(key, data=True) for name in edge["values"]]
        assert sorted((*taken, *graph.nodes[key]["inputs"])) == sorted(n.name for n in sub.inputs)


def test_names_of_parts():
    made = split(ZOO["skips"].graph, lambda node: ("cuda:0", len(node.name) > 3), on_cycle="refine")
    assert [made.module.get_submodule(name) for name in made.names.values()] == list(made.parts.values())


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_and_its_local_tensor_are_one_memory(mesh):
    def made():
        root, graph = nn.Module(), fx.Graph()
        root.register_buffer("whole", DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
        root.register_buffer("local", root.whole.to_local())
        before = graph.call_method("mul", (graph.get_attr("local"), 1))
        graph.call_method("add_", (graph.get_attr("whole"), 1))
        graph.output((before, graph.call_method("mul", (graph.get_attr("local"), 1))))
        return fx.GraphModule(root, graph)

    made_, one_by_one = made(), {"mul": 0, "add_": 1, "mul_1": 2}
    assert analyze(made_).after.keys() == {n for n in made_.graph.nodes if n.name in ("add_", "mul_1")}
    for parameters in ("own", "hoist"):
        before, after = split(made(), one_by_one, parameters=parameters)()
        assert (before.sum(), after.sum()) == (0, 4)
    with pytest.raises(CycleError, match="SK203"):
        split(made(), {"mul": 0, "add_": 1, "mul_1": 0})


def test_a_call_compares_the_memory_of_dtensors(mesh):
    def f(x, y):
        read = y * 1
        x.add_(10)
        return read - y

    made = split(fx.symbolic_trace(f), {"mul": 0, "add_": 1, "sub": 0})
    memory = torch.zeros(3)
    whole = DTensor.from_local(memory, mesh, [Replicate()])
    with pytest.raises(PlanError, match="SK212"):
        made(whole, memory)
    assert made(whole, torch.zeros(3)).sum() == 0
