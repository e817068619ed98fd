"""Remedies of errors about files (SK501-SK510): plans, folders of stages, weights and traces."""

from __future__ import annotations

import io
import json
import math
import pickle
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import safetensors.torch
import torch
from carried import Remedy, refusal
from torch import nn

import splitkit as sk
from splitkit import cli, files
from splitkit.cli.commands import generate, plan_devices, train
from splitkit.engine.graph_data import encode_argument
from splitkit.errors import FileError
from splitkit.pipeline.trace import MeasuredStep
from splitkit.plans.plan_file import fingerprint, read_json
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.runtime import open_stages, save_stages
from splitkit.runtime.folder import checkpoint_folder
from splitkit.runtime.folder.checkpoint_folder import digest_of_file
from splitkit.runtime.folder.optimizer_state import encode_state, require_storable
from splitkit.runtime.folder.tensorfiles import DTYPES, stored_tensors, write_tensors
from splitkit.testing.config_files import read_config

FACTORY = '''"""A model of a user."""
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))), torch.ones(4, 8)


def other():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)


def step():
    model, x = net()
    return nn.Sequential(model, Loss()), x


class Loss(nn.Module):
    def forward(self, x):
        return {"loss": x.square().mean()}
'''
X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FACTORY)


def command(words):
    """Run a command, and return what it printed; raises the error that it printed, as one of the family."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([*shlex.split(words), "--json"])
    found = json.loads(out.getvalue() or err.getvalue())
    if code:
        raise FileError(found["error"]["code"], found["error"]["reason"], found["error"]["remedy"])
    return found


def net(width=8, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(dtype).to(device)


def split(model=None, x=X):
    return sk.split(sk.capture(model or net(), x), Stages(2))


def saved(name, plan=None):
    """A plan file."""
    plan = plan or split().plan
    plan.save(name)
    return plan


def edited(name, **fields):
    """Change fields of a JSON file; with ``None`` they are removed."""
    data = json.loads(Path(name).read_text()) | fields
    Path(name).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def text(name, content):
    Path(name).write_text(content)
    return name


WRITES = [
    Remedy("SK504", "Name another file.", lambda: files.save_text("a\0b", ""), lambda: files.save_text("ab", "")),
    Remedy(
        "SK504",
        "Name a file, such as plan.json.",
        lambda: saved(""),
        lambda: saved("plan.json") and readable("plan.json"),
    ),
    Remedy(
        "SK504",
        "Make it first, or name a file in one that exists.",
        lambda: saved("there/plan.json"),
        (
            lambda: saved("plan.json") and readable("plan.json"),
            lambda: Path("there").mkdir() or (saved("there/plan.json") and readable("there/plan.json")),
        ),
    ),
    Remedy(
        "SK504",
        "Name a file in a folder.",
        lambda: saved("my.py/plan.json"),
        lambda: saved("plan.json") and readable("plan.json"),
    ),
    Remedy(
        "SK504",
        "Name a file that `Plan.save` or `splitkit plan MODEL ... -o FILE` wrote.",
        lambda: read_json("nowhere.json"),
        (
            lambda: saved("plan.json") and readable("plan.json"),
            lambda: command("plan my.py:net --stages 2 -o plan.json") and readable("plan.json"),
        ),
    ),
    Remedy(
        "SK501",
        "Name a file that splitkit wrote.",
        lambda: read_json(text("no.json", "{")),
        lambda: saved("plan.json") and readable("plan.json"),
    ),
    Remedy(
        "SK504",
        "Give the path of a config.json.",
        lambda: read_config("nowhere"),
        lambda: read_config(text("config.json", '{"model_type": "gpt2"}'))["model_type"] == "gpt2",
    ),
    Remedy(
        "SK504",
        "Give a transformers config.json.",
        lambda: read_config(text("config.json", "{}")),
        lambda: read_config(text("config.json", '{"model_type": "gpt2"}'))["model_type"] == "gpt2",
    ),
    Remedy(
        "SK504",
        "Name a file with a request per line.",
        lambda: list(generate._lines("nowhere")),
        lambda: (
            list(generate._lines(text("r.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')))
            == [{"prompt": "a"}, {"prompt": "b"}]
        ),
    ),
    Remedy(
        "SK504",
        "Name a text file that another tool reads.",
        lambda: plan_devices._text("nowhere"),
        lambda: plan_devices._text(text("layout", "Et|tL")) == "Et|tL",
    ),
    Remedy("SK504", "Name a trace.", lambda: MeasuredStep.load("nowhere"), lambda: measured("m.json")),
]


def readable(name):
    return read_json(name)["kind"] == "splitkit plan"


def measured(name, **changed):
    """A trace of a step, in the form in which `splitkit train --trace` writes it."""
    stages = sk.stage_costs((made := split()).flow, made.plan, sk.costs.roofline(made.flow.root, "h100"))
    run = sk.simulate_schedule(stages, "1f1b", 2)
    data = run.to_chrome_trace()
    data["traceEvents"] = [event | changed if event.get("ph") == "X" else event for event in data["traceEvents"]]
    Path(name).write_text(json.dumps(data))
    return MeasuredStep.load(name)


@pytest.mark.parametrize("remedy", WRITES, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_files(remedy):
    remedy.carry_out()


def test_a_file_in_a_folder():
    Path("there").mkdir()
    with refusal("SK504", "Name a file in it, such as {...}.") as caught:
        saved("there")
    name = caught.value.remedy.removeprefix("Name a file in it, such as ").rstrip(".")
    assert saved(name) and readable(name)


def test_where_nobody_may_write(monkeypatch):
    """Permissions do not bind the superuser, who runs the tests here and there."""
    error = PermissionError(13, "Permission denied")
    with refusal("SK504", "Name a file where you may write."):
        raise files.refusal("/usr/plan.json", error)
    assert saved("plan.json") and readable("plan.json")


DAMAGED = [
    ("parts", 3),
    ("parts", None),
    ("places", {"linear": [7]}),
    ("nodes", "linear"),
    ("offloaded", [["a", "b"]]),
    ("routing", "by pigeon"),
]


@pytest.mark.parametrize(("field", "value"), DAMAGED)
def test_damaged_plans(field, value):
    made = split()
    gm = made.flow.root
    saved("plan.json", made.plan)
    edited("plan.json", **{field: value})
    with refusal("SK501", "Plan again."):
        Plan.load("plan.json", gm.graph)
    sk.plan(gm, Stages(2)).save("plan.json")
    assert sk.split(gm, Plan.load("plan.json", gm.graph))(X).equal(gm(X))


def test_files_that_are_no_plans():
    gm = sk.capture(net(), X)
    Path("plan.json").write_text("{}")
    with refusal("SK501", "Write one with plan.save(path) or `splitkit plan -o`."):
        Plan.load("plan.json", gm.graph)
    with refusal("SK501", "Make one with `splitkit plan MODEL ... -o FILE`."):
        command("explain plan.json")
    command("plan my.py:net --stages 2 -o plan.json")
    command("explain plan.json --model my.py:net")
    edited("plan.json", note="\x1b[31m")
    with refusal("SK501", "Plan again."):
        command("explain plan.json --model my.py:net")
    edited("plan.json", note="", model={"spec": 3})
    with refusal("SK501", "Plan again."):
        command("explain plan.json --model my.py:net")
    saved("plan.json", sk.plan(gm, Stages(2)))
    assert sk.split(gm, Plan.load("plan.json", gm.graph))(X).equal(gm(X))


def test_plans_of_another_version():
    gm = sk.capture(net(), X)
    saved("plan.json", sk.plan(gm, Stages(2)))
    edited("plan.json", schema=99)
    with refusal("SK503", "Plan again with this version, or use the version of splitkit that wrote it."):
        Plan.load("plan.json", gm.graph)
    saved("plan.json", sk.plan(gm, Stages(2)))
    assert sk.split(gm, Plan.load("plan.json", gm.graph))(X).equal(gm(X))


def test_plans_of_another_graph():
    dropout = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    gm = sk.capture(dropout.eval(), X)
    saved("plan.json", sk.plan(gm, Stages(2)))
    other = sk.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), X)
    with refusal("SK502", "Capture the model in the same way (same mode and torch version), or plan again."):
        Plan.load("plan.json", other.graph)
    same = sk.capture(dropout.eval(), X)
    assert fingerprint(same.graph) == fingerprint(gm.graph)
    assert sk.split(same, Plan.load("plan.json", same.graph))(X).equal(dropout(X))
    saved("plan.json", sk.plan(other, Stages(2)))
    assert sk.split(other, Plan.load("plan.json", other.graph))(X).equal(other(X))


def test_plans_of_one_kind():
    command("plan my.py:net --stages 2 -o forward.json")
    command("plan my.py:step --what fwd-bwd --memory 90% -o step.json")
    with refusal("SK502", "Compare plans of one kind."):
        command("compare forward.json step.json --model my.py:net")
    command("plan my.py:net --policy RoundRobin(2) -o others.json")
    command("compare forward.json others.json --model my.py:net")


def test_folders_of_commands():
    command("plan my.py:net --stages 2 -o plan.json")

    def parts(folder):
        command(f"split plan.json --model my.py:net -o {folder}")
        return open_stages(folder)

    with refusal("SK504", "Name a folder, such as parts."):
        parts("''")
    assert parts("parts")
    with refusal("SK504", "Name a folder: each part is written to a file in it."):
        parts(text("file.txt", ""))
    with refusal("SK504", "Create it first."):
        parts("far/away")
    Path("far").mkdir()
    assert parts("far/away")


def test_folders_that_cannot_be_written(monkeypatch):
    command("plan my.py:net --stages 2 -o plan.json")

    def full(folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "require_room", full)
        with refusal("SK504", "Name another folder."):
            command("split plan.json --model my.py:net -o parts")
    command("split plan.json --model my.py:net -o parts")


def test_folders_that_lack_a_stage():
    save_stages(split(), "parts", inputs=((X,), {}))
    given = Namespace(
        target="parts", weights=None, check=False, dp=None, schedule="gpipe", microbatches=2, nproc=2, model=None
    )
    shutil.copytree("parts", "copy")
    Path("copy/stage-1.json").unlink()
    given.target = "copy"
    with refusal("SK504", "Copy the whole folder, or split again."):
        train._require_folder(given)
    shutil.copytree("parts", "copy", dirs_exist_ok=True)
    train._require_folder(given)
    save_stages(split(), "copy")
    train._require_folder(given)
    assert runs("copy")


def runs(folder, want=None, **options):
    """Whether all stages of a folder compute what the model computes."""
    held = open_stages(folder, **options)
    held.load(range(len(held.names)))
    return torch.equal(held.module(X), net()(X) if want is None else want)


AGAIN = "Write the folder again: splitkit split PLAN -o FOLDER, or splitkit.runtime.save_stages."


def test_damaged_folders():
    def damaged(file, **fields):
        save_stages(split(), "parts")
        edited(f"parts/{file}", **fields)
        return open_stages("parts")

    with refusal("SK505", "Write the folder again: splitkit split PLAN -o FOLDER, or splitkit.runtime.save_stages."):
        damaged("manifest.json", tensors=None)
    with refusal("SK505", AGAIN):
        damaged("manifest.json", plan={"kind": "splitkit plan"})
    with refusal("SK505", AGAIN):
        damaged("stage-0.json", nodes=[]).load([0])
    save_stages(split(), "parts")
    assert runs("parts")
    command("plan my.py:net --stages 2 -o plan.json")
    command("split plan.json --model my.py:net -o parts --force")
    import runpy

    assert runs("parts", want=runpy.run_path("my.py")["net"]()[0](X))


def test_folders_of_another_version():
    save_stages(split(), "parts")
    edited("parts/manifest.json", schema=99)
    with refusal("SK503", "Split again with this version, or use the version of splitkit that wrote it."):
        open_stages("parts")
    save_stages(split(), "parts")
    assert runs("parts")


def test_inputs_of_a_folder():
    save_stages(split(), "parts")
    with refusal("SK504", "Save it with save_stages(..., inputs=(args, kwargs)), with inputs that are not on meta."):
        open_stages("parts").example()
    save_stages(split(), "parts", inputs=((X,), {}))
    (found,), _ = open_stages("parts").example()
    assert torch.equal(found, X)


class Shares(nn.Module):
    def __init__(self, clone):
        super().__init__()
        flat = torch.rand(12)
        self.a = nn.Parameter(flat[:8])
        self.b = nn.Parameter(flat[4:].clone() if clone else flat[4:])

    def forward(self, x):
        return x * self.a + x * self.b


def test_what_stages_hold():
    traced = torch.fx.symbolic_trace(net())
    with refusal("SK506", "Capture the model with splitkit.capture(model, ...), by torch.export."):
        save_stages(sk.split(traced, {"_0": 0, "_1": 0, "_2": 1}), "parts")
    save_stages(split(), "parts")
    assert runs("parts")
    with refusal("SK506", "Clone one of them."):
        save_stages(split(Shares(clone=False)), "parts")
    cloned = Shares(clone=True)
    save_stages(split(cloned), "parts")
    assert runs("parts", want=cloned(X))
    with refusal("SK506", "Give the model constants that are numbers, strings, dtypes, devices or tensors."):
        encode_argument(object(), "node x")
    for value in (3, 2.5, "text", torch.float32, torch.device("cpu")):
        json.dumps(encode_argument(value, "node x"))
    with refusal("SK506", "They hold strided tensors of {...}.") as caught:
        write_tensors(Path("w.safetensors"), {"w": torch.ones(2, dtype=torch.complex32)})
    names = caught.value.remedy.removeprefix("They hold strided tensors of ").rstrip(".").split(", ")
    assert {*names} == {str(d).removeprefix("torch.") for d in DTYPES.values()}
    write_tensors(Path("w.safetensors"), {name: torch.zeros(2).to(getattr(torch, name)) for name in names})
    assert stored_tensors(Path("w.safetensors")).keys() == {*names}


def test_tensors_of_classes():
    class Mine(torch.Tensor):
        pass

    made = split()
    part = next(m for m in made.module.modules() if any(True for _ in m.parameters(recurse=False)))
    name, weight = next(part.named_parameters(recurse=False))
    part._parameters[name] = weight.detach().as_subclass(Mine)
    with refusal("SK506", "Split a model of plain tensors."):
        save_stages(made, "parts")
    save_stages(split(), "parts")
    assert runs("parts")


def test_what_checkpoints_hold():
    with refusal(
        "SK506",
        "Keep numbers, strings, tensors, and lists, tuples or dicts of these; the state_dict of an object is one.",
    ):
        encode_state(object(), "loader", {})
    optimizer = torch.optim.SGD([nn.Parameter(X)], momentum=0.5)
    for value in (1, "a", X, [1], (1, "a"), {"a": X}, optimizer.state_dict()):
        json.dumps(encode_state(value, "loader", {}))
    with refusal("SK506", "Use plain dense tensors, and load the weights first."):
        require_storable("w", X.to_sparse())
    require_storable("w", X.to_sparse().to_dense())
    with refusal("SK506", "Use plain dense tensors, and load the weights first."):
        require_storable("w", X.to("meta"))
    require_storable("w", nn.Parameter(X))


def weights(model=None, **changed):
    """A file with weights of the model; with ``None`` a name is left out."""
    state = {**(model or net()).state_dict(), **changed}
    write_tensors(Path("model.safetensors"), {n: t for n, t in state.items() if t is not None})
    return "model.safetensors"


def loaded(file, want=None, dtype=None, model=None, x=X):
    """Whether a split of a model on ``meta`` computes with these weights what the model computes."""
    made = sk.load(split(model or net(device="meta"), x), file, "cpu", dtype=dtype)
    return torch.equal(made(x), net()(x) if want is None else want)


def pickled():
    torch.save(net().state_dict(), "model.pt")
    return "model.pt"


def rewritten():
    """The remedy as written, with the names of the files."""
    call = "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
    names = {"FILE": pickled(), "NEW": "new.safetensors", "safetensors": safetensors, "torch": torch}
    exec(call, names)
    return "new.safetensors"


WEIGHTS = [
    Remedy(
        "SK504",
        "Write the tensors again: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW).",
        lambda: loaded(pickled()),
        lambda: loaded(rewritten()),
    ),
    Remedy(
        "SK504",
        "Name a folder with {...}, {...} or a checkpoint of torch.distributed.checkpoint.",
        lambda: loaded("."),
        (lambda: weights() and loaded("."), lambda: loaded(distributed("dcp"))),
    ),
    Remedy(
        "SK507",
        "Name the weights of the model that was split.",
        lambda: loaded(weights(**{"0.weight": None})),
        lambda: loaded(weights()),
    ),
    Remedy(
        "SK507",
        "Name the weights of the model that was split.",
        lambda: loaded(weights(**{"0.weight": torch.ones(3, 3)})),
        lambda: loaded(weights()),
    ),
    Remedy(
        "SK507",
        "Name the weights of the model that was split.",
        lambda: loaded(weights(**{"0.bias": torch.ones(8, dtype=torch.int32)})),
        lambda: loaded(weights()),
    ),
    Remedy(
        "SK507",
        "Capture the model in {...}, or convert the weights: dtype={...}.",
        lambda: loaded(weights(net(dtype=torch.bfloat16))),
        (
            lambda: loaded(
                weights(net(dtype=torch.bfloat16)),
                net(dtype=torch.bfloat16)(X.bfloat16()),
                model=net(dtype=torch.bfloat16, device="meta"),
                x=X.bfloat16(),
            ),
            lambda: loaded(weights(net(dtype=torch.bfloat16)), net(dtype=torch.bfloat16).float()(X), torch.float32),
        ),
    ),
    Remedy(
        "SK507",
        "Capture the model in {...}.",
        lambda: loaded(distributed("dcp", net(dtype=torch.bfloat16))),
        lambda: loaded(
            distributed("other", net(dtype=torch.bfloat16)),
            net(dtype=torch.bfloat16)(X.bfloat16()),
            model=net(dtype=torch.bfloat16, device="meta"),
            x=X.bfloat16(),
        ),
    ),
    Remedy(
        "SK507",
        "Capture model.to({...}).",
        lambda: loaded(weights(), dtype=torch.bfloat16),
        lambda: loaded(
            weights(),
            net().bfloat16()(X.bfloat16()),
            torch.bfloat16,
            model=net(device="meta").to(torch.bfloat16),
            x=X.bfloat16(),
        ),
    ),
    Remedy(
        "SK507",
        "Capture the model of this checkpoint, or leave these tensors out of the files.",
        lambda: loaded(weights(extra=X)),
        (lambda: loaded(weights(WithExtra()), model=WithExtra("meta")), lambda: loaded(weights())),
    ),
    Remedy(
        "SK507",
        "Give the model its value as a buffer (register_buffer) that is not on meta when you capture it.",
        lambda: loaded(weights(Scaled()), model=Scaled("meta", values=False)),
        lambda: loaded(weights(Scaled()), Scaled()(X), model=Scaled("meta")),
    ),
    Remedy(
        "SK507",
        "Split a model in which the two are not tied (tie_word_embeddings=False).",
        lambda: loaded(weights(Tied(False)), model=Tied(True, "meta")),
        lambda: loaded(weights(Tied(False)), Tied(False)(X), model=Tied(False, "meta")),
    ),
]


def distributed(folder, model=None):
    """A checkpoint of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    dcp.save((model or net()).state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def tokenizer(folder):
    """Write a tokenizer of three words, and return it as the command reads it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return generate._tokenizer(Namespace(tokenizer=folder))


def test_tokenizers():
    Path("empty").mkdir()
    with refusal("SK504", "Give a folder with a tokenizer."):
        generate._tokenizer(Namespace(tokenizer="empty"))
    encode, decode = tokenizer("checkpoint")
    assert encode("b") == [1] and decode([1]) == "b"


class WithExtra(nn.Sequential):
    def __init__(self, device="cpu"):
        super().__init__(*net(device=device))
        self.register_buffer("extra", X.to(device))


class Scaled(nn.Module):
    """A scale that is in no state dict, with its values or without."""

    def __init__(self, device="cpu", values=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8).to(device)
        self.register_buffer("scale", torch.arange(8.0, device="cpu" if values else device), persistent=False)

    def forward(self, x):
        return self.inner(x * self.scale)


class Tied(nn.Module):
    def __init__(self, tied, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("remedy", WEIGHTS, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_weights(remedy):
    remedy.carry_out()


def test_weights_of_stages_on_disk():
    save_stages(split(net(device="meta")), "parts")
    with refusal("SK507", "Name the weights of the model that was split, or leave these tensors out of the files."):
        runs("parts", weights=weights(extra=X))
    assert runs("parts", weights=weights())


def test_ops_and_classes_of_other_processes():
    save_stages(split(), "parts")
    with refusal("SK508", "Import {...} first, which must register it with torch's pytree."):
        manifest = json.loads(Path("parts/manifest.json").read_text())
        spec = {"kind": "class", "class": "nowhere:Out", "context": None, "children": ["leaf"]}
        manifest["parent"]["signature"]["out_spec"] = spec
        Path("parts/manifest.json").write_text(json.dumps(manifest))
        digests = json.loads(Path("parts/digests.json").read_text())
        digests["manifest.json"] = digest_of_file(Path("parts/manifest.json"))
        Path("parts/digests.json").write_text(json.dumps(digests))
        runs("parts")


def test_pickles_of_ops_of_other_processes():
    def package():
        library = torch.library.Library("splitkit_remedies_pickled", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        return library

    imported, graph = package(), torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.splitkit_remedies_pickled.twice.default, (graph.placeholder("x"),)))
    data = pickle.dumps(sk.split(torch.fx.GraphModule(nn.Module(), graph), lambda node: 0).module)
    imported._destroy()
    with refusal("SK508", "Import the package that defines it before the pickle is loaded."):
        pickle.loads(data)
    imported = package()
    assert torch.equal(pickle.loads(data)(X), X * 2)
    imported._destroy()


def test_a_file_that_a_disk_does_not_read(monkeypatch):
    save_stages(split(), "parts")
    command("plan my.py:net --stages 2 -o plan.json")
    broken = set()

    def identity(path):
        found = Path(path).stat()
        return found.st_ino, found.st_ctime_ns

    def failing(path):
        if identity(path) in broken:
            raise OSError(5, "Input/output error")
        return digest_of_file(path)

    monkeypatch.setattr(checkpoint_folder, "digest_of_file", failing)
    for again in (
        lambda: save_stages(split(), "parts"),
        lambda: command("split plan.json --model my.py:net -o parts --force"),
    ):
        broken.add(identity("parts/stage-0.json"))
        with refusal(
            "SK504", "Write the folder again: splitkit split PLAN -o FOLDER, or splitkit.runtime.save_stages."
        ):
            open_stages("parts").load([0])
        again()
        held = open_stages("parts")
        held.load([0, 1])
        assert held.module(X).shape == X.shape


def test_a_folder_in_the_place_of_a_file():
    Path("parts/stage-0.json").mkdir(parents=True)
    for name in ("parts", "my.py"):
        with refusal("SK504", "Name another folder."):
            save_stages(split(), name)
    save_stages(split(), "others")
    assert runs("others")


def test_one_of_several_weights():
    other = {name: tensor + 1 for name, tensor in net().state_dict().items()}
    for name, state in (("model.fp16", net().state_dict()), ("model.bf16", other)):
        write_tensors(Path(f"{name}.safetensors"), dict(state))
    with refusal("SK504", "Name one: {...}.") as error:
        loaded(".")
    changed = net()
    changed.load_state_dict(other)
    named = error.value.remedy.removeprefix("Name one: ").removesuffix(".")
    assert loaded(named, changed(X)) and loaded("model.fp16.safetensors")


def test_weights_that_transformers_converts_in_a_way_unknown_here(monkeypatch):
    """As if the experts of Mixtral were transposed, too."""
    transformers = pytest.importorskip("transformers")
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, vocab_size=32, num_key_value_heads=2, num_local_experts=2, experts_implementation="batched_mm"
    )
    model = transformers.MixtralForCausalLM(config).eval()
    with torch.device("meta"):
        empty = transformers.MixtralForCausalLM(config).eval()
    given = {"input_ids": torch.arange(8)[None], "use_cache": False}
    made = sk.split(sk.capture(empty, **given), Stages(2))
    model.save_pretrained("theirs")
    steps = conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    steps[-1].operations.append(Transpose())
    with monkeypatch.context() as patch:
        patch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", lambda kind: steps)
        with refusal(
            "SK507",
            "Load it with transformers, and save the model with save_pretrained(folder, save_original_format=False).",
        ):
            sk.load(made, "theirs", "cpu")
    transformers.MixtralForCausalLM.from_pretrained("theirs").save_pretrained("ours", save_original_format=False)
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", lambda kind: steps)
    with torch.no_grad():
        torch.testing.assert_close(sk.load(made, "ours", "cpu")(**given).logits, model(**given).logits)


TRACE = (
    "Write one: splitkit train PLAN.json --nproc N --trace FILE, or "
    "splitkit profile PLAN.json --ranks N --schedules 1f1b --trace FILE."
)


def test_what_is_no_trace_of_a_step():
    for content in ("{", "{}", '{"traceEvents": []}'):
        Path("no.json").write_text(content)
        with refusal(
            "SK510",
            "Write one: splitkit train PLAN.json --nproc N --trace FILE, or "
            "splitkit profile PLAN.json --ranks N --schedules 1f1b --trace FILE.",
        ):
            MeasuredStep.load("no.json")
    for field, value in (("pid", -1), ("ts", math.inf), ("dur", "long")):
        with refusal("SK510", TRACE):
            measured("no.json", **{field: value})


@pytest.mark.campaign
def test_traces_of_steps_that_ran():
    for words in (
        "plan my.py:step --stages 2 -o plan.json",
        "train plan.json --model my.py:step --nproc 2 --steps 3 --trace train.json",
        "profile plan.json --model my.py:step --ranks 2 --schedules 1f1b --trace profile.json",
    ):
        done = subprocess.run([sys.executable, "-m", "splitkit", *words.split()], capture_output=True, text=True)
        assert not done.returncode, done.stderr
    for name in ("train.json", "profile.json"):
        assert MeasuredStep.load(name).timeline
