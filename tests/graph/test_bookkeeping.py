"""Counters and running ranges, which nothing reads, are found with the nodes of their modules and planned there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.extend import PARENT, Plan
from splitkit.graph.dataflow import bookkeeping, module_path
from splitkit.plans.record import keep_books
from splitkit.policies import (
    Buckets,
    ByParameterBytes,
    Devices,
    MemoryBudget,
    Pipeline,
    Random,
    RoundRobin,
    Stages,
)

X = torch.ones(2, 4)


class Observer(nn.Module):
    """Records what it sees, and hands it on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.low.copy_(torch.minimum(self.low, x.amin()))
        self.mean.lerp_((x * x).mean(0), 0.1)
        return x


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.observers = nn.ModuleList(Observer() for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        for layer, observer in zip(self.layers, self.observers, strict=True):
            x = observer(layer(x)).tanh()
        return x


@pytest.fixture(scope="module")
def normed():
    """A net with a long skip connection, so that later stages have room."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(6)])


def named(flow):
    return [tuple(node.name for node in nodes) for nodes in bookkeeping(flow)]


def test_counters_belong_to_their_modules(normed):
    flow = sk.analyze(sk.capture(normed, X))
    found = bookkeeping(flow)
    assert [[module_path(node) for node in nodes] for nodes in found] == [[f"{i}.1", f"{i}.1"] for i in range(6)]
    assert all("batch_norm" in owner.name and "add_" in book.name for owner, book in found)
    assert named(sk.analyze(sk.capture(normed.eval(), X))) == []
    normed.train()


def test_in_a_training_step_they_return_the_new_count(normed):
    flow = sk.capture_joint(normed, X, loss=torch.sum).flow
    found = bookkeeping(flow)
    assert len(found) == 6
    for owner, book in found:
        assert "batch_norm" in owner.name and module_path(owner) == module_path(book) and not flow.waits[book]


def test_what_records_a_value_belongs_with_its_maker():
    assert named(sk.analyze(sk.capture(Observed(), X))) == [
        ("linear", "add_"),
        ("linear", "amin", "minimum", "copy_"),
        ("linear", "mul", "mean", "lerp_"),
        ("linear_1", "amin_1", "minimum_1", "copy__1"),
        ("linear_1", "mul_1", "mean_1", "lerp__1"),
        ("linear_2", "amin_2", "minimum_2", "copy__2"),
        ("linear_2", "mul_2", "mean_2", "lerp__2"),
    ]


class Given(nn.Module):
    """What it writes is read, or given back."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(1)
        y = x * 2
        return y.add_(self.count).relu_()


def test_what_is_read_or_given_back_is_no_bookkeeping():
    assert named(sk.analyze(sk.capture(Given(), X))) == []


POLICIES = [
    Stages(3),
    Stages(2, schedule="1f1b"),
    Devices(["a100", "a100"]),
    Devices(["a100", "a100"], pieces=None),
    Buckets(100),
    ByParameterBytes(160),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("model", [nn.Sequential, Observed])
def test_they_are_planned_with_them(normed, policy, model):
    gm = sk.capture(normed if model is nn.Sequential else model(), X)
    for costs in (None, sk.costs.roofline(gm, "a100")):
        plan, flow = sk.plan(gm, policy, costs), sk.analyze(gm)
        assert len(plan.parts) > 1
        apart = [nodes for nodes in bookkeeping(flow) if len({plan.places[node] for node in nodes}) > 1]
        assert not apart
        assert {key for keys in plan.places.values() for key in keys} - {PARENT} == {*plan.parts}


def test_memory_separates_them_only_where_they_do_not_fit(normed):
    gm = sk.capture(normed, X)
    sets = bookkeeping(sk.analyze(gm))
    for limit, apart in ((400, False), (700, False), (580, True)):
        plan = sk.plan(gm, MemoryBudget(limit))
        assert len(plan.parts) > 1
        assert apart == any(plan.places[owner] != plan.places[book] for owner, book in sets)


def test_a_node_that_another_device_must_run_stays_there():
    gm = sk.capture(Observed(), X)
    plan, flow = sk.plan(gm, Devices(["a100", "h100"], only={"observers.*": [1]})), sk.analyze(gm)
    assert {plan.home(node) for node in flow.nodes if module_path(node).startswith("observers")} == {1}
    assert {plan.home(node) for node in flow.nodes} == {0, 1}


def test_a_training_step_in_stages_counts_where_it_normalises(normed):
    joint = sk.capture_joint(normed, X, loss=torch.sum)
    plan = joint.split(Pipeline(3, schedule="1f1b"), sk.costs.roofline(joint.graph_module, "a100")).plan
    assert all(plan.places[owner] == plan.places[book] for owner, book in bookkeeping(joint.flow))


def before_norms(flow):
    """Borders before the batch norms, where graphs count."""
    found, part = {}, 0
    for node in flow.nodes:
        part += "batch_norm" in node.name
        found[node] = part
    return Plan.of(found)


def test_a_border_between_a_counter_and_its_module_leaves_them_together(normed):
    flow = sk.analyze(sk.capture(normed, X))
    plan = keep_books(flow, before_norms(flow))
    assert all(plan.places[owner] == plan.places[book] for owner, book in bookkeeping(flow))
    assert len(plan.parts) == 7 and keep_books(flow, plan) is plan


def test_a_part_that_only_counted_is_gone(normed):
    flow = sk.analyze(sk.capture(normed, X))
    plan = Plan.of({node: int("add_" in node.name) for node in flow.nodes})
    assert {*keep_books(flow, plan).parts} == {0}


def test_a_plan_of_the_users_is_carried_out_as_it_is(normed):
    gm = sk.capture(normed, X)
    labels = {node.name: int("add_" in node.name) for node in sk.analyze(gm).nodes}
    plan = sk.plan(gm, labels)
    assert all((plan.home(node) == 1) == ("add_" in node.name) for node in sk.analyze(gm).nodes)


@pytest.mark.parametrize("policy", [RoundRobin(3), Random(4, seed=1, parent=0.0, copies=0.0), Random(3, seed=5)])
def test_labels_by_turn_or_chance_leave_the_books_with_their_module(policy, normed):
    flow = sk.analyze(sk.capture(normed, X))
    plan = policy.assign(flow, sk.costs.unit(flow))
    sets = bookkeeping(flow)
    assert sets
    for owner, *books in sets:
        assert {plan.places[node] for node in books} == {plan.places[owner]} or len(plan.places[owner]) > 1
    assert set(plan.parts) >= {key for keys in plan.places.values() for key in keys if key is not None}
