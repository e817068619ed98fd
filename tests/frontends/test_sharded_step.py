"""Capture of models whose parameters are sharded, in one process that stands for one rank of several."""

from __future__ import annotations

import pytest
import torch
from shardednets import Net, X, first_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import splitkit as sk
from splitkit.costs import Link
from splitkit.costs.collectives import collective_seconds
from splitkit.errors import CaptureError, CostError
from splitkit.graph.dataflow import module_path
from splitkit.graph.shards import MeshGroup, collective_group, copies_of, local_tensor, sharded_as
from splitkit.policies import Pipeline


@pytest.fixture
def mesh():
    with first_of(4) as made:
        yield made


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


def test_stages_are_balanced_whatever_their_collectives(mesh):
    step = sk.capture_joint(sharded(mesh["tp"]), X).split(Pipeline(2, schedule="1f1b", microbatches=4))
    loads = [sum(collective_group(n) is not None for n in stage.forward.graph.nodes) for stage in step.stages]
    assert loads == [2, 2]


def test_a_collective_comes_where_what_it_reads_is_made(mesh):
    joint = sk.capture_joint(sharded(mesh["tp"]), X)
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


def test_a_forward_alone_is_refused(mesh):
    with pytest.raises(CaptureError, match="SK401.*sharded over ranks") as refused:
        sk.capture(sharded(mesh["tp"]), X)
    assert "training=True" in refused.value.remedy


def test_a_model_that_fsdp_manages_is_refused(mesh):
    model = fully_shard(Net(1), mesh=mesh["tp"])
    with pytest.raises(CaptureError, match=r"SK401: the model is managed by FSDP"):
        sk.capture_joint(model, X)


def test_two_meshes_with_one_name_are_refused(mesh):
    sk.capture_joint(sharded(mesh["tp"]), X)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(CaptureError, match="SK401.*called tp=2, too"):
        sk.capture_joint(sharded(other["tp"]), X)


def test_pieces(mesh):
    whole = distribute_tensor(torch.arange(4.0), mesh["tp"], [Replicate()], src_data_rank=None)
    assert local_tensor(whole).tolist() == [0, 1, 2, 3] and local_tensor(X) is X and sharded_as(X, X) is X
    assert sharded_as(torch.ones(4), whole).placements == whole.placements
    groups = [MeshGroup("tp", 2)]
    assert copies_of(whole, groups) == 2 == copies_of(X, groups)
    assert copies_of(sharded(mesh["tp"]).ups[0].weight, groups) == 1
