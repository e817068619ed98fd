"""Pipelines of real processes give the losses, gradients and weights of the unsplit model, under each schedule."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from campaigns import these_first
from launch import launch

from splitkit.extend import StageCosts
from splitkit.pipeline.synthesize import synthesize

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""It sends floats with a gradient only, and runs no zero-bubble schedule: SK806 for all else."""


def synthesized(microbatches: int) -> list[str]:
    """An order made for four stages on two ranks, in a V."""
    stages = [StageCosts(1.0, 1.5, 0.5, saved_bytes=10, deferred_bytes=4) for _ in range(4)]
    made = synthesize(stages, microbatches, 45, ranks=2, placement="V", effort=0.02)
    return [" ".join(map(str, row)) for row in made.order.ranks]


ON_TWO: list[dict[str, Any]] = [
    {"model": "odd", "stages": 2, "schedule": "1f1b", "microbatches": 4, "steps": 10},
    {"model": "odd", "stages": 4, "schedule": "interleaved1f1b", "microbatches": 4},
    {"model": "gpt2", "stages": 2, "schedule": "1f1b", "microbatches": 2, "call": "checkpoint"},
    {"model": "filled", "stages": 2, "schedule": "1f1b", "microbatches": 2},
    {"model": "odd", "stages": 4, "schedule": "v-half", "microbatches": 5},  # torch has none of this
    {"model": "turned", "stages": 4, "schedule": "interleavedzerobubble", "microbatches": 4},  # summed with it turned
    {"model": "odd", "stages": 3, "schedule": "uneven", "microbatches": 3, "order": [
        "0F0 0F1 2F0 2I0 2F1 2W0 2B1 0F2 2F2 0B0 2B2 0B1 0I2 0W2", "1F0 1F1 1I0 1F2 1W0 1B1 1I2 1W2",
    ]},
    {"model": "odd", "stages": 4, "schedule": "zbvzerobubble", "microbatches": 4, "messages": True},
]  # fmt: skip
IN_ORDER: list[dict[str, Any]] = [
    {"model": "unet", "stages": 8, "schedule": name, "microbatches": 8, "messages": True}
    for name in ("interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev", "v-half")
]
LATER_ON_TWO: list[dict[str, Any]] = [
    {"model": "odd", "stages": 2, "schedule": "eager-1f1b", "microbatches": 5},
    {"model": "t5", "stages": 4, "schedule": "zbvzerobubble", "microbatches": 4},  # lost gradients, and would not send
    {"model": "odd", "stages": 4, "schedule": "synthesized", "microbatches": 4, "order": synthesized(4)},
    {"model": "odd", "stages": 4, "schedule": "interleavedzerobubble", "microbatches": 4},
    {"model": "gpt2", "stages": 4, "schedule": "zbvzerobubble", "microbatches": 4},
    {"model": "odd", "stages": 4, "schedule": "dualpipev", "microbatches": 4},
    {"model": "odd", "stages": 4, "schedule": "loopedbfs", "microbatches": 4},
    {"model": "gpt2", "stages": 4, "schedule": "interleavedzerobubble", "microbatches": 4, "call": "checkpoint"},
    {"model": "t5", "stages": 4, "schedule": "interleavedzerobubble", "microbatches": 4},  # a bias for two layers
    {"model": "odd", "stages": 2, "schedule": "gpipe", "microbatches": 3},
    {"model": "gpt2", "stages": 4, "schedule": "v-min", "microbatches": 3},
    {"model": "odd", "stages": 4, "schedule": "interleaved1f1b", "microbatches": 4, "messages": True},
    {"model": "odd", "stages": 4, "schedule": "dualpipev", "microbatches": 4, "messages": True},
]
"""A campaign: others above and below have the model, or the schedule."""
LATER_ON_FOUR: list[dict[str, Any]] = [
    {"model": "unet", "stages": 1, "schedule": "gpipe", "microbatches": 4, "replicas": 4},
    {"model": "unet", "stages": 2, "schedule": "eager-1f1b", "microbatches": 6, "replicas": 2},
    {"model": "gpt2", "stages": 2, "schedule": "1f1b", "microbatches": 6, "replicas": 2},  # with a tie and dropout
    {"model": "unet", "stages": 2, "schedule": "1f1b", "microbatches": 4, "replicas": 2, "sharded": True},
    {"model": "gpt2", "stages": 2, "schedule": "1f1b", "microbatches": 4, "replicas": 2, "sharded": True},
]
ON_FOUR: list[dict[str, Any]] = [
    {"model": "t5", "stages": 4, "schedule": "1f1b", "microbatches": 4},
    {"model": "unet", "stages": 4, "schedule": "1f1b", "microbatches": 4},
    {"model": "gpt2", "stages": 4, "schedule": "1f1b", "microbatches": 4},
    {"model": "unet", "stages": 4, "schedule": "zbvzerobubble", "microbatches": 8, "replicas": 2, "sharded": True},
]

if OLD:
    ON_TWO, LATER_ON_TWO, LATER_ON_FOUR = [], [], []
    ON_FOUR = [c for c in ON_FOUR if c["model"] == "unet" and c["schedule"] in ("1f1b", "gpipe")]


def named(case: dict[str, Any]) -> str:
    more = f"-{case['call']}" if "call" in case else ""
    if "replicas" in case:
        more = f"-x{case['replicas']}"
    more += "-sharded" if "sharded" in case else "-messages" if "messages" in case else ""
    return f"{case['model']}-{case['stages']}-{case['schedule']}{more}"


CASES = [(2, case) for case in ON_TWO] + [(4, case) for case in ON_FOUR]
LATER = [(2, case) for case in LATER_ON_TWO] + [(4, case) for case in LATER_ON_FOUR]


@cache
def trained(*, campaign: bool) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    cases = [case | {"ranks": ranks} for ranks, case in (LATER if campaign else CASES)]
    for line in launch("runtime/same_as_whole.py", "2,4", json.dumps(cases)):
        found[f"{line['ranks']} ranks {named(line)}"].append(line)
    return found


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    return trained(campaign=False)


@pytest.mark.parametrize(("ranks", "case"), these_first(CASES, LATER), ids=lambda of: of if of in (2, 4) else named(of))
def test_losses_gradients_and_weights_are_those_of_the_unsplit_model(ranks, case):
    lines = trained(campaign=(ranks, case) in LATER)[f"{ranks} ranks {named(case)}"]
    assert len(lines) == ranks
    for line in lines:  # the first step is held to 1e-6 there, on every rank, the others to 1e-4
        assert line["steps"] == case.get("steps", 2) and line["gradient"] <= 1e-4 >= line["weight"]
    replicas, stages = case.get("replicas", 1), case["stages"]
    assert sorted(s for line in lines for s in line["own"]) == sorted([*range(stages)] * replicas)
    last = [line for line in lines if stages - 1 in line["own"]]
    assert all((line["outputs"] is not None) == (line in last) for line in lines)
    assert [line["replica"] for line in sorted(last, key=lambda line: line["rank"])] == list(range(replicas))
    numbers = sorted(len(line["outputs"]) for line in last)
    assert sum(numbers) == case["microbatches"] and numbers[-1] - numbers[0] <= 1


@pytest.mark.campaign
@pytest.mark.skipif(OLD, reason="2.11 runs no zero-bubble schedule")
def test_four_ranks_with_messages_in_an_order_of_their_own_give_what_the_unsplit_model_gives():
    cases = [case | {"ranks": 4} for case in IN_ORDER]
    lines = launch("runtime/same_as_whole.py", 4, json.dumps(cases))
    assert sorted((named(line), line["rank"]) for line in lines) == sorted(
        (named(c), r) for c in cases for r in range(4)
    )
    for line in lines:
        assert line["steps"] == 2 and line["gradient"] <= 1e-4 >= line["weight"]


def test_outputs_that_nobody_asked_for_in_the_first_step_are_refused_later(ran):
    assert OLD or {line["late"] for line in ran["2 ranks odd-2-1f1b"]} == {"SK802"}
    assert {line["late"] for line in ran["4 ranks unet-4-1f1b"]} == {None, 4}, "a loss of one's own has all outputs"


@pytest.mark.skipif(OLD, reason="2.11 does not send what these need")
def test_outputs_keep_their_form(ran):
    (last,) = [line for line in ran["2 ranks odd-2-1f1b"] if line["outputs"]]
    assert set(last["outputs"]) == {"dict"}


@pytest.mark.skipif(OLD, reason="2.11 does not send what these need")
def test_values_that_cross_are_those_of_the_graph(ran):
    borders = ran["4 ranks t5-4-1f1b"][0]["borders"]
    assert len(borders) == 3 and all(borders)
    assert "dropout_7" in borders[1] and "dropout_7" in borders[2]  # the encoder's output


@pytest.mark.skipif(OLD, reason="2.11 does not send what these need")
def test_a_tied_weight_is_on_both_ranks(ran):
    lines = sorted(ran["4 ranks gpt2-4-1f1b"], key=lambda line: line["rank"])
    states = [set(line["state"]) for line in lines]
    assert not states[0] & states[1]
    assert states[0] & states[3] == {"lm_head.weight"}
