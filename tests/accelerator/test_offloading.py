"""Offload between the simulated accelerator and the CPU: the numbers of the CPU, exact bytes on both, and no races."""

from __future__ import annotations

import pytest
import simgpu
from launch import launch

pytestmark = pytest.mark.skipif(bool(simgpu.missing()), reason=simgpu.missing())

PLANTED = "a copy does not wait for its kernel"


@pytest.fixture(scope="module")
def found():
    cases = ["as it is", PLANTED, "as it is, in stages", f"{PLANTED}, in stages"]
    return {line["case"]: line for line in launch("accelerator/offloading.py", 1, *cases) if "case" in line}


def test_bytes_and_numbers_without_races(found):
    right = found["as it is"]
    assert right["moved"] == 2 and right["apart"] < 1e-12 and not right["races"]
    for measured, predicted in (right["device"], right["host"]):
        assert measured == predicted > 0
    assert any("has not finished writing" in race for race in found[PLANTED]["races"])


def test_stages_move_values_without_races(found):
    right = found["as it is, in stages"]
    assert right["moved"] > 2 and right["apart"] < 1e-12 and not right["races"] and right["devices"] == ["simgpu:0"]
    for measured, predicted in (right["device"], right["host"]):
        assert measured == predicted > 0
    assert any("has not finished writing" in race for race in found[f"{PLANTED}, in stages"]["races"])
