"""Pipelines of a graph with symbolic sizes train batches of many sizes as the model itself does."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from campaigns import these_first
from launch import launch
from test_same_as_whole import OLD

BATCHES: list[Any] = [
    [8, 8],  # as captured: 4 microbatches of 2 rows of length 8
    [8, 5],
    [16, 11],
    [11, 8],  # 3, 3, 3 and 2 rows
    [5, 8],  # one microbatch would have 1 row
    [[2, 5], [3, 9], [2, 11], [4, 3]],  # the microbatches themselves
    [8, 8],
]
MODELS = ["plain"] if OLD else ["plain", "gpt2", "llama", "t5"]
SCHEDULES = [("1f1b", 2), ("interleaved1f1b", 4)] + ([] if OLD else [("gpipe", 2), ("zbvzerobubble", 4)])
"""The name of a schedule, and how many stages two ranks have under it."""
PAIRS = {
    "plain": ["1f1b"],
    "gpt2": ["zbvzerobubble"],
    "llama": [],
    "t5": [],
}
LATER = {
    "plain": ["interleaved1f1b", "zbvzerobubble"],
    "gpt2": ["1f1b"],
    "llama": ["gpipe", "interleaved1f1b"],
    "t5": ["gpipe", "zbvzerobubble"],
}
"""Pairs of a model and a schedule that a campaign runs: others above have the model, or the schedule."""


def case(model: str, schedule: str, stages: int, **more: Any) -> dict[str, Any]:
    made = {"model": model, "schedule": schedule, "stages": stages, "ranks": 2, "microbatches": 4}
    # With dropout the RNG state travels too, and the unsplit graph runs the same microbatches instead.
    return made | {"drops": model == "gpt2", "replicas": [1] * stages, "batches": BATCHES, "by": ""} | more


CASES = [case(m, s, n) for m in MODELS for s, n in SCHEDULES if s in PAIRS[m]]
if not OLD:
    CASES.append(case("llama", "1f1b", 2, by="folder"))
    CASES.append(case("plain", "1f1b", 1, replicas=[2]))

LONG = [] if OLD else [case("gpt2", "interleaved1f1b", 8, ranks=4), case("t5", "zbvzerobubble", 8, ranks=4)]
LONG += [] if OLD else [case("t5", "1f1b", 2, by="folder")]
LONG += [case(m, s, n) for m in MODELS for s, n in SCHEDULES if s in LATER[m]]
LONG += [case("plain", "1f1b", 4, ranks=4), case("plain", "interleaved1f1b", 8, ranks=4)]
BY_TORCH = [] if OLD else [case("llama", "1f1b", 2, by="torch")]


def named(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['schedule']}-x{','.join(map(str, case['replicas']))}{case['by']}"


ALL = these_first(CASES, LONG)


@cache
def ran(*, campaign: bool) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of all cases said; one process captures for all."""
    found: dict[str, list[dict[str, Any]]] = {}
    cases = LONG if campaign else CASES + BY_TORCH
    counts = ",".join(map(str, sorted({case["ranks"] for case in cases})))
    for line in launch("runtime/sizes.py", counts, json.dumps(cases)):
        found.setdefault(named(line), []).append(line)
    return found


@pytest.mark.parametrize("case", ALL, ids=named)
def test_loss_and_gradients_are_those_of_the_model_on_the_whole_batch(case):
    lines = ran(campaign=case in LONG)[named(case)]
    assert len(lines) == case["ranks"]
    for line in lines:
        refused = line["seen"].pop(4)
        assert (
            "SK802" in refused and ".shape[0] is 1 in a microbatch, and the captured graph takes 2 or more" in refused
        )
        assert len(line["seen"]) == len(BATCHES) - 1 and max(line["seen"]) <= 5e-6
    assert sum(line["outputs"] or 0 for line in lines) == 4


@pytest.mark.parametrize("case", ALL, ids=named)
def test_stages_for_other_sizes_are_freed_at_once(case):
    """Up to torch 2.14 they hold what they receive into: one set for training and one for inference are left."""
    assert all(line["live"] == 2 * line["own"] for line in ran(campaign=case in LONG)[named(case)])


@pytest.mark.parametrize("case", BY_TORCH, ids=map(named, BY_TORCH))
def test_torch_s_own_schedule_runs_the_captured_sizes(case):
    lines = ran(campaign=False)[named(case)]
    assert len(lines) == 2 and all(line["seen"] and max(line["seen"]) <= 5e-6 for line in lines)
