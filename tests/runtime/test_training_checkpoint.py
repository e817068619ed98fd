"""A run that is saved continues bitwise equal, with any number of stages, and no checkpoint is half of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import launch

Lines = list[dict[str, Any]]


def runs(*cases: dict[str, Any], script: str = "runtime/resumed.py") -> list[Lines]:
    """Return what the ranks of each case printed, in their order."""
    words = " -- ".join(json.dumps(case).replace(" ", "") for case in cases).split()
    counts = ",".join(map(str, dict.fromkeys(case["ranks"] for case in cases)))
    found: list[Lines] = [[] for _ in cases]
    at = 0
    for line in launch(script, counts, *words):
        if "next" in line:
            at = next(i for i, case in enumerate(cases) if [json.dumps(case).replace(" ", "")] == line["next"])
        else:
            found[at].append(line)
    return [sorted(lines, key=lambda line: line["rank"]) for lines in found]


def losses(lines: Lines) -> list[float]:
    return [loss for loss in lines[-1]["losses"] if loss is not None]


def together(lines: Lines, what: str) -> dict[str, str]:
    """Return name -> digest over all ranks, which agree where several have a tensor."""
    found: dict[str, str] = {}
    for line in lines:
        for name, value in line[what].items():
            assert found.setdefault(name, value) == value, name
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "counting"])
def test_a_run_continues_bitwise_with_other_numbers_of_stages(tmp_path, optimizer):
    """In and out of 2 and 4 stages; with AdamW also in and out of replicas and of shards over them."""
    two, four = ({"ranks": n, "stages": n, "optimizer": optimizer} for n in (2, 4))
    at = {"folder": str(tmp_path / "run")}
    on = {**at, "resume": True}
    cases = [
        {**two, "steps": 7}, {**two, **at, "steps": 3}, {**four, **on, "steps": 5, "beside": True},
        {**two, **on, "steps": 7},
    ]  # fmt: skip
    if optimizer == "adamw":
        replicated = {"ranks": 4, "stages": 2, "replicas": 2, "optimizer": optimizer}
        cases += [{**replicated, "sharded": True, **on, "steps": 8, "beside": True}, {**replicated, **on, "steps": 9}]
        cases += [{**replicated, "sharded": True, **on, "steps": 10}, {**two, **on, "steps": 11}]
    whole, *parts = runs(*cases)
    assert len(set(losses(whole))) == 7
    assert [loss for lines in parts[:3] for loss in losses(lines)] == losses(whole)
    assert together(parts[2], "digest") == together(whole, "digest")
    assert {line["draw"] for line in parts[2]} == {whole[0]["draw"]}
    for before, after in zip(parts, parts[1:], strict=False):
        assert together(after, "opened") == together(before, "digest")
    assert "'epoch': 3" in parts[2][0]["state"] and "'best': inf" in parts[2][0]["state"]
    assert "'mean': tensor([3., 3., 3.]), 'sizes': (1, {2: 'x'})" in parts[2][0]["state"]
    done = sorted(path.name for path in Path(at["folder"]).iterdir())
    assert done == ["run.json", *(["step-10", "step-11"] if optimizer == "adamw" else ["step-5", "step-7"])]
