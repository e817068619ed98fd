"""What a training loop needs around its steps gives what the unsplit model gives, on every rank."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from launch import launch

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
pytestmark = pytest.mark.skipif(OLD, reason="2.11 sends no states of a generator, which dropout needs")

NAMES = ["clip", "clip replicas", "clip shards"]


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for line in launch("runtime/real_loop.py", "2,4", json.dumps(NAMES)):
        found[line["case"]].append(line)
    return found


@pytest.mark.parametrize("case", [name for name in NAMES if name.startswith("clip")])
def test_gradients_are_clipped_by_the_norm_of_the_unsplit_model(ran, case):
    assert len(ran[case]) == (2 if case == "clip" else 4)
    for line in ran[case]:
        assert len(line["steps"]) == 3
        for step in line["steps"]:
            assert step["norm"] == pytest.approx(step["true"], rel=1e-6)
            assert step["apart"] < 1e-5


@pytest.mark.parametrize("case", [name for name in NAMES if name.startswith("clip")])
def test_every_rank_has_the_loss_where_it_is_asked_for(ran, case):
    for line in ran[case]:
        for step in line["steps"]:
            assert step["loss"] == pytest.approx(step["unsplit loss"], rel=1e-6) and step["losses"] == 4
