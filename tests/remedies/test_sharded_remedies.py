"""Remedies for models whose parameters are sharded over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from carried import refusal
from shardednets import Net, X, first_of, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import splitkit as sk
from splitkit.runtime.ranks.stage_weights import shard


@pytest.fixture
def mesh():
    with first_of(4) as made:
        yield made


def test_a_forward_alone(mesh):
    model = sharded(mesh["tp"])
    with refusal("SK401", "Capture its training step: splitkit.capture(model, ..., training=True)."):
        sk.capture(model, X)
    assert sk.capture(model, X, training=True).run(X).gradients.keys() == dict(model.named_parameters()).keys()


def test_fsdp_before_the_capture(mesh):
    with refusal("SK401", "Capture the plain model, and shard its stages afterwards: Pipeline.shard()."):
        sk.capture_joint(fully_shard(Net(1), mesh=mesh["dp"]), X)
    model = Net(1)
    assert sk.capture_joint(model, X).run(X).gradients
    shard([model], SimpleNamespace(mesh=mesh), ())
    assert all(parameter.device_mesh == mesh["dp"] for parameter in model.parameters())


def test_meshes_with_one_name(mesh):
    sk.capture_joint(sharded(mesh["tp"]), X)
    with refusal("SK401", "Give the dimensions of each mesh names of their own: mesh_dim_names."):
        sk.capture_joint(sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]), X)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp2", "dp2"))
    assert sk.capture_joint(sharded(other["tp2"]), X).run(X).gradients


def test_a_link_for_collectives(mesh):
    graph = sk.capture_joint(sharded(mesh["tp"]), X).graph_module
    with refusal("SK322", "Name the link of each dimension: roofline(graph, device, mesh={{...}: 'nvlink4'})."):
        sk.costs.roofline(graph, "h100").of_graph(graph)
    assert sk.costs.roofline(graph, "h100", mesh={"tp": "nvlink4"}).of_graph(graph) > 0


def test_sharding_along_another_dimension(mesh):
    model = sharded(mesh["tp"], 1)
    with refusal("SK801", 'Give the dimension along which the stages have replicas: pipe.shard(mesh["dp"]).'):
        shard([model], SimpleNamespace(mesh=mesh), ())
    shard([model], SimpleNamespace(mesh=mesh), (), mesh["dp"])
    assert all(parameter.device_mesh == mesh for parameter in model.parameters())
