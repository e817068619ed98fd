"""The benchmark of large graphs: its graphs, the rules it compares with, and its rows, on small sizes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def scale():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("scale")
    for name in ("scale", "graphs"):
        sys.modules.pop(name, None)


def test_graphs_have_the_size_asked_for_and_no_cycles(scale):
    for kind in scale.graphs.KINDS:
        for count in (50, 1000):
            problem = scale.graphs.problem(kind, count, 4)
            assert problem.units == count and len(problem.devices) == 4
            assert (problem.edges[:, 0] < problem.edges[:, 1]).all()
            assert len(np.unique(problem.edges, axis=0)) == len(problem.edges) >= count - 30
            again = scale.graphs.problem(kind, count, 4)
            assert np.array_equal(again.pins, problem.pins) and np.array_equal(again.seconds, problem.seconds)


def test_the_shapes_differ_in_how_many_values_cross_a_cut(scale):
    crossing = {}
    for kind in scale.graphs.KINDS:
        edges = scale.graphs.problem(kind, 1000, 2).edges
        crossing[kind] = np.mean([((edges < cut).any(axis=1) & (edges >= cut).any(axis=1)).sum() for cut in (300, 600)])
    assert crossing["layered"] > 3 * max(crossing["chain"], crossing["cells"], crossing["transformer"])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_rules_divide_the_nodes(scale, work, count):
    count = min(count, len(work))
    work = np.array(work, float)
    for rule in scale.RULES.values():
        cuts = rule(work, count)
        assert len(cuts) == count + 1 and cuts[0] == 0 and cuts[-1] == len(work) and (np.diff(cuts) >= 0).all()
    blocks = np.diff(np.concatenate([[0], np.cumsum(work)])[scale.block_partition(work, count)])
    assert blocks.max() - blocks.min() <= work.max() * (1 + 1e-9)
    blocks = np.diff(np.concatenate([[0], np.cumsum(work)])[scale.greedy(work, count)])
    assert (blocks[:-1] <= work.sum() / count * (1 + 1e-9)).all()
    assert np.ptp(np.diff(scale.equal_counts(work, count))) <= 1


def test_rows_have_values_above_the_bound_and_below_the_rules(scale, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["scale.py", "--sizes", "120", "--devices", "2", "3", "--kinds", "cells", "--share", "0.5", "--json"],
    )
    scale.main()
    data = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in data["rows"]] == [2, 3] and data["summary"]["graphs"] == 2
    for row in data["rows"]:
        assert row["kind"] == "cells" and row["nodes"] == 120
        assert 0 < row["bound"] <= row["value"] and row["gap"] == pytest.approx(1 - row["bound"] / row["value"])
        assert all(ratio >= 1 - 1e-9 for ratio in row["ratios"].values())
    monkeypatch.setattr(
        sys, "argv", ["scale.py", "--sizes", "60", "--devices", "2", "--kinds", "chain", "--share", "0.5"]
    )
    scale.main()
    assert "greedy" in capsys.readouterr().out
