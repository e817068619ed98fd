"""Stages on disk: whole again when they are read, refused by file and field when damaged, and never code."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

import splitkit as sk
from splitkit.errors import FileError, SplitError
from splitkit.runtime import open_stages, pipeline, save_stages
from splitkit.runtime.folder.checkpoint_folder import digest_of_file
from splitkit.runtime.ranks.stage_chain import chain_of

HERE = Path(__file__).parent


class Net(nn.Module):
    """A tie, a buffer that is written, one that no state has, a constant, autocast, no_grad, channels last, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        with torch.no_grad():
            self.conv.weight.data = torch.randn(2, 1, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("unsaved", torch.rand(4), persistent=False)

    def forward(self, index, *, scale):
        x = skip = self.first(index)
        with torch.no_grad():
            shift = self.unsaved * 2
        with torch.autocast("cpu", torch.bfloat16):
            x = nn.functional.dropout(x, 0.5) @ x.t()
        x = self.conv(x.float()[None, None]).sum((0, 1)) @ skip + shift + torch.tensor([1.0, 2, 3, 4])
        return {"out": (self.last(self.norm(x)) * scale, None)}


def inputs():
    return {"index": torch.arange(6) % 8, "scale": 0.5}


@pytest.fixture(scope="module")
def split():
    torch.manual_seed(0)
    gm = sk.capture(Net(), **inputs())
    nodes = sk.analyze(gm).nodes
    return sk.split(gm, {n: min(3 * i // len(nodes), 2) for i, n in enumerate(nodes)})


@pytest.fixture
def folder(split, tmp_path):
    save_stages(split, tmp_path, inputs=((), inputs()))
    return tmp_path


def train(module, args, kwargs):
    torch.manual_seed(1)
    (out, none) = module(*args, **kwargs)["out"]
    out.square().sum().backward()
    assert none is None
    return out.detach()


def test_what_was_saved_is_what_is_loaded(split, folder):
    held = open_stages(folder)
    assert not held.parts and not held.tensors
    held.load(range(3))
    before = {name: t.clone() for name, t in split.flow.root.state_dict().items()}
    found = train(held.module, *held.example())
    assert torch.equal(found, train(split.module, (), inputs()))
    own, whole = dict(held.module.named_parameters()), dict(split.module.named_parameters())
    assert own.keys() == whole.keys() and held.shared == split.shared != ()
    for name, parameter in own.items():
        assert torch.equal(parameter.grad, whole[name].grad) and parameter.stride() == whole[name].stride()
    assert held.module.state_dict().keys() == {n for n in split.module.state_dict() if "lifted" not in n}
    for name, tensor in held.module.state_dict().items():
        assert torch.equal(tensor, split.module.state_dict()[name])
    split.flow.root.load_state_dict(before)
    split.flow.root.zero_grad()


def test_the_manifest_knows_what_the_chain_knows(split, folder):
    mine, theirs = open_stages(folder).chain.facts, chain_of(split).facts
    assert (mine.draws, mine.writes, mine.identity) == (theirs.draws, theirs.writes, theirs.identity)
    assert any(mine.draws) and mine.writes and mine.inputs.keys() == theirs.inputs.keys()
    assert mine.values and {name: repr(theirs.values[name]) for name in mine.values} == {
        name: repr(value) for name, value in mine.values.items()
    }


def test_a_shared_weight_is_one_object_on_a_rank_and_in_one_file(folder):
    held = open_stages(folder)
    held.load([0])
    held.load([0, 2])
    (names,) = held.shared
    assert len({id(held.module.get_parameter(name)) for name in names}) == 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"].values()).count("stage-2.safetensors") == len(
        {*json.loads((folder / "stage-2.json").read_text())["tensors"]} - {"first.weight", "last.weight"}
    )


def test_files_are_those_of_the_safetensors_library(folder):
    library = pytest.importorskip("safetensors.torch")
    held = open_stages(folder)
    held.load([1])
    found = library.load_file(folder / "stage-1.safetensors")
    assert found and all(torch.equal(t, held.module.submod_1.get_buffer(n)) for n, t in found.items() if "uns" in n)


def weights_of(split):
    """A state of the model with other numbers, without the second name of the tie, as Hugging Face saves it."""
    state = {name: torch.rand(t.shape).to(t.dtype) for name, t in split.flow.root.state_dict().items()}
    return {name: t for name, t in state.items() if name != "last.weight" and "lifted" not in name}


@pytest.mark.parametrize("kind", ["single", "sharded", "checkpoint"])
def test_weights_come_by_name(split, folder, tmp_path, kind):
    state, place = weights_of(split), tmp_path / "weights"
    place.mkdir()
    if kind == "checkpoint":
        checkpoint.save({f"model.{n}": t for n, t in state.items()}, checkpoint_id=place, no_dist=True)
    else:
        library = pytest.importorskip("safetensors.torch")
        shards = [dict(list(state.items())[i::2]) for i in range(2)] if kind == "sharded" else [state]
        names = ["a.safetensors", "b.safetensors"] if kind == "sharded" else ["model.safetensors"]
        for shard, name in zip(shards, names, strict=True):
            library.save_file(shard, place / name)
        if kind == "sharded":
            table = {n: name for shard, name in zip(shards, names, strict=True) for n in shard}
            (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    held = open_stages(folder, place)
    held.load(range(3))
    loaded = {held.qualified_names[name]: t for name, t in held.module.state_dict().items()}
    assert torch.equal(loaded.pop("first.weight", loaded.pop("last.weight", None)), state["first.weight"])
    assert loaded.keys() == state.keys() - {"first.weight"}
    assert all(torch.equal(t, state[name]) for name, t in loaded.items())
    unsaved = [b for n, b in held.module.named_buffers() if n.endswith("unsaved")]
    assert unsaved and all(torch.equal(b, split.flow.root.unsaved) for b in unsaved)


@pytest.mark.parametrize("flaw", ["lacks", "shape", "dtype"])
def test_weights_of_another_model_are_refused_by_name(split, folder, tmp_path, flaw):
    library = pytest.importorskip("safetensors.torch")
    state = weights_of(split)
    weight = state.pop("conv.weight")
    if flaw != "lacks":
        state["conv.weight"] = weight[:1] if flaw == "shape" else weight.double()
    library.save_file(state, tmp_path / "model.safetensors")
    held = open_stages(folder, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"SK507.*conv\.weight"):
        held.load(range(3))


def test_a_model_on_meta_is_saved_without_weights(tmp_path, split, folder):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.b(self.a(x))

    gm = sk.capture(Small().to("meta"), torch.empty(2, 3, device="meta"))
    save_stages(sk.split(gm, {"linear": 0, "linear_1": 1}), tmp_path / "meta")
    with pytest.raises(FileError, match=r"SK507.*a\.weight"):
        open_stages(tmp_path / "meta").load([0])
    library, real = pytest.importorskip("safetensors.torch"), Small()
    library.save_file(real.state_dict(), tmp_path / "model.safetensors")
    held = open_stages(tmp_path / "meta", tmp_path / "model.safetensors")
    held.load([0, 1])
    x = torch.randn(2, 3)
    assert torch.equal(held.module(x), real(x))


def edited(file, path, value):
    data = json.loads(file.read_text())
    *way, last = path
    at = data
    for step in way:
        at = at[step]
    at[last] = value
    file.write_text(json.dumps(data))
    forge(file)


def forge(file):
    """Give a file that was edited the digest that it would have if it had been written so."""
    place = file.parent / "digests.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {file.name: digest_of_file(file)}))


FLAWS = [
    ("manifest.json", ["schema"], 99, "SK503", "schema 99"),
    ("manifest.json", ["kind"], "plan", "SK505", "kind is 'plan'"),
    ("manifest.json", ["facts", "values"], {}, "SK505", "facts"),
    ("manifest.json", ["facts", "draws"], [1], "SK505", r"facts\.draws\[0\] is 1"),
    ("manifest.json", ["stages", 0, "part"], 7, "SK505", r"stages\[0\]\.part is 7"),
    ("manifest.json", ["stages", 0, "file"], "../stage-0.json", "SK505", r"stages\[0\]\.file"),
    ("manifest.json", ["tensors", 0, "dtype"], "load", "SK505", r"tensors\[0\]\.dtype is 'load'"),
    ("manifest.json", ["plan", "parts"], 3, "SK505", "parts is 3"),
    ("stage-0.json", ["nodes", 0, "op"], "call_method", "SK505", r"stage-0\.json .* nodes\[0\]\.op"),
    ("stage-0.json", ["nodes", 0, "name"], "x): import os #", "SK505", r"nodes\[0\]\.name"),
    ("stage-0.json", ["nodes", 0, "args"], [{"node": "later"}], "SK505", r"nodes\[0\]\.args\[0\]\.node"),
    ("stage-0.json", ["nodes", -1, "args"], [{"call": "x"}], "SK505", r"args\[0\] is"),
    ("stage-0.json", ["tensors"], {"a.b": 999}, "SK505", r"tensors\.a\.b is 999"),
    ("stage-0.json", ["tensors"], {"__class__": 0}, "SK505", "__class__"),
    ("stage-0.json", ["tensors"], {'a"]) or x': 0}, "SK505", "dotted name"),
    ("stage-0.json", ["ops"], {"op.aten.linear.default": "linear(Tensor x) -> Tensor"}, "SK508", "here it is"),
    ("stage-0.json", ["ops"], {}, "SK505", "one of the ops of this file"),
    ("stage-0.json", ["ops"], {"op.mine.op.default": ""}, "SK508", "op.mine.op.default"),
]


@pytest.mark.parametrize(
    ("file", "path", "value", "code", "says"), FLAWS, ids=[f"{f}-{p}-{v}" for f, p, v, *_ in FLAWS]
)
def test_a_damaged_folder_is_refused_by_file_and_field(folder, file, path, value, code, says):
    edited(folder / file, path, value)
    with pytest.raises(FileError, match=says) as error:
        open_stages(folder).load(range(3))
    assert error.value.code == code and error.value.remedy and file in str(error.value)


CODE = [
    ("call_function", "os.system", [{"dict": []}]),
    ("call_function", "op.aten.from_file.default", ["/etc/passwd"]),
    ("call_function", "op.aten.save.default", [1, "canary"]),
    ("call_function", "op.load_library.__call__.default", ["canary"]),
    ("call_function", "higher_order.__class__", []),
    ("call_function", "builtins.eval", ["1"]),
    ("get_attr", "forward.__globals__", []),
    ("get_attr", "__class__", []),
    ("call_module", "conv", []),
]


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    split = sk.split(sk.capture(model, torch.randn(2, 4), dynamic=True), {"linear": 0, "tanh": 1, "linear_1": 1})
    folder = tmp_path_factory.mktemp("sized") / "stages"
    save_stages(split, folder)
    return split, folder


def test_symbolic_sizes_are_read_as_they_were_written(sized):
    written, read = chain_of(sized[0]).facts, open_stages(sized[1]).chain.facts
    assert read.sizes == written.sizes and list(read.sizes.inputs) == ["input"] and read.sizes.captured
    assert read.values["submod_0"].shape == written.values["submod_0"].shape != ()


SIZES = [
    (["facts", "sizes", "inputs", "input"], [["os.system", 1], 4], r"inputs\.input\[0\]"),
    (["facts", "sizes", "inputs", "input"], ["s999", 4], r"inputs\.input\[0\]"),
    (["facts", "sizes", "inputs", "input"], [[], 4], r"inputs\.input\[0\]"),
    (["facts", "sizes", "captured"], {"s1": -1}, r"captured\.s1"),
    (["facts", "sizes", "ranges"], {"s1": [2]}, r"ranges\.s1"),
    (["facts", "sizes", "guards"], [None], r"guards\[0\]"),
    (["facts", "values", "submod_0", "shape"], [2], r"values\.submod_0\.shape"),
]


@pytest.mark.parametrize(("path", "value", "says"), SIZES, ids=[f"{p[-1]}-{v}" for p, v, _ in SIZES])
def test_damaged_sizes_are_refused_by_field(sized, tmp_path, path, value, says):
    folder = tmp_path / "stages"
    shutil.copytree(sized[1], folder)
    edited(folder / "manifest.json", path, value)
    with pytest.raises(FileError, match=rf"SK505: manifest\.json is damaged: .*{says}"):
        _ = open_stages(folder).chain


@pytest.mark.parametrize(("op", "target", "args"), CODE, ids=[target for _, target, _ in CODE])
def test_a_folder_cannot_name_code(folder, op, target, args):
    nodes = json.loads((folder / "stage-0.json").read_text())["nodes"]
    bad = {"op": op, "name": "bad", "target": target, "args": args, "kwargs": {}}
    edited(folder / "stage-0.json", ["nodes"], [*nodes[:-1], bad, nodes[-1]])
    with pytest.raises(FileError, match=r"SK50[58]"):
        open_stages(folder).load([0])


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_a_file_of_weights_that_was_cut_off_is_refused(folder, cut):
    file = folder / "stage-0.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    forge(file)
    with pytest.raises(FileError, match=r"SK505: stage-0\.safetensors is damaged"):
        open_stages(folder).load([0])


def flipped(file):
    """Flip a bit in the last byte of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)


def stages_of_another_run(split, folder):
    with torch.no_grad():
        for parameter in split.flow.root.parameters():
            parameter.add_(1)
        save_stages(split, folder, inputs=((), inputs()))
        for parameter in split.flow.root.parameters():
            parameter.sub_(1)
    return folder


DAMAGE = {
    "a flipped bit in each": lambda folder, other, name: flipped(folder / name),
    "a file of another run": lambda folder, other, name: shutil.copy(other / name, folder),
    "a missing file": lambda folder, other, name: (folder / name).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damaged_file_is_refused_before_anything_is_loaded(split, folder, tmp_path_factory, damage):
    """Weights with a flipped bit, and those of another run, were loaded without a word."""
    other = stages_of_another_run(split, tmp_path_factory.mktemp("other"))
    for file in sorted(folder.iterdir()):
        here = tmp_path_factory.mktemp("damaged") / "stages"
        shutil.copytree(folder, here)
        DAMAGE[damage](here, other, file.name)
        same = (here / file.name).exists() and (here / file.name).read_bytes() == file.read_bytes()
        with nullcontext() if same else pytest.raises(FileError, match=f"SK50[45].*{re.escape(file.name)}"):
            held = open_stages(here)
            held.load(range(3))
            held.example()
        if not same and file.name == "stage-1.safetensors":
            assert not held.parts and not held.tensors
            shutil.copy(folder / file.name, here)  # the remedy
            held.load(range(3))
            assert len(held.parts) == 3


def test_load_refuses_a_damaged_folder_of_stages_and_a_damaged_checkpoint(sized, tmp_path):
    split, stages = sized
    folder = tmp_path / "stages"
    shutil.copytree(stages, folder)
    sk.load(split, folder, "cpu")
    flipped(folder / "stage-1.safetensors")
    with pytest.raises(FileError, match=r"SK505: .*stage-1\.safetensors is damaged, or a file of another folder"):
        sk.load(split, folder, "cpu")
    step = tmp_path / "step-1"
    checkpoint.save(
        {f"model.{n}": t for n, t in split.flow.root.state_dict().items()}, checkpoint_id=step, no_dist=True
    )
    (step / "digests.json").write_text(json.dumps({file.name: digest_of_file(file) for file in step.iterdir()}))
    open_stages(stages, step).load([0, 1])
    for name in ("__0_0.distcp", ".metadata"):
        flipped(step / name)
        with pytest.raises(FileError, match=rf"SK505: .*{name} is damaged"):
            open_stages(stages, step).load([0, 1])
        flipped(step / name)


def test_a_class_of_outputs_that_is_not_there_is_named(folder):
    parent = json.loads((folder / "manifest.json").read_text())["parent"]
    spec = {"kind": "class", "class": "nowhere:Out", "context": None, "children": ["leaf"]}
    edited(folder / "manifest.json", ["parent"], parent | {"signature": parent["signature"] | {"out_spec": spec}})
    held = open_stages(folder)
    held.load([0, 1])  # only the last stage needs it
    with pytest.raises(FileError, match="SK508.*nowhere:Out"):
        held.load([2])


def test_a_folder_without_a_manifest_is_none(folder, split):
    (folder / "manifest.json").unlink()
    with pytest.raises(FileError, match="SK504"):
        open_stages(folder)


def test_a_later_split_leaves_no_stages_of_an_earlier_one(folder, split):
    gm = split.flow.root
    save_stages(sk.split(gm, dict.fromkeys(sk.analyze(gm).nodes, 0)), folder)
    assert not (folder / "stage-2.json").exists() and len(open_stages(folder).names) == 1


def test_what_is_no_data_is_refused_by_its_node(tmp_path):
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(SplitError, match=r"SK506: node _0 uses a Linear") as error:
        save_stages(sk.split(gm, {"_0": 0, "_1": 1}), tmp_path)
    assert "capture" in error.value.remedy


def test_weights_that_share_memory_are_refused(tmp_path):
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.rand(8)
            self.a, self.b = nn.Parameter(flat[:4]), nn.Parameter(flat[2:6])

        def forward(self, x):
            return (x * self.a).sum() + (x * self.b).sum()

    gm = sk.capture(Shares(), torch.rand(4))
    with pytest.raises(FileError, match="SK506: a and b share memory"):
        save_stages(sk.split(gm, dict.fromkeys(sk.analyze(gm).nodes, 0)), tmp_path)


def test_a_state_goes_through_1_2_4_and_1_parts(split, tmp_path):
    gm, nodes = split.flow.root, sk.analyze(split.flow.root).nodes
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        state = pipeline(sk.split(gm, dict.fromkeys(nodes, 0)), "gpipe", 1).state_dict()
        first = {name: t.clone() for name, t in state.items()}
        for count in (2, 4, 1):
            parts = {n: min(count * i // len(nodes), count - 1) for i, n in enumerate(nodes)}
            other = copy.deepcopy(sk.split(gm, parts))  # with other numbers
            for tensor in (*other.module.parameters(), *other.module.buffers()):
                torch.nn.init.zeros_(tensor)
            save_stages(other, tmp_path / str(count))
            pipe = pipeline(open_stages(tmp_path / str(count)), "gpipe" if count == 1 else "loopedbfs", count)
            assert not any(t.any() for t in pipe.state_dict().values())
            pipe.load_state_dict(state)
            state = {name: t.clone() for name, t in pipe.state_dict().items()}
    finally:
        dist.destroy_process_group()
    assert state.keys() == first.keys() and all(torch.equal(t, first[name]) for name, t in state.items())


def test_a_process_never_holds_more_than_the_stages_that_it_loads(tmp_path):
    """Measured: the peak of a real process over one that only imports."""
    width, count = 2048, 4  # 16 MiB a stage
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    gm = sk.capture(model, torch.randn(1, width))
    save_stages(sk.split(gm, {n: i for i, n in enumerate(sk.analyze(gm).nodes)}), tmp_path)
    code = (
        "import re, sys; from splitkit.runtime import open_stages\n"  # ru_maxrss would be that of the parent
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "before = peak(); held = open_stages(sys.argv[1]); held.load([2])\n"
        "print(peak() - before, sum(t.nbytes for t in held.tensors.values()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=300, check=True
    )
    grown, own = map(int, run.stdout.split())
    assert own == width * width * 4 <= grown < own + 8 * 2**20
