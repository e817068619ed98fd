"""Losses and gradients of a step are those of the model on the whole batch, whatever its layout and its loss."""

from __future__ import annotations

import pytest
from launch import launch
from whole_batch import CASES, JOINT


@pytest.fixture(scope="module")
def lines():
    return launch("runtime/whole_batch.py", 2)


@pytest.mark.parametrize("name", [*CASES, *JOINT])
def test_loss_and_gradients_are_those_of_the_whole_batch_in_eager(lines, name):
    found = [line["apart"] for line in lines if line.get("case") == name]
    assert len(found) == 2 and all(each and max(each) <= 5e-6 for each in found), found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "one microbatch",
            ["SK802: no input is a batch of 4 microbatches: x is float32[6, 2, 8]", "microbatches=[...]"],
        ),
        ("one microbatch, infer", ["SK802: no input is a batch of 4 microbatches"]),
        ("dimension 1", ["4 microbatches of [6, 2, 8], if dimension 1 holds the batch", "batch_dims={'x': 1}"]),
        ("dimension 1, dynamic", ["dimension 0 or 1 of x, float32[6, 8, 8], may hold the batch", "microbatches=[...]"]),
        ("dimension 1, other sizes", ["dimension 0 or 1 of x", "batch_dims={'x': 0} or batch_dims={'x': 1}"]),
        ("dimension 1, LSTM", ["if dimension 1 holds the batch", "batch_dims={'x': 1}"]),
        ("lengths of microbatches", ["several dimensions may count the rows", "batch_dims={'x': 1}"]),
        ("target", ["the target is float32[6, 8, 8]", "'target': 1"]),
        ("a rank each", ["no input is a batch of 4 microbatches"]),
        ("evaluation", ["losses are summed, and this graph does not have the input num_items_in_batch"]),
        ("unknown", ["batch_dims has 'x': 1"]),
        ("mean of terms", ["the graph divides its loss by num_items_in_batch", 'reduction="sum"']),
        ("joint, mean of terms", ["the graph divides its loss by num_items_in_batch", 'reduction="sum"']),
        ("reduction", ["the reduction is 'max'"]),
        ("differs", ["SK804: rank 1 has a different reduction than rank 0: mean, not sum"]),
    ],
)
def test_what_is_unclear_is_refused_on_every_rank(lines, name, says):
    found = [line["said"][name] for line in lines if "said" in line]
    assert len(found) == 2 and all(text in said for said in found for text in says), found
