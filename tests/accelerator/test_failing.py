"""Where no rank gets an error when another is gone, as on NCCL, each still says which rank failed, and ends."""

from __future__ import annotations

import pytest
import simgpu
from launch import launch

pytestmark = pytest.mark.skipif(bool(simgpu.missing()), reason=simgpu.missing())


@pytest.fixture(scope="module")
def ended():
    """What failed -> the exit code and the messages of each rank."""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for line in launch("accelerator/failing.py", 3, "raise", "--", "die", check=False, seconds=100, at_once=True):
        if "next" in line:
            last = found[line["next"][0]] = {}
        elif "code" in line:
            last[line["rank"]] = line["code"], line["error"]
    return found


def test_an_op_that_fails_is_said_by_every_rank(ended):
    says = "rank 1 failed in forward of microbatch 2 in stage 1: ValueError: no such thing"
    assert {rank: code for rank, (code, _) in ended["raise"].items()} == {0: 1, 1: 1, 2: 1}
    for rank, waited in ((0, "gradients of"), (2, "")):
        error = ended["raise"][rank][1]
        assert f"SK805: {says}; rank {rank} waited for {waited}" in error and "Traceback" not in error, error
    assert f"SK805: {says}" in ended["raise"][1][1]


def test_a_rank_that_is_killed_is_named_before_the_time_limit_of_the_group(ended):
    assert {rank: code for rank, (code, _) in ended["die"].items()} == {0: 1, 1: -9, 2: 1}
    for rank in (0, 2):
        assert f"SK805: rank 1 does not answer; rank {rank} waited for" in ended["die"][rank][1]
