"""The benchmark of replicas: a row for a chain, and what it compares."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def replicas():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("replicas")
    sys.modules.pop("replicas", None)


def test_a_chain_on_several_devices(replicas):
    gm = replicas.captured("chain", small=True)
    one, more = (replicas.row(gm, 4, "pcie4", degrees) for degrees in ((1,), (1, 2, 4)))
    assert one["replicas"] == [1] * 4 and max(more["replicas"]) > 1
    assert more["step"] <= one["step"] and more["bound"] <= more["bottleneck"]
