"""Mixed precision in a pipeline: float16 with a scaler, and an autocast around the step."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for line in launch("runtime/precision.py", 2):
        found[line["case"]].append(line)
    return found


def test_float16_with_a_scaler_trains_as_the_unsplit_model(ran):
    """A plain `GradScaler` would skip a step only on the rank whose gradients overflow."""
    assert len(ran["scaled"]) == 2
    for line in ran["scaled"]:
        mine, theirs = zip(*line["scales"], strict=True)
        assert mine == theirs and line["apart"] < 1e-6
        # some steps were skipped, and some were not
        assert min(mine) < 2.0**20 and any(b > a for a, b in pairwise(mine))


def test_a_scaler_around_a_pipeline_as_a_module_is_refused_in_float16(ran):
    assert len(ran["module"]) == 2
    for line in ran["module"]:
        assert line["said"]["torch.bfloat16"] == ""
        assert "SK802: the loss was scaled by 65536 after the backward" in line["said"]["torch.float16"]


def test_an_autocast_around_the_step_is_refused_unless_it_was_around_the_capture(ran):
    assert len(ran["around"]) == 2
    for line in ran["around"]:
        said = line["said"]
        assert said["None in None"] == pytest.approx(said["torch.bfloat16 in None"], rel=0.05)
        assert said["None in None"] != said["torch.bfloat16 in None"] == said["torch.bfloat16 in torch.bfloat16"]
        for case, name in (("None in torch.bfloat16", "bfloat16"), ("torch.bfloat16 in torch.float16", "float16")):
            assert "SK802" in said[case] and f"autocast to {name} is active around the call" in said[case]
            assert "inside torch.autocast" in said[case]
