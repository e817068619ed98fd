"""What a training loop needs around its steps gives what the unsplit model gives, on every rank."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
import torch
from launch import launch

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
pytestmark = pytest.mark.skipif(OLD, reason="2.11 sends no states of a generator, which dropout needs")

NAMES = [
    "clip",
    "clip replicas",
    "clip shards",
    "evaluation",
    "whole",
    "gathered shards",
    "frozen",
    "without parameters",
    "needed",
]


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


def test_a_capture_in_eval_mode_is_evaluated_with_the_weights_that_are_trained(ran):
    lines = ran["evaluation"]
    assert len(lines) == 2
    for line in lines:
        assert line["same"] and all(line["same"].values())
        for step in line["found"]:
            assert step["loss"] == pytest.approx(step["eager"], rel=1e-5)
        assert abs(line["in training"] - line["found"][-1]["eager"]) > 1e-3, "dropout is on in a capture in train mode"
        losses = [step["loss"] for step in line["found"]]
        assert losses == sorted(losses, reverse=True), "the weights are those of the last step"
    assert sorted([line["found"][0]["outputs"] for line in lines], key=str) == [4, None]


def test_a_change_of_mode_is_refused_with_what_to_do(ran):
    for line in ran["evaluation"]:
        assert line["refused"].startswith("SK802: eval() was called on a part, which has no effect")
        assert "pipe.evaluation(" in line["refused"]


def test_the_trained_model_is_gathered_and_written_for_others_to_load(ran):
    first, second = sorted(ran["whole"], key=lambda line: line["rank"])
    assert first["names"] and not second["names"], "rank 0 has all tensors, under all names of ties"
    assert first["tied"] and first["state"] < 1e-6 and first["moved"] > 1e-2
    assert first["copied"], "the next step of the optimizer leaves the state as it is"
    assert max(first["logits"]) < 1e-5, "from_pretrained, and safetensors.torch.load_model"
    for line in (first, second):
        assert line["refused"].startswith("SK802: the model and the graph that was captured do not both have")
        assert line["absent"].startswith("SK504")


def test_shards_are_gathered(ran):
    lines = sorted(ran["gathered shards"], key=lambda line: line["rank"])
    assert [line["names"] for line in lines] == [True, False, False, False]
    assert lines[0]["apart"] and max(lines[0]["apart"]) < 1e-6


def test_layers_are_frozen_and_unfrozen_between_steps(ran):
    for line in ran["frozen"]:
        assert line["frozen"] and len(line["apart"]) == 4 and max(line["apart"]) < 1e-5
        assert re.match("SK802: requires_grad of .* is False, and was True", line["quiet"]), line["quiet"]
        assert line["differs"].startswith("SK804: rank 1 chooses differently than rank 0 whether")


def test_a_rank_without_parameters_runs_the_usual_loop_and_gradients_accumulate(ran):
    lines = ran["without parameters"]
    assert sorted(line["own"] for line in lines) == [0, 2]
    for line in lines:
        assert max(line["apart"]) < 1e-5 and line["norm"] == pytest.approx(1, rel=1e-6)
        assert line["resumed"], "a rank without parameters takes part in checkpoints"


def test_a_rank_needs_the_inputs_that_it_reads_and_rank_0_can_send_them(ran):
    first, second = sorted(ran["needed"], key=lambda line: line["rank"])
    assert first["needs"] == ["x"] and second["needs"] == ["y"]
    for line, own in ((first, "x"), (second, "y")):
        assert len(line["apart"]) == 2 and max(line["apart"]) < 1e-5
        assert line["refused"].startswith(f"SK802: {own} is None, but this rank reads it")
        assert line["missing"].startswith("SK802: the graph does not take these arguments")
        assert line["same"] and line["text"] == "text"
