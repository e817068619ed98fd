"""Policies where people already are: a budget as a word, a backend by name, Inductor's and torch's own settings."""

from __future__ import annotations

import configparser
import logging
from importlib.metadata import EntryPoint, EntryPoints
from math import fsum
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from jointmodels import TEXT, eager, example
from smallnets import loss_or_sum
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._inductor import config as inductor_config

import splitkit as sk
from splitkit.frontends.compile import memory_budget_solver
from splitkit.policies import Budget, Remat, SaveAll
from splitkit.testing.models import build

ROOT = Path(__file__).parents[2]


def make_net():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())]
    return nn.Sequential(*layers)


X = torch.randn(64, 16)


def gradients(net, call):
    torch._dynamo.reset()
    net.zero_grad()
    call(X).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def assert_equal(found, expected):
    assert all(map(torch.equal, found, expected))


def test_a_budget_stands_for_its_policy():
    net = make_net()
    expected, peaks = gradients(net, net), []
    for budget in ("least", 0.4, "1MiB"):
        backend = sk.backend(budget)
        assert backend.policy == Budget(budget)
        assert_equal(gradients(net, torch.compile(net, backend=backend)), expected)
        assert "instead of" in str(backend) and backend.pairs[0].plan.note in str(backend)
        pair = backend.pairs[0]
        peaks.append(sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    applied = sk.apply(net, "least", X)
    assert_equal(gradients(net, applied), expected)


@pytest.mark.parametrize("bad", ["lest", "", 1.5, -1, float("nan"), True, None, b"least"], ids=repr)
def test_what_is_no_budget_is_refused_at_once(bad):
    for door in (sk.backend, sk.inductor_partitioner, lambda policy: sk.apply(make_net(), policy)):
        with pytest.raises(sk.PolicyError, match="SK30[12]"):
            door(bad)


def test_the_peaks_are_logged_if_somebody_listens(caplog_at_info):
    net = make_net()
    gradients(net, torch.compile(net, backend=sk.backend(SaveAll())))
    assert len(caplog_at_info) == 1 and "instead of" in caplog_at_info[0]


@pytest.fixture
def caplog_at_info():
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("splitkit.frontends.compile")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield told
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def named(monkeypatch):
    """The entry points of setup.cfg, as if this checkout were installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["torch_dynamo_backends"].strip().splitlines()
    points = [EntryPoint(*(part.strip() for part in line.split("=")), "torch_dynamo_backends") for line in lines]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints(points).select(group=group))
    registry._lazy_import()
    before = dict(registry._BACKENDS), dict(registry._COMPILER_FNS)
    registry._COMPILER_FNS.pop("splitkit", None)
    registry._discover_entrypoint_backends.__wrapped__()
    yield
    for known, was in zip((registry._BACKENDS, registry._COMPILER_FNS), before, strict=True):
        known.clear()
        known.update(was)


def test_torch_finds_the_backend_by_its_name(named):
    net = make_net()
    assert "splitkit" in torch.compiler.list_backends()
    expected = gradients(net, net)
    assert_equal(gradients(net, torch.compile(net, backend="splitkit")), expected)
    assert_equal(gradients(net, torch.compile(net, backend="splitkit", options={"inner": "aot_eager"})), expected)
    for options in ({"options": {"budget": 0.5}}, {"mode": "reduce-overhead"}):
        with pytest.raises(Exception, match="SK302.*has no option"):
            gradients(net, torch.compile(net, backend="splitkit", **options))


def test_inductors_partitioner_divides_by_the_policy():
    net = make_net()
    partitioner = sk.inductor_partitioner("least")
    with inductor_config.patch(custom_partitioner_fn=partitioner):
        assert inductor_config.custom_partitioner_fn is partitioner
    assert partitioner.uuid() != sk.inductor_partitioner("least").uuid()
    handed = []

    def partition(joint, inputs, **others):
        forward, backward = partitioner(joint, inputs, compiler="inductor", **others)
        handed.append(len(forward.graph.output_node().args[0]))
        return forward, backward

    def compiled(fn):
        return torch.compile(net, backend=aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=fn))

    expected = gradients(net, net)
    assert_equal(gradients(net, compiled(partition)), expected)
    partitioner = sk.inductor_partitioner(1.0)
    assert_equal(gradients(net, compiled(partition)), expected)
    assert handed[0] < handed[1]


class TwoViews(nn.Module):
    def forward(self, x):
        left, right = (x @ x.T).sin().split(32)
        return left.sin() * right.cos()


def test_inductor_may_not_write_over_saved_values_that_share_memory():
    keep = sk.inductor_partitioner(Remat(keep=["aten.split"]))
    x = X.clone().requires_grad_()
    backend = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=keep)
    saves = sk.backend(Remat(keep=["aten.split"]))
    torch._dynamo.reset()
    torch.compile(TwoViews(), backend=saves)(x)
    if len(saves.pairs[0].saved) < 3:
        pytest.skip("this torch saves the base")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="SK306"):
        torch.compile(TwoViews(), backend=backend)(x)
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        torch.compile(TwoViews(), backend=backend)(x).sum().backward()


@pytest.mark.parametrize("name", these_first(["net", "conv"], ["gpt2", "llama", "t5"]))
def test_torchs_budget_is_kept_by_the_solver(name, monkeypatch):
    if name == "net":
        model, args, kwargs = make_net(), (X,), {}
    elif name == "conv":
        model, args, kwargs = example(name)
    else:
        made = build(name, **TEXT | {"seq": 16, "batch": 8})
        model, args, kwargs = made.model, made.args, made.kwargs
    model.eval()  # without dropout, whose numbers differ when compiled
    prices, memory, given = [], [], []
    estimate = partitioners.estimate_runtime
    monkeypatch.setattr(partitioners, "estimate_runtime", lambda node: prices.append(estimate(node)) or prices[-1])
    solver = sk.memory_budget_solver()

    class Watched(type(solver)):
        def __call__(self, weights, joint_graph, limit, node_info, nodes):
            saved, again = solver(weights, joint_graph, limit, node_info, nodes)
            memory.append((fsum(weights[i] for i in saved), limit, sorted([*saved, *again]), len(weights)))
            return saved, again

    fill = memory_budget_solver.fill_knapsack
    monkeypatch.setattr(memory_budget_solver, "fill_knapsack", lambda *how: given.append(how[0]) or fill(*how))
    _, expected, _ = eager(model, args, kwargs, loss_or_sum)
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=0.1, activation_memory_budget_solver=Watched()):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        loss_or_sum(compiled(*args, **kwargs)).backward()
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[path], atol=1e-5, rtol=1e-4)
    assert memory and all(taken <= limit and both == [*range(count)] for taken, limit, both, count in memory)
    # under no_dispatch(), nodes would run for real, and no FLOPs would be counted
    assert [price for prices_of_graph in given for price in prices_of_graph] == prices and max(prices) > 1
    assert solver.uuid() == sk.memory_budget_solver().uuid()


@pytest.mark.campaign
def test_inductor_runs_with_the_partitioner_and_the_solver():
    net = make_net()
    expected = gradients(net, net)
    with inductor_config.patch(custom_partitioner_fn=sk.inductor_partitioner("least")):
        found = gradients(net, torch.compile(net))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
    with functorch_config.patch(
        activation_memory_budget=0.3, activation_memory_budget_solver=sk.memory_budget_solver()
    ):
        found = gradients(net, torch.compile(net))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
