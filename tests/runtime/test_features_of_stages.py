"""What a pipeline can do on two ranks, with stages whose backward autograd runs, and with stages of a plan."""

from __future__ import annotations

import pytest
from campaigns import these_first
from features_of_stages import FEATURES
from launch import launch


@pytest.mark.parametrize("kind", these_first(["planned"], ["autograd"]))
def test_each_feature_works_for_both_kinds_of_stages(kind, tmp_path):
    lines = launch("runtime/features_of_stages.py", 2, kind, str(tmp_path))
    found = {name: [line["apart"] for line in lines if line.get("feature") == name] for name in FEATURES}
    assert all(len(apart) == 2 and max(apart) < 1e-6 for apart in found.values()), found
