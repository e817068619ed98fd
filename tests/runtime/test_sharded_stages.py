"""Stages of models that are sharded over ranks as well, against the same model on one device."""

from __future__ import annotations

import pytest
from campaigns import these_first
from launch import launch

CLOSE = 2e-6
"""Sums over ranks are made in another order: float32 has 1e-7, and a gradient adds some tens of terms."""


def found(ranks, *cases):
    lines = launch("runtime/sharded_stages.py", ranks, *cases, seconds=100)
    assert sorted((line["case"], line["rank"]) for line in lines) == sorted((c, r) for c in cases for r in range(ranks))
    return lines


@pytest.mark.parametrize("kind", these_first(["sequence"], ["tied", "experts"]))
def test_plans_of_a_sharded_step_have_its_gradients_and_bytes(kind):
    lines = found(2, f"{kind},none,")
    assert all(line["apart"] < CLOSE for line in lines), lines
    one, other = lines
    assert one["names"] == other["names"], "a plan of one rank must fit the graph of the other"
    assert kind != "sequence" or one["taken"] != other["taken"]  # each rank takes other pieces of what is divided


def test_four_ranks_train_like_one_device_and_must_run_the_same():
    """Experts exchange tokens. The forward alone runs in stages, too, and evaluates what was trained."""
    trained, refused, inferred = "experts,1f1b,", "experts,1f1b,refused", "experts,1f1b,infer"
    lines = found(4, trained, refused, inferred)
    for line in (one for one in lines if one["case"] == inferred):
        assert line["apart"] < CLOSE and line["made"] == (line["rank"] > 1), line
        assert "SK802" in line["step"] and "training=True" in line["step"], line
    for line in (one for one in lines if one["case"] == trained):
        assert line["apart"] < CLOSE and line["norm"] < CLOSE and line["eval"] < CLOSE, line
    for line in (one for one in lines if one["case"] == refused):
        assert "SK804" in line["microbatches"] and "number of microbatches" in line["microbatches"]
        assert "SK804" in line["weights"] and "inp.weight has other values" in line["weights"]


@pytest.mark.campaign
def test_four_ranks_train_like_one_device_under_other_schedules():
    """With a tied weight or rows of the sequence, stages also send pieces of them."""
    lines = found(4, "tied,1f1b,", "tied,zbv,", "sequence,1f1b,", "sequence,zbv,")
    assert all(line["apart"] < CLOSE and line["norm"] < CLOSE and line["eval"] < CLOSE for line in lines), lines
    own = found(4, "tied,1f1b,forward", "sequence,gpipe,forward")  # stages of forward nodes, chosen by hand
    assert all(line["apart"] < CLOSE and line["norm"] < CLOSE and line["eval"] < CLOSE for line in own), own
    inferred = found(4, "tied,1f1b,infer", "sequence,1f1b,infer", "experts,gpipe,infer")
    assert all(line["apart"] < CLOSE and "SK802" in line["step"] for line in inferred), inferred


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["replicas", "fsdp"])
def test_eight_ranks_train_like_one_device(how):
    cases = [f"{kind},{schedule},{how}" for kind in ("tied", "sequence") for schedule in ("1f1b", "zbv")]
    lines = found(8, *cases)
    assert all(line["apart"] < CLOSE and line["norm"] < CLOSE for line in lines), lines


@pytest.mark.campaign
def test_a_run_goes_on_from_a_checkpoint_of_all_ranks(tmp_path):
    """Bit by bit: the same processes, threads and shapes. The second model is saved while training goes on."""
    for line in found(4, *(f"{kind},1f1b,{tmp_path}/{kind}" for kind in ("tied", "sequence"))):
        assert line["same"] and line["moved"] > 0.1


@pytest.mark.campaign
@pytest.mark.parametrize("first", [0, 12])
def test_random_nets_with_random_shards(first):
    """Budgets on two ranks, with their bytes; stages on four."""
    kinds = [f"random{seed}" for seed in range(first, first + 12)]
    lines = found(2, *(f"{kind},none," for kind in kinds))
    lines += found(4, *(f"{kind},{schedule}," for kind in kinds for schedule in ("1f1b", "zbv")))
    assert all(line["apart"] < 5 * CLOSE and line.get("norm", 0) < CLOSE for line in lines), lines
    assert all(line.get("eval", 0) < CLOSE for line in lines), lines
