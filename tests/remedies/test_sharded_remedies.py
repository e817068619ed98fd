"""Remedies for models whose parameters are sharded over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from carried import refusal
from commandlines import printed
from launch import command
from shardednets import Net, X, first_of, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import splitkit as sk
from splitkit.cli.mesh import joined_mesh, read_mesh
from splitkit.graph.shards import is_sharded
from splitkit.policies import Pipeline, Stages
from splitkit.runtime import save_stages
from splitkit.runtime.ranks import pipeline as ranks
from splitkit.runtime.ranks.evaluation import require_gradients
from splitkit.runtime.ranks.rank_device import require_meshes_of
from splitkit.testing import models
from splitkit.testing.tensor_parallel import shard_model

NET = str(Path(__file__).parents[1] / "cli" / "shardednet.py")


@pytest.fixture
def mesh():
    with first_of(4) as made:
        yield made


def test_another_way_to_capture_a_forward(mesh):
    model = sharded(mesh["tp"])
    with refusal("SK401", "Leave out how= and dynamic=."):
        sk.capture(model, X, dynamic=True)
    assert sk.capture(model, X)(X).shape == ()


def test_an_input_that_is_sharded(mesh):
    given = distribute_tensor(X, mesh["tp"], [Replicate()], src_data_rank=None)
    for training in (False, True):
        with refusal("SK401", "Give the whole tensor, as all ranks do: x.full_tensor()."):
            sk.capture(sharded(mesh["tp"]), given, training=training)
    assert sk.capture(sharded(mesh["tp"]), given.full_tensor())(X).shape == ()


def test_a_step_of_a_forward(mesh):
    model = sharded(mesh["tp"])
    with refusal("SK802", "Capture its training step: splitkit.capture(model, ..., training=True)."):
        require_gradients(True)
    assert sk.capture(model, X, training=True).run(X).gradients.keys() == dict(model.named_parameters()).keys()


def test_stages_of_pieces_in_a_folder(mesh, tmp_path):
    """The remedy runs in tests/runtime/sharded_stages.py."""
    for made in (sk.split(sk.capture(sharded(mesh["tp"]), X), Stages(2)), joint_in_stages(mesh)):
        with refusal(
            "SK506", "Capture and split the model on each rank, and give the split: splitkit.runtime.pipeline(split)."
        ):
            save_stages(made, tmp_path / "stages")
    assert not (tmp_path / "stages").exists()


def joint_in_stages(mesh):
    return sk.capture_joint(sharded(mesh["tp"]), X).split(Pipeline(2, microbatches=4))


def shard(model, mesh, along=None):
    """Shard a model that is the one part of a rank."""
    tied, held = SimpleNamespace(tied=()), SimpleNamespace(mesh=mesh)
    ranks.Pipeline.shard(SimpleNamespace(modules=[model], replicas=held, _shared_parameters=tied), along)


def test_fsdp_before_the_capture(mesh):
    with refusal("SK401", "Capture the plain model, and shard its stages afterwards: Pipeline.shard()."):
        sk.capture_joint(fully_shard(Net(1), mesh=mesh["dp"]), X)
    model = Net(1)
    assert sk.capture_joint(model, X).run(X).gradients
    shard(model, mesh)
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
        shard(model, mesh)
    shard(model, mesh, mesh["dp"])
    assert all(parameter.device_mesh == mesh for parameter in model.parameters())


def test_prices_of_collectives_in_one_process(mesh):
    joint = sk.capture_joint(sharded(mesh["tp"]), X)
    graph = joint.graph_module
    with refusal("SK324", "Estimate it: splitkit.costs.roofline(graph, device, mesh={{...}: 'nvlink4'})."):
        sk.costs.measured(graph, (*joint.primals(X), *joint.tangents()))
    assert sk.costs.roofline(graph, "h100", mesh={"tp": "nvlink4"}).of_graph(graph) > 0


def test_ranks_that_share_heads(mesh):
    def made(heads):
        model = models.build("llama", layers=1, width=24, heads=heads, vocab=8, seq=4).model
        shard_model(model, mesh["tp"])
        return model

    with refusal("SK401", "Choose a number of ranks that divides {...}."):
        made(3)
    assert any(map(is_sharded, made(4).parameters()))


def test_a_factory_that_shards(mesh):
    with refusal(
        "SK401", "Give a factory that takes the mesh and returns a sharded model: def make(mesh), FILE.py:make."
    ):
        shard_model(nn.Linear(2, 2), mesh["tp"])
    assert any(map(is_sharded, models.load(f"{NET}:net", mesh["tp"]).model.parameters()))


def test_meshes_of_the_command_line():
    with refusal("SK601", "Choose another name, such as tp."):
        read_mesh("pp=2")
    with refusal("SK601", "Write --mesh tp=2, or --mesh tp=8:nvlink4 with the link between the ranks."):
        read_mesh("2")
    assert [one.ranks for text in ("tp=2", "tp=8:nvlink4") for one in read_mesh(text)] == [2, 8]


def test_a_mesh_of_the_ranks_devices(mesh):
    held = list(sharded(mesh["tp"], 1).parameters())
    with refusal(
        "SK801", "Give pipeline(..., device={...}); or capture on a mesh of the ranks' devices: init_device_mesh."
    ):
        require_meshes_of(torch.device("cuda", 1), held)
    require_meshes_of(torch.device("cpu"), held)
    require_meshes_of(torch.device("cuda", 1), Net(1).parameters())


def test_ranks_for_each_stage():
    with first_of(2), refusal("SK801", "Start {...} for each stage."), joined_mesh("tp=2", 2):
        pass
    with first_of(4), joined_mesh("tp=2", 2) as mesh:
        assert mesh.mesh_dim_names == ("pp", "dp", "tp") and mesh.size(0) == 1


@pytest.mark.campaign
def test_a_plan_for_ranks_that_share_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed(f"plan {NET}:net --stages 2 --mesh tp=2 -o PLAN.json")
    train = f"train PLAN.json --model {NET}:net --microbatches 2 --steps 1 --check"
    with refusal("SK601", "Start a multiple of {...} ranks."):
        printed(f"{train} --nproc 3")
    with refusal("SK601", "Train with it on its ranks: splitkit train PLAN.json --nproc N, {...} a stage."):
        printed(f"run PLAN.json --model {NET}:net")
    assert json.loads(command(*train.split(), "--nproc", "4", "--json").stdout)["check"]["same"]
