"""Sweeps over pipelines of a training step: each row is the plan of `Pipeline`, refusals say what would do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.cli import main
from splitkit.errors import PolicyError
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.policies import Pipeline
from splitkit.view.renderers import html

NET = f"{Path(__file__).parents[1] / 'cli' / 'tinynet.py'}:net"


class Chain(nn.Module):
    """Layers with a pointwise op between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def joint():
    return sk.capture_joint(Chain(), torch.randn(128, 16))


@pytest.fixture(scope="module")
def costs(joint):
    return sk.costs.roofline(joint.graph_module, "h100")


@pytest.fixture(scope="module")
def found(joint, costs):
    return sk.sweep(joint, costs, stages=(2,), microbatches=(2,), chunks=(1, 2), links="nvlink4")


def test_schedules_try_the_chunks_that_they_take(found):
    rows = [(row.schedule, row.chunks, row.run.ranks) for row in found.rows]
    assert rows == [
        ("gpipe", 1, 2), ("1f1b", 1, 2), ("interleaved-1f1b", 1, 2), ("interleaved-1f1b", 2, 1), ("zbv", 2, 1),
    ]  # fmt: skip


def test_a_row_is_what_the_policy_plans_alone(joint, costs, found):
    for row in (found.rows[1], found.rows[-1]):
        plan = Pipeline(2, row.schedule, 2, links="nvlink4").assign(joint.flow, costs)
        assert plan.places == row.plan.places and plan.claim.value == row.run.seconds
        assert row.policy.assign(joint.flow, costs).claim.value == row.run.seconds
        run = simulate_schedule(row.run.stages, row.run.order, links="nvlink4")
        assert (run.seconds, run.peaks) == (row.run.seconds, row.run.peaks)
    assert len(joint.split(found.pareto[0].plan).stages) == 2


def test_rows_say_bound_and_what_decides(found):
    data = json.loads(json.dumps(found.to_dict()))["rows"]
    for row, told in zip(found.rows, data, strict=True):
        assert told["bound"] <= told["seconds"] == row.run.seconds and told["gap"] == row.gap
        assert told["decides"] == f"rank {row.run.busiest_rank}"
    assert "decides" in str(found) and "gap" in html(found)


def test_what_does_not_fit_names_memory_that_does(joint, costs):
    numbers = {"stages": (2,), "microbatches": (2,), "schedules": ("1f1b",)}
    (row,) = sk.sweep(joint, costs, **numbers, memory=1000).rows
    assert row.fits is False and row.run is None and f"memory={row.needs}" in row.why
    (enough,) = sk.sweep(joint, costs, **numbers, memory=row.needs).rows
    assert enough.fits and max(enough.run.peaks) <= row.needs
    assert "memory of rank" in enough.decides


def test_numbers_that_do_not_go_together_are_rows(joint, costs):
    found = sk.sweep(joint, costs, stages=(3,), microbatches=(2,), schedules=("zbv", "interleaved-1f1b"), chunks=(2,))
    assert [row.run for row in found.rows] == [None, None] and "multiple of 2" in found.rows[1].why
    (alone,) = sk.sweep(joint, costs, stages=(2,), microbatches=(2,), schedules=("1f1b",), chunks=(2,)).rows
    assert alone.run is None and "SK" not in alone.why and alone.why


def test_stages_may_offload(joint, costs):
    numbers = {"stages": (2,), "microbatches": (6,), "schedules": ("gpipe",)}
    (small,) = sk.sweep(joint, costs, **numbers, memory=1000).rows
    memory = small.needs * 6 // 5
    alone, moved = (sk.sweep(joint, costs, **numbers, memory=memory, **k).rows[0] for k in ({}, {"offload": 1e12}))
    assert moved.plan.offloaded and moved.run.seconds < alone.run.seconds
    assert moved.to_dict()["host"] == max(moved.run.host_peaks) > 0 and "host" not in alone.to_dict()
    step = joint.split(moved.plan)
    copies = [0 if stage.copies is None else stage.copies.nbytes for stage in moved.run.stages]
    assert [stage.host_bytes for stage in step.stages] == copies


@pytest.mark.parametrize(
    "words", [{"host": "1GiB"}, {"chunks": ()}, {"chunks": (0,)}, {"recompute": "yes"}, {"optimizer": None}]
)
def test_bad_arguments(joint, costs, words):
    with pytest.raises(PolicyError, match="SK302"):
        sk.sweep(joint, costs, stages=(2,), microbatches=(2,), **words)


def test_chunks_are_for_training_steps():
    gm = sk.capture(Chain(), torch.randn(128, 16))
    for name, given in {"chunks": (1,), "offload": "pcie5"}.items():
        with pytest.raises(PolicyError, match=f"{name}.*of a forward graph"):
            sk.sweep(gm, sk.costs.unit(gm), **{name: given})


def test_the_command_prints_one_that_plans_the_best_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--size", "layers=1,width=8,vocab=32", "--stages", "2", "--what", "fwd-bwd", "--microbatches", "2"]
    assert main(["sweep", NET, *words, "--schedules", "1f1b", "--json", "--view", "page.html"]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["rows"]
    assert row["pareto"] and data["what"] == "fwd-bwd" and (tmp_path / "page.html").exists()
    assert main([*shlex.split(data["next"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"].startswith("2 stages. A step of 2 microbatches under 1F1B ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chunks", "2"], "--what fwd-bwd"),
        (["--what", "fwd-bwd", "--recompute"], "--recompute cannot be combined with"),
        (["--offload", "pcie5"], "--what fwd-bwd"),
        (["--what", "fwd-bwd", "--offload", "pcie5"], "--memory 80GiB"),
        (["--what", "fwd-bwd", "--offload", "pcie5", "--memory", "1GiB", "--host", "x"], "is not a size"),
        (["--what", "fwd-bwd", "--host", "1GiB"], "--host needs --offload"),
    ],
)
def test_options_that_do_not_go_together(words, message, capsys):
    assert main(["sweep", "gpt2", "--stages", "2", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_of_the_frontier_has_no_chunks(capsys):
    assert main(["sweep", "gpt2", "--chunks", "2"]) == 2 and "--chunks needs --stages" in capsys.readouterr().err
