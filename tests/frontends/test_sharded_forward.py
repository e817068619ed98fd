"""Capture of the forward of models whose parameters are sharded, in one process that stands for one rank of several."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from campaigns import these_first
from lawtables import LAWS, asked
from shardednets import Net, X, first_of, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import splitkit as sk
from splitkit.costs import Link
from splitkit.costs.roofline import collective_seconds
from splitkit.errors import CaptureError, GraphError, PlanError
from splitkit.graph.dataflow import analyze, module_path
from splitkit.graph.shards import MeshGroup, collective_group, full_tensor, is_sharded, local_tensor
from splitkit.policies import Stages
from splitkit.testing import models
from splitkit.testing.tensor_parallel import shard_model


@pytest.fixture(scope="module")
def mesh():
    with first_of(4) as made:
        yield made


@pytest.fixture(scope="module")
def captured(mesh):
    """Not to be changed."""
    return sk.capture(sharded(mesh["tp"]), X)


def test_the_graph_is_one_ranks_forward_without_gradients(mesh):
    model = sharded(mesh["tp"])
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    gm = sk.capture(model, X)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_buffers())
    held = dict(gm.named_parameters())
    assert held.keys() == dict(model.named_parameters()).keys() and not any(p.requires_grad for p in held.values())
    for name, whole in model.named_parameters():
        assert held[name].shape == local_tensor(whole).shape
        assert held[name].data_ptr() == local_tensor(whole).data_ptr(), "an optimizer step must reach the graph"
    met = [node for node in gm.graph.nodes if collective_group(node) is not None]
    assert [(collective_group(node), module_path(node)) for node in met] == [
        (MeshGroup("tp", 2), f"downs.{i}") for i in range(4)
    ]
    assert [n.target for n in gm.graph.find_nodes(op="placeholder")] == ["x"]
    assert not gm(X).requires_grad and gm.seen == model.seen == 1


def test_the_forward_is_as_in_eager_mode(mesh):
    """Collectives of this process change nothing, in the model as in the graph."""
    model = sharded(mesh["tp"])
    assert torch.equal(sk.capture(model, X)(X), full_tensor(model(X)).detach())


class Answers(nn.Module):
    """Takes inputs of several kinds, and returns tensors of which one is sharded, a number, and None."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x, pair, *rest, times=1, mask=None):
        self.last.copy_(x[0])
        y = self.down(self.up(x + pair["a"]).relu()) * times + rest[0]
        return {"y": y * self.scale, "all": [y.sum(), None, 3], "given": x}


def answers(mesh):
    model = Answers()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def test_inputs_and_outputs_have_the_models_structure(mesh):
    model, given, named = answers(mesh["tp"]), (X, {"a": X + 1}, X * 3), {"mask": None, "times": 2}
    gm = sk.capture(model, *given, **named)
    assert [n.target for n in gm.graph.find_nodes(op="placeholder")] == ["x", "pair_a", "rest_0", "mask", "times"]
    found, want = gm(*given, **named), model(*given, **named)
    assert torch.equal(found["y"], want["y"]) and torch.equal(found["all"][0], want["all"][0])
    assert found["all"][1:] == [None, 3] and torch.equal(found["given"], X) and torch.equal(gm.last, X[0])
    with pytest.raises(RuntimeError, match="to be equal to"):
        gm(X[:2], {"a": X[:2]}, X[:2], **named)
    with pytest.raises(RuntimeError, match="times|to be equal to 2"):
        gm(*given, mask=None, times=3)
    other = copy.deepcopy(gm)
    assert torch.equal(other(*given, **named)["y"], found["y"])
    with pytest.raises(RuntimeError, match="to be equal to"):
        other(X[:2], {"a": X[:2]}, X[:2], **named)
    with pytest.raises(GraphError, match="SK107"):  # it has this rank's pieces, and finds its ranks in this process
        pickle.dumps(gm)
    with pytest.raises(NotImplementedError, match="fixed at capture"):
        gm.train()


@pytest.mark.parametrize("where", these_first(["cpu"], ["meta"]))
def test_transformers_are_captured(mesh, where):
    """A head is divided by columns, and its output gathered; one process holds the first columns only."""
    example = models.build("llama", layers=1, width=32, heads=4, vocab=16, seq=8)
    model = example.model.to(where)
    shard_model(model, mesh["tp"])
    named = {name: value for name, value in example.kwargs.items() if name != "labels"}
    gm = sk.capture(model, *example.args, **named)
    met = [collective_group(node) for node in gm.graph.nodes if collective_group(node) is not None]
    assert len(met) >= 2 and set(met) == {MeshGroup("tp", 2)}
    assert any(is_sharded(parameter) for parameter in model.parameters())
    assert all(value.device.type == where for value in (n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")))
    if where == "cpu":
        with torch.no_grad():
            want = model(*example.args, **named).logits
        assert torch.allclose(gm(*example.args, **named).logits, full_tensor(want), atol=1e-6)
    stages = sk.plan(gm, Stages(2), sk.costs.roofline(gm, "h100", mesh={"tp": "nvlink4"}))
    assert len(stages.parts) == 2


def test_an_autocast_around_the_capture_is_recorded(mesh):
    model = sharded(mesh["tp"])
    with torch.autocast("cpu", torch.bfloat16):
        gm, want = sk.capture(model, X), model(X)
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in gm.graph.nodes if "mm" in n.name)
    assert torch.equal(gm(X), full_tensor(want).detach())


def test_what_cannot_be_captured_is_refused(mesh):
    for other in ({"how": "symbolic_trace"}, {"dynamic": True}):
        with pytest.raises(CaptureError, match="SK401: Net has parameters that are sharded.*one way, with fixed sizes"):
            sk.capture(sharded(mesh["tp"]), X, **other)
    with pytest.raises(CaptureError, match="SK401: the model is managed by FSDP"):
        sk.capture(fully_shard(Net(1), mesh=mesh["tp"]), X)

    class Branching(Net):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = Branching(1)
    parallelize_module(model, mesh["tp"], {"ups.0": ColwiseParallel(), "downs.0": RowwiseParallel()})
    with pytest.raises(CaptureError, match="SK401: Branching could not be captured by AOTAutograd") as refused:
        sk.capture(model, X)
    assert "x.sum() > 0" in str(refused.value) and "test_sharded_forward.py" in str(refused.value)


def test_a_collective_has_a_price(captured):
    (node, *_) = [n for n in captured.graph.nodes if collective_group(n) is not None]
    link = Link(1e9, 1e-6)
    costs = sk.costs.roofline(captured, "h100", mesh={"tp": link})
    assert costs.seconds(node) == pytest.approx(collective_seconds(node, {"tp": link}) + costs.device.launch)


FIRST = ["Stages(3)", "RoundRobin(3)", "Random(seed=1)", "Half", "Devices"]


@pytest.mark.parametrize("name", these_first(FIRST, [name for name in LAWS if name not in FIRST]))
def test_each_policy_runs_each_collective_once_and_in_order(captured, name):
    """The ranks of a dimension exchange what they have in the same order, and wait for it in the same part."""
    costs = sk.costs.roofline(captured, "h100", mesh={"tp": "nvlink4"})
    plan = asked(LAWS[name], analyze(captured), costs)
    if plan is None:
        return
    try:
        made = sk.split(captured, plan)
    except PlanError as error:
        assert error.code == "SK201"
        return
    order = {n.name: i for i, n in enumerate(captured.graph.nodes) if collective_group(n) is not None}
    parts = list(made.parts.values())
    met = [order[n.name] for part in parts for n in part.graph.nodes if collective_group(n) is not None]
    alone = [order[n.name] for n in made.module.graph.nodes if collective_group(n) is not None]
    assert sorted([*met, *alone]) == sorted(order.values())
    for part in parts:
        for node in part.graph.nodes:
            if collective_group(node) is not None:
                assert [str(user.target) for user in node.users] == ["_c10d_functional.wait_tensor.default"]
    assert torch.equal(made(X), captured(X))
