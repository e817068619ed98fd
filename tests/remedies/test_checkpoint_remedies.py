"""Remedies of errors about checkpoints of training on ranks (SK505 to SK512): one rank with all stages."""

from __future__ import annotations

import json
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
from splitkit.runtime.folder.checkpoint_folder import digest_of_file
from splitkit.runtime.folder.checkpoint_weights import Weights

X = torch.linspace(-1, 1, 16).view(4, 4)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(width=4, counted=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
    if counted is not None:
        model.insert(1, Counts(counted))
    split = sk.split(sk.capture(model, X[:2]), sk.policies.Stages(2))
    return pipeline(split, "Interleaved1F1B", 2, loss=lambda output, target: (output - target).square().mean())


class Counts(nn.Module):
    """Counts calls in a buffer of so many elements."""

    def __init__(self, elements):
        super().__init__()
        self.register_buffer("count", torch.zeros(elements))

    def forward(self, x):
        self.count.add_(1)
        return x


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
    shutil.copytree(tmp_path / "run" / "step-2", tmp_path / "damaged" / "step-2")
    with refusal("SK505", "Copy it again from where it was written, or begin anew in another folder."):
        resumed(tmp_path / "damaged")
    with refusal("SK505", "Remove {...} to resume from {...}, or copy it again from where it was written.") as error:
        resumed(tmp_path / "run")
    damaged, good = re.fullmatch(r"Remove (\S+) to resume from (\S+), or copy it .*", error.value.remedy).groups()
    assert Path(good) == tmp_path / "run" / "step-1"
    shutil.rmtree(damaged)
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


def test_checkpoints_of_another_version(tmp_path):
    weights = trained(tmp_path / "run")
    place = tmp_path / "run" / "step-1"
    for file, fields in (("checkpoint.json", {"schema": 99}), ("digests.json", None)):
        data = json.loads((place / file).read_text())
        data |= fields or {"checkpoint.json": digest_of_file(place / "checkpoint.json")}
        (place / file).write_text(json.dumps(data))
    with refusal("SK503", "Use the version of splitkit that wrote it, or begin anew in another folder."):
        resumed(tmp_path / "run")
    assert alike(trained(tmp_path / "another"), weights)


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    free = {"full": 10}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=free.get(Path(place).name, usage.free)))
    with refusal("SK504", "Free some space, or name a folder on another disk."):
        trained(tmp_path / "full")
    weights = trained(tmp_path / "empty")
    free["full"] = 2**20
    assert alike(trained(tmp_path / "full"), weights)


def test_a_folder_that_is_not_left_in_place(tmp_path):
    pipe = made()
    checkpoints = open_checkpoints(tmp_path / "run", pipe, adam(pipe))
    shutil.move(tmp_path / "run", tmp_path / "away")
    (tmp_path / "run").mkdir()
    with refusal("SK504", "Name a folder that all ranks share, and leave it in place."):
        checkpoints.save()
    weights = trained(tmp_path / "left")
    assert alike(resumed(tmp_path / "left"), weights)


def test_two_runs_in_one_folder(tmp_path):
    pipe = made()
    checkpoints = open_checkpoints(tmp_path / "run", pipe, adam(pipe))
    trained(tmp_path / "run", resume=True)
    with refusal("SK512", "Use one folder for each run."):
        checkpoints.save()
    one, other = trained(tmp_path / "one"), trained(tmp_path / "other", steps=2)
    assert alike(resumed(tmp_path / "one"), one) and alike(resumed(tmp_path / "other"), other)


def test_buffers_of_another_model(tmp_path):
    weights = trained(tmp_path / "run", made(counted=1))
    trained(tmp_path / "wider", pipe := made(counted=2))
    with refusal("SK507", "Name a checkpoint of the same model and optimizer."):
        resumed(tmp_path / "run", made(counted=2))
    assert alike(resumed(tmp_path / "run", made(counted=1)), weights)
    again = made(counted=2)
    resumed(tmp_path / "wider", again)
    assert alike(again.named_tensors(), pipe.named_tensors())


def test_what_is_written_of_a_file_that_is_a_folder(tmp_path):
    weights = trained(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    data = next((tmp_path / "run" / "step-1").glob("*.distcp"))
    data.unlink()
    data.mkdir()
    with refusal("SK504", "Copy it again from where it was written, or begin anew in another folder."):
        resumed(tmp_path / "run")
    assert alike(trained(tmp_path / "anew"), weights)
    shutil.copytree(tmp_path / "run" / "step-1", tmp_path / "two" / "step-2")
    shutil.copytree(tmp_path / "kept" / "step-1", tmp_path / "two" / "step-1")
    with refusal("SK504", "Remove {...} to resume from {...}, or copy it again from where it was written.") as error:
        resumed(tmp_path / "two")
    shutil.rmtree(error.value.remedy.split()[1])
    assert alike(resumed(tmp_path / "two"), weights)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "kept", tmp_path / "run")
    assert alike(resumed(tmp_path / "run"), weights)


class Batches:
    """A loader that tells and takes its position, as torchdata's does."""

    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("name", ["loader", "scheduler"])
def test_objects_without_a_state(tmp_path, name):
    with refusal("SK506", "Leave it out, or use one that has, such as {...}.") as error:
        trained(tmp_path / "a", **{name: iter([X])})
    weights = trained(tmp_path / "a")
    if name == "loader":
        assert "torchdata" in error.value.remedy
        found, loader = Batches(), Batches()
        loader.position = 3
        assert alike(trained(tmp_path / "b", loader=loader), weights)
        resumed(tmp_path / "b", loader=found)
        assert found.position == 3
        return
    kinds = error.value.remedy.removesuffix(".").rpartition("one of ")[2]
    assert kinds == "torch.optim.lr_scheduler"
    rates = []
    for resume in (False, True):
        optimizer = adam(pipe := made())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        (resumed if resume else trained)(tmp_path / "b", pipe, optimizer, scheduler=scheduler)
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] != [0.01]


def read(place):
    """The first weight of a checkpoint."""
    found = torch.zeros(4, 4)
    Weights.at(place).read([(["0.weight"], found)])
    return found


def test_a_description_that_is_damaged(tmp_path):
    """A checkpoint that torch or a user's script wrote has no digests."""
    for name in ("one", "other"):
        weight = trained(tmp_path / name)["0.weight"]
        (tmp_path / name / "step-1" / "digests.json").unlink()
    (tmp_path / "one" / "step-1" / ".metadata").write_bytes(b"odd")
    with refusal("SK504", "Name another checkpoint."):
        read(tmp_path / "one" / "step-1")
    assert torch.equal(read(tmp_path / "other" / "step-1"), weight)


def test_a_checkpoint_whose_copy_is_damaged(tmp_path):
    weight = trained(tmp_path / "run")["0.weight"]
    written = tmp_path / "run" / "step-1"
    data = next(written.glob("*.distcp")).name
    for damage, code in (("flip", "SK505"), ("folder", "SK504")):
        shutil.copytree(written, copied := tmp_path / damage)
        if damage == "flip":
            content = bytearray((copied / data).read_bytes())
            content[-1] ^= 1
            (copied / data).write_bytes(content)
        else:
            (copied / data).unlink()
            (copied / data).mkdir()
        if code == "SK505":
            with refusal("SK505", "Copy the folder again from where it was written, or write it again."):
                read(copied)
        else:
            with refusal("SK504", "Copy the folder again from where it was written, or write it again."):
                read(copied)
        shutil.rmtree(copied)
        shutil.copytree(written, copied)
        assert torch.equal(read(copied), weight)
        shutil.rmtree(copied)
        trained(copied)
        assert torch.equal(read(copied / "step-1"), weight)
