"""Capture of models whose parameters are sharded, in one process that stands for one rank of several."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from campaigns import these_first
from lawtables import JOINT_LAWS, STAGED_LAWS
from shardednets import Net, X, first_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import splitkit as sk
from splitkit.costs import Link
from splitkit.costs.recorded import costs_of
from splitkit.costs.roofline import collective_seconds
from splitkit.engine.pair import Pair
from splitkit.errors import CaptureError, CostError
from splitkit.graph.dataflow import module_path
from splitkit.graph.shards import MeshGroup, collective_group, copies_of, is_wait, local_tensor, sharded_as
from splitkit.policies import Pipeline
from splitkit.view.data.staged_ladder import run_data
from splitkit.view.svg.timeline import TimelineDrawing


@pytest.fixture(scope="module")
def mesh():
    with first_of(4) as made:
        yield made


@pytest.fixture(scope="module")
def joint(mesh):
    """Not to be changed."""
    return sk.capture_joint(sharded(mesh["tp"]), X)


def test_the_graph_is_one_ranks_program(mesh):
    model = sharded(mesh["tp"])
    joint = sk.capture_joint(model, X)
    graph = joint.graph_module.graph
    shapes = {
        joint.signature.parameters.get(n.name): tuple(n.meta["val"].shape) for n in graph.find_nodes(op="placeholder")
    }
    assert shapes["ups.0.weight"] == (16, 8) and shapes["downs.0.weight"] == (8, 16) and shapes["downs.0.bias"] == (8,)
    assert set(joint.signature.parameters.values()) == dict(model.named_parameters()).keys()
    assert list(joint.signature.buffers.values()) == ["seen"] and len(joint.signature.updates) == 1
    met = [node for node in graph.nodes if collective_group(node) is not None]
    assert [(collective_group(node), node.args[1:]) for node in met] == [(MeshGroup("tp", 2), ("sum", "tp=2"))] * 7
    assert [module_path(node) for node in met[:4]] == [f"downs.{i}" for i in range(4)]


def test_gradients_are_sharded_as_their_parameters(mesh):
    model = sharded(mesh["tp"])
    gradients = sk.capture(model, X, training=True).run(X).gradients
    for name, parameter in model.named_parameters():
        assert gradients[name].placements == parameter.placements and gradients[name].shape == parameter.shape


def test_stages_are_balanced_whatever_their_collectives(joint):
    step = joint.split(Pipeline(2, schedule="1f1b", microbatches=4))
    loads = [sum(collective_group(n) is not None for n in stage.forward.graph.nodes) for stage in step.stages]
    assert loads == [2, 2]


def test_a_collective_comes_where_what_it_reads_is_made(joint):
    order = {node: i for i, node in enumerate(joint.graph_module.graph.nodes)}
    for node in order:
        if collective_group(node) is not None:
            assert order[node] - max(order[read] for read in node.all_input_nodes) == 1


def test_a_collective_costs_by_kind_bytes_ranks_and_link(mesh):
    """Two thirds of the bytes arrive from each of two other ranks, in as many steps as the algorithm has."""
    graph = sk.capture_joint(sharded(mesh["tp"]), X).graph_module
    (node, *_) = [n for n in graph.graph.nodes if collective_group(n) is not None]
    link = Link(1e9, 1e-6)
    assert collective_seconds(node, {"tp": link}) == pytest.approx(2 * (3 * 8 * 4 / 2 / 1e9 + 1e-6))
    node.args = (node.args[0], "sum", "tp=3")
    assert collective_seconds(node, {"tp": link}) == pytest.approx(2 * (3 * 8 * 4 * 2 / 3 / 1e9 + 2e-6))
    node.args = (node.args[0], "sum", "tp=8")
    assert collective_seconds(node, {"tp": link}) == pytest.approx(2 * (3 * 8 * 4 * 7 / 8 / 1e9 + 3e-6))
    costs = sk.costs.roofline(graph, "h100", mesh={"tp": link})
    assert costs.seconds(node) == pytest.approx(collective_seconds(node, {"tp": link}) + costs.device.launch)
    with pytest.raises(CostError, match=r"SK322.*'tp', which has no link"):
        sk.costs.roofline(graph, "h100").seconds(node)


def test_a_model_that_fsdp_manages_is_refused(mesh):
    model = fully_shard(Net(1), mesh=mesh["tp"])
    with pytest.raises(CaptureError, match=r"SK401: the model is managed by FSDP"):
        sk.capture_joint(model, X)


def test_two_meshes_with_one_name_are_refused(mesh):
    sk.capture_joint(sharded(mesh["tp"]), X)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(CaptureError, match="SK401.*called tp=2, too"):
        sk.capture_joint(sharded(other["tp"]), X)


def test_what_torch_cannot_trace_is_named_with_the_line_of_the_model(mesh):
    class Branching(Net):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    class Mixing(Net):
        def forward(self, x):
            return super().forward(x) + (x[:, :4] @ self.ups[0].weight).sum()

    for make, line, told in ((Branching, "x.sum() > 0", "branches on a value"), (Mixing, "x[:, :4] @ ", "DTensor")):
        model = make(1)
        parallelize_module(model, mesh["tp"], {"ups.0": ColwiseParallel(), "downs.0": RowwiseParallel()})
        with pytest.raises(
            CaptureError, match=f"SK401: {make.__name__} could not be captured by AOTAutograd"
        ) as refused:
            sk.capture(model, X, training=True)
        (at, *_) = [text for text in str(refused.value).splitlines() if text.strip().startswith("at ")]
        assert "test_sharded_step.py" in at and line in at and told in str(refused.value)


def test_pieces(mesh):
    whole = distribute_tensor(torch.arange(4.0), mesh["tp"], [Replicate()], src_data_rank=None)
    assert local_tensor(whole).tolist() == [0, 1, 2, 3] and local_tensor(X) is X and sharded_as(X, X) is X
    assert sharded_as(torch.ones(4), whole).placements == whole.placements
    groups = [MeshGroup("tp", 2)]
    assert copies_of(whole, groups) == 2 == copies_of(X, groups)
    assert copies_of(sharded(mesh["tp"]).ups[0].weight, groups) == 1


def test_prices_of_collectives_survive_a_file(joint):
    for make in (sk.costs.roofline, sk.costs.fused):
        costs = make(joint.graph_module, "h100", mesh={"tp": Link(1e9, 1e-6)})
        plan = joint.split(Pipeline(2, schedule="1f1b", microbatches=4), costs).plan
        held = sk.Plan.from_dict(joint.graph_module.graph, plan.to_dict())
        found = costs_of(held.prices, joint.graph_module)
        assert found is not costs and [found.seconds(n) for n in plan] == [costs.seconds(n) for n in plan]


def test_collectives_are_not_measured_in_one_process(joint):
    with pytest.raises(CostError, match=r"SK324: all_reduce is a collective over tp=2, which one process") as refused:
        sk.costs.measured(joint.graph_module, (*joint.primals(X), *joint.tangents()))
    assert "mesh={'tp': 'nvlink4'}" in refused.value.remedy


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_shows_when_ranks_exchange(joint, schedule):
    costs = sk.costs.roofline(joint.graph_module, "h100", mesh={"tp": "pcie4"})
    step = joint.split(Pipeline(4 if schedule == "zbv" else 2, schedule=schedule, microbatches=4), costs)
    run = sk.simulate_schedule(step.stage_costs(costs), schedule, 4)
    price = sum(costs.seconds(n) for n in joint.graph_module.graph.nodes if collective_group(n) is not None)
    whole = "FB" if schedule == "1f1b" else "FIW"
    met = [(stage, kind, times) for stage in run.stages for kind in whole for times in stage.exchanges(kind)]
    assert sum(end - start for *_, (start, end) in met) == pytest.approx(price)
    room = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward"}
    assert all(0 <= start < end <= getattr(stage, room[kind]) + 1e-12 for stage, kind, (start, end) in met)
    marks = TimelineDrawing(run).to_svg()
    assert "collectives</" in marks and marks.count("<title>collective</title>") > 8
    told = run_data(run, run.stages)["exchanges"]
    assert [one["F"] for one in told] == [[pytest.approx(t, rel=1e-6) for t in s.exchanges("F")] for s in run.stages]
    plain = sk.simulate_schedule([replace(stage, collectives=()) for stage in run.stages], schedule, 4)
    assert "collective" not in TimelineDrawing(plain).to_svg() and run_data(plain, plain.stages)["exchanges"] == []


@pytest.mark.parametrize("name", these_first([*JOINT_LAWS], [*STAGED_LAWS]))
def test_each_policy_runs_each_collective_once_and_in_order(joint, name):
    """The ranks of a dimension exchange what they have in the same order, whatever is computed again."""
    policy = {**JOINT_LAWS, **STAGED_LAWS}[name]
    costs = sk.costs.roofline(joint.graph_module, "h100", mesh={"tp": "nvlink4"})
    made = joint.split(policy, costs)
    graphs = [made.forward, made.backward] if isinstance(made, Pair) else [g for s in made.stages for g in halves(s)]
    order = {n.name: i for i, n in enumerate(joint.graph_module.graph.nodes) if collective_group(n) is not None}
    met = [[order[n.name] for n in graph.graph.nodes if collective_group(n) is not None] for graph in graphs]
    calls = [n for graph in graphs for n in graph.graph.nodes if collective_group(n) is not None]
    assert all(is_wait(user) for node in calls for user in node.users), "no part may get what is still on its way"
    assert sorted(chain(*met)) == sorted(order.values()) and all(one == sorted(one) for one in met)
    outputs, gradients = made.run(joint.primals(X), joint.tangents())
    whole, found = joint.run(X), joint.read([*outputs, *gradients])
    assert found.loss == whole.loss
    for key, gradient in whole.gradients.items():
        assert torch.allclose(local_tensor(found.gradients[key]), local_tensor(gradient), rtol=1e-5, atol=1e-7)


def halves(stage):
    return [graph for graph in (stage.forward, stage.backward, stage.weight) if graph is not None]
