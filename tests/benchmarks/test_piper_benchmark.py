"""The benchmark of Piper's problems: both values against all plans of small problems, and the inputs as published."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import piper


def random_problem(seed):
    """Four layers that read earlier ones, on up to three devices, with two degrees of tensor parallelism."""
    dice = random.Random(seed)
    pairs = [(u, v) for v in range(1, 4) for u in range(v) if u == v - 1 or dice.random() < 0.3]
    edges = [(u, v, float(dice.randint(0, 3))) for u, v in pairs]
    layers = []
    for number in range(4):
        ways = {}
        for degree in (1, 2):
            seconds, each, fixed = dice.randint(1, 9) / degree, dice.randint(2, 9), dice.randint(0, 5)
            kept = dice.randint(0, each)
            plain = piper.Way(seconds, dice.randint(0, 4), each, fixed)
            ways[degree] = plain, piper.Way(seconds + dice.randint(0, 3), plain.weights, kept, fixed + each - kept)
        taken = {1: {}, 2: {u: float(dice.randint(0, 2)) for u, v, _ in edges if v == number}}
        given = {1: {}, 2: {v: float(dice.randint(0, 2)) for u, v, _ in edges if u == number}}
        layers.append(piper.Layer(ways, taken, given))
    return piper.PiperProblem(
        layers, edges, dice.choice([2, 4, 6]), dice.randint(1, 3), float(dice.randint(12, 60)), 1.0
    )


def least_time(problem):
    """The least time per sample over all plans, one after the other, as the paper states the problem."""
    count = len(problem.layers)
    best = np.inf
    for stage_of in product(range(count), repeat=count):
        used = sorted(set(stage_of))
        if used != list(range(len(used))) or any(stage_of[u] > stage_of[v] for u, v, _ in problem.edges):
            continue
        degrees = [(t, d) for t in (1, 2) for d in range(1, problem.devices + 1) if problem.microbatches % d == 0]
        for chosen in product(degrees, repeat=len(used)):
            replicas = sum(d for _, d in chosen)
            if sum(t * d for t, d in chosen) > problem.devices or replicas > problem.microbatches:
                continue
            slowest = 0.0
            for stage, (t, d) in enumerate(chosen):
                left = sum(e for _, e in chosen[stage:])
                inside = [i for i in range(count) if stage_of[i] == stage]
                slowest = max(slowest, _stage_time(problem, inside, t, d, -(-left // d)))
            best = min(best, slowest)
    return best


def _stage_time(problem, inside, t, d, y):
    sent = 0.0
    for u, v, nbytes in problem.edges:
        if u not in inside and v in inside:
            sent += 2 * (nbytes + problem.layers[v].taken[t].get(u, 0.0))
        if u in inside and v not in inside:
            sent += 2 * (nbytes + problem.layers[u].given[t].get(v, 0.0))
    best = np.inf
    for again in product((0, 1), repeat=len(inside)):
        ways = [problem.layers[i].ways[t][which] for i, which in zip(inside, again, strict=True)]
        if sum(way.each * y + way.fixed for way in ways) <= problem.memory:
            weights = sum(way.weights for way in ways)
            ring = 4 * (d - 1) * weights / d / problem.microbatches
            best = min(best, (sum(way.seconds for way in ways) + sent) / d + ring)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_ours_is_the_best_of_all_plans_and_pipers_is_no_better(seed):
    problem = random_problem(seed)
    found, expected = piper.solved(problem), least_time(problem)
    assert found["optimal"]
    assert (np.inf if found["ours"] is None else found["ours"]) == pytest.approx(expected)
    if found["piper"] is not None:
        assert found["piper"] >= expected - 1e-9


def test_idle_layers_change_nothing():
    problem = random_problem(3)
    idle = piper.Layer({t: (piper.Way(0, 0, 0, 0),) * 2 for t in (1, 2)}, {1: {}, 2: {}}, {1: {}, 2: {}})
    edges = [*problem.edges, (4, 5, 0.0), (5, 2, 0.0), (4, 3, 0.0)]
    wider = replace(problem, layers=[*problem.layers, idle, idle], edges=edges)
    assert len(piper.without_idle(wider).layers) == 4
    assert piper.solved(wider)["ours"] == pytest.approx(piper.solved(problem)["ours"])


def test_the_inputs_are_those_that_were_published():
    """Counts and figures that the published files have."""
    gnmt, bert = piper.read("gnmt", 2, 2.5), piper.read("bert32", 8, 8.0)
    assert (len(gnmt.layers), len(gnmt.edges), gnmt.microbatches) == (78, 104, 256)
    assert (len(bert.layers), len(bert.edges), bert.microbatches) == (37, 67, 1920)
    resnet = piper.read("resnet", 8, 4.0)
    assert (len(resnet.layers), len(resnet.edges), resnet.microbatches) == (177, 193, 7680)
    assert resnet.layers[170].ways[1][1] == (6.056, 9437184.0, 1156055.04, 30563368.96)
    assert gnmt.layers[77].ways[1][1] == (54.937, 132512000.0, 37232640.0, 641487360.0)
    assert bert.layers[35].ways[8] == (
        (0.009328, 22144800.0, 142811136.0, 44289600.0), (0.011725, 22144800.0, 48234496.0, 138604096.0)
    )  # fmt: skip
    assert bert.layers[35].taken[8] == {4: 31457280.0, 34: 16777216.0} and bert.layers[35].taken[1] == {}


def test_a_published_setting(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["piper.py", "gnmt", "--devices", "2", "--json"])
    piper.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["devices"], row["gib"], row["optimal"]) for row in rows] == [(2, 2.5, True), (2, 3.5, True)]
    assert [row["ours"] for row in rows] == pytest.approx([263.354, 260.227], abs=1e-3)
    assert all(row["bound"] <= row["ours"] <= row["piper"] for row in rows)
