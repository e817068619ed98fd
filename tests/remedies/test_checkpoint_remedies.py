"""Remedies of errors about checkpoints of training on ranks (SK505 to SK512): one rank with all stages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from carried import refusal
from torch import nn

import splitkit as sk
from splitkit.runtime import open_checkpoints, pipeline

X = torch.linspace(-1, 1, 16).view(4, 4)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(width=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
    split = sk.split(sk.capture(model, X[:2]), sk.policies.Stages(2))
    return pipeline(split, "Interleaved1F1B", 2, loss=lambda output, target: (output - target).square().mean())


def adam(pipe, **options):
    return torch.optim.AdamW(pipe.parameters(), lr=0.01, **options)


def trained(folder, pipe=None, optimizer=None, steps=1, resume=False, **others):
    """Train and save, as a run does; returns its weights."""
    pipe = pipe or made()
    optimizer = optimizer or adam(pipe)
    checkpoints = open_checkpoints(folder, pipe, optimizer, resume=resume, keep=9, **others)
    for _ in range(steps):
        pipe.step(X, target=X)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in (value for value in others.values() if hasattr(value, "get_last_lr")):
            scheduler.step()
        checkpoints.save()
    return {name: p.detach().clone() for name, p in pipe.named_parameters().items()}


def resumed(folder, pipe=None, optimizer=None, **others):
    """Resume a run, and return the weights that it has then."""
    return trained(folder, pipe, optimizer, steps=0, resume=True, **others)


def alike(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_of_an_earlier_run(tmp_path):
    weights = trained(tmp_path / "run")
    with refusal(
        "SK512", "Continue that run (--resume, or open_checkpoints(..., resume=True)), or name another folder."
    ):
        trained(tmp_path / "run")
    assert alike(resumed(tmp_path / "run"), weights)
    trained(tmp_path / "another")


def test_checkpoints_of_two_runs_in_a_folder(tmp_path):
    weights = trained(tmp_path / "run", steps=2)
    trained(tmp_path / "another", steps=3)
    shutil.copytree(tmp_path / "another" / "step-3", tmp_path / "run" / "step-3")
    with refusal(
        "SK512",
        "Keep the checkpoints of one run in a folder; move the others away, or remove {...} to continue from {...}.",
    ):
        resumed(tmp_path / "run")
    shutil.move(tmp_path / "run" / "step-3", tmp_path / "away")
    assert alike(resumed(tmp_path / "run"), weights)


def test_a_damaged_checkpoint(tmp_path):
    weights = trained(tmp_path / "run", steps=1)
    pipe = made()
    trained(tmp_path / "run", pipe, resume=True)
    data = next((tmp_path / "run" / "step-2").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with refusal("SK505", "{...}") as error:
        resumed(tmp_path / "run")
    assert "step-2" in str(error.value) and "emove" in error.value.remedy
    shutil.rmtree(tmp_path / "run" / "step-2")
    assert alike(resumed(tmp_path / "run"), weights)
    run = tmp_path / "run" / "run.json"
    kept = run.read_text()
    run.write_text("{")
    with refusal("SK505", "Remove it, or name another folder."):
        resumed(tmp_path / "run")
    run.unlink()
    assert alike(resumed(tmp_path / "run"), weights) and kept


def test_another_model_optimizer_or_scheduler(tmp_path):
    weights = trained(tmp_path / "run")
    with refusal("SK507", "Continue with the model that was trained, or name another folder."):
        resumed(tmp_path / "run", made(8))
    trained(tmp_path / "wider", made(8))
    pipe = made()
    with refusal("SK507", "Create the optimizer as in the run that wrote the checkpoint."):
        resumed(tmp_path / "run", pipe, torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9))
    pipe = made()
    optimizer = adam(pipe)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with refusal("SK507", "Open the folder with the same objects as the run that wrote the checkpoint."):
        resumed(tmp_path / "run", pipe, optimizer, scheduler=scheduler)
    assert alike(resumed(tmp_path / "run"), weights)
    pipe = made()
    optimizer = adam(pipe)
    weights = trained(tmp_path / "scheduled", pipe, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    pipe = made()
    optimizer = adam(pipe)
    with refusal("SK507", "Create the scheduler as in the run that wrote the checkpoint."):
        resumed(
            tmp_path / "scheduled", pipe, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        )
    pipe = made()
    optimizer = adam(pipe)
    again = resumed(tmp_path / "scheduled", pipe, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert alike(again, weights)


def test_state_that_cannot_be_saved(tmp_path):
    pipe = made()
    optimizer = torch.optim.SGD([{"params": list(pipe.parameters()), "shape": torch.ones(3)}], lr=0.01)
    with refusal("SK506", "Keep numbers in the options of parameter groups."):
        trained(tmp_path / "a", pipe, optimizer)
    pipe = made()
    trained(tmp_path / "b", pipe, torch.optim.SGD([{"params": list(pipe.parameters()), "shape": 3}], lr=0.01))


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with refusal("SK504", "Name a folder that you can write to, or free some space."):
        trained(file / "run")
    trained(tmp_path / "run")
    assert re.search(r"step-\d+", " ".join(map(str, Path(tmp_path / "run").iterdir())))
