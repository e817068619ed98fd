"""A run that is saved continues bitwise equal, with any number of stages, and no checkpoint is half of one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from campaigns import these_first
from launch import launch

Lines = list[dict[str, Any]]


def runs(*cases: dict[str, Any], script: str = "runtime/resumed.py") -> list[Lines]:
    """Return what the ranks of each case printed, in their order; ranks may be killed."""
    words = [json.dumps({**case, "number": i}).replace(" ", "") for i, case in enumerate(cases)]
    counts = ",".join(map(str, dict.fromkeys(case["ranks"] for case in cases)))
    found: list[Lines] = [[] for _ in cases]
    at = 0
    for line in launch(script, counts, *" -- ".join(words).split(), check=False):
        if "next" in line:
            at = json.loads(line["next"][0])["number"]
        elif "error" not in line:
            found[at].append(line)
        else:
            assert "Error" not in line["error"], line["error"][-3000:]
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


@pytest.mark.parametrize("optimizer", these_first(["adamw"], ["counting", "sgd"]))
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
        cases += [{**replicated, **on, "steps": 8}, {**replicated, "sharded": True, **on, "steps": 9, "beside": True}]
        cases += [{**two, **on, "steps": 10}]
    whole, *parts = runs(*cases)
    assert len(set(losses(whole))) == 7
    assert [loss for lines in parts[:3] for loss in losses(lines)] == losses(whole)
    assert together(parts[2], "digest") == together(whole, "digest")
    assert {line["draw"] for line in parts[2]} == {whole[0]["draw"]}
    for before, after in pairwise(parts):
        assert together(after, "opened") == together(before, "digest")
    assert "'epoch': 3" in parts[2][0]["state"] and "'best': inf" in parts[2][0]["state"]
    assert "'mean': tensor([3., 3., 3.]), 'sizes': (1, {2: 'x'})" in parts[2][0]["state"]
    done = sorted(path.name for path in Path(at["folder"]).iterdir())
    assert done == ["run.json", *(["step-10", "step-9"] if optimizer == "adamw" else ["step-5", "step-7"])]


@pytest.mark.parametrize("every", these_first([11], [1, 5]))
def test_a_rank_that_is_killed_while_saving_leaves_the_old_checkpoint_or_the_new_one(tmp_path, every):
    """Each run continues from what the run before it left when it was killed, at one point after the other.

    With 11, at every eleventh one, and right before and after the checkpoint gets its name.
    """
    folder = tmp_path / "run"

    def case(rank: int = 0, at: int = 0, when: str = "save") -> dict[str, Any]:
        return {"ranks": 2, "folder": str(folder), "rank": rank, "at": at, "when": when}

    _, (first, second) = (
        [line for line in lines if "points" in line]
        for lines in runs(case(), case(when="save"), script="runtime/killed.py")
    )
    renamed = next(i for i, point in enumerate(first["points"], 1) if point.startswith("os.rename .writing-step"))
    assert len(second["points"]) >= 3 and len(first["points"]) > renamed + 3
    points = {0: {*range(1, len(first["points"]) + 1, every), renamed, renamed + 1}}
    points[1] = {*range(1, len(second["points"]) + 1, every), len(second["points"])}
    cases = [case(rank, at) for rank, those in points.items() for at in sorted(those)]
    cases += [case(0, at, "beside") for at in (4, renamed, renamed + 1)] + [case(1, 3, "beside")]
    cases += [case(0, at, "open") for at in range(1, 7, every)] + [case()]
    whole, *found = runs({"ranks": 2, "steps": len(cases) + 2}, *cases, script="runtime/killed.py")
    wanted = [{} for _ in range(len(cases) + 2)]
    for line in whole:
        wanted[line["step"]] |= line["whole"]
    step, killed = 2, 0
    for lines, case_of in zip(found, cases, strict=True):
        opened = [line for line in lines if "opened" in line]
        assert all(line["step"] == line["steps"] == step for line in opened)
        assert all(wanted[step][name] == value for line in opened for name, value in line["opened"].items())
        done = [line for line in lines if "points" in line or "code" in line]
        died = {0, 1} - {line["rank"] for line in done}
        assert died <= {case_of["rank"]} and {line["code"] for line in done if "code" in line} <= {"SK805"}
        killed += len(died)
        step += not died or (case_of["when"] != "open" and case_of["rank"] == 0 and case_of["at"] > renamed)
    assert killed == len(cases) - 1
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", f"step-{step}"]


def test_what_cannot_be_saved_or_resumed_is_refused_by_all_ranks_with_one_error(tmp_path):
    told: dict[str, list[str]] = {}
    left: list[str] = []
    for line in launch("runtime/unsaved.py", 2, str(tmp_path)):
        left = line.get("left", left)
        if "what" in line:
            told.setdefault(line["what"], []).append(line["said"])
    wanted = {
        "file": "SK504: cannot write checkpoints to",
        "proc": "SK504: cannot write checkpoints to /proc/self/checkpoints",
        "apart": "has no run.json, which rank 0 has written to it (rank 1)",
        "full": "1000 B are free, and one needs at least",
        "state": "SK506: a checkpoint cannot hold state.model.0, which is a Pipeline",
        "loader": "SK506: the loader, a list, has no state_dict", "keep": "SK802: keep is 0",
        "stranger": "SK802: the optimizer has a parameter [3] that the pipeline does not have",
        "full 1": "File too large (rank 1)", "full 0": "File too large", "full 1 beside": "File too large (rank 1)",
        "last one": "File too large (rank 1)",
        "schedulers": "SK804: the scheduler of rank 1 differs from rank 0's in last_epoch",
        "fresh": "has the checkpoints of an earlier run, up to step 2",
        "no scheduler": "has a scheduler's state, and none",
        "other optimizer": "SK507: the checkpoint has the state of SGD, but this optimizer is a AdamW",
        "other scheduler": "SK507: the checkpoint has the state of a MultiStepLR, but this scheduler is a StepLR",
        "other model": "SK507: ", "joined groups": "had different options (lr, ...), and are in one group now",
        "late writer": "SK512: another process has begun to write", "two runs": "names the run",
        "damaged": "SK505: ", "truncated": "SK505: ",
        "flipped 0": "step-2.1/__0_0.distcp is damaged, or a file of another folder: its size and checksum are",
        "flipped 1": "step-2.1/__1_0.distcp is damaged", "flipped record": "step-2.1/checkpoint.json is damaged",
        "flipped digests": "step-2.1", "earlier file": "step-2.1/__1_0.distcp is damaged",
        "earlier record": "step-2.1/checkpoint.json is damaged", "earlier digests": "step-2.1/checkpoint.json is dam",
        "no digests": "step-2.1 is damaged: it has no digests.json", "no file": "it has no __1_0.distcp (rank 1)",
    }  # fmt: skip
    for what, text in wanted.items():
        first, second = told[what]
        assert text in first, (what, first)
        assert first == second and len(first.splitlines()) == 2
    assert all(not text for what, texts in told.items() if what not in wanted for text in texts), told
    assert left == ["run.json", "step-1", "step-2.1"]
