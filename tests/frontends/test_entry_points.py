"""Policies where people already are: a budget as a word, and a backend by name."""

from __future__ import annotations

import configparser
import logging
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry

import splitkit as sk
from splitkit.policies import Budget
from splitkit.units import size

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


@pytest.mark.campaign
def test_a_backend_says_its_peaks_whatever_runs_the_halves():
    net, said = make_net(), []
    for inner in ("eager", "inductor"):
        torch.compiler.reset()
        backend = sk.backend("least", inner)
        gradients(net, torch.compile(net, backend=backend))
        pair = backend.pairs[0]
        said.append(str(backend))
        if inner == "eager":
            peak = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak
            assert f"peak {size(peak)} instead of" in said[0]
    assert said[0].count("\n") == said[1].count("\n") == 1 and "in eager mode" in said[1]


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
        assert f"peak {size(peaks[-1])} instead of" in str(backend)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    applied = sk.apply(net, "least", X)
    assert_equal(gradients(net, applied), expected)


@pytest.mark.parametrize("bad", ["lest", "", 1.5, -1, float("nan"), True, None, b"least"], ids=repr)
def test_what_is_no_budget_is_refused_at_once(bad):
    for door in (sk.backend, lambda policy: sk.apply(make_net(), policy)):
        with pytest.raises(sk.errors.PolicyError, match="SK30[12]"):
            door(bad)


def test_the_peaks_are_logged_if_somebody_listens(caplog_at_info):
    net = make_net()
    gradients(net, torch.compile(net, backend=sk.backend("least")))
    (said,) = caplog_at_info
    least, eager = said.removeprefix("graph 0: peak ").split(" in eager mode")[0].split(" instead of ")
    assert f"The peak is {least} (" in said and least != eager


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
