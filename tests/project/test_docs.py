"""What the pages of docs/ show runs as shown, and the files and tests that they name are there."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit import policies
from splitkit.cli.parser import make_parser
from splitkit.pipeline import schedules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "split_module.md").read_text()
STEP = (ROOT / "docs" / "forward_backward.md").read_text()
SHORTER = {'"llama", layers=2,': '"llama", layers=1,', "budgets=2, offload": "budgets=1, offload"}
"""Texts in `STEP`, and their replacements when it runs, which show the same in half of the time."""
PLACEMENT = (ROOT / "docs" / "placement.md").read_text()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            y = x.sin()
        return self.b(x) + y


@pytest.mark.campaign
def test_the_python_blocks_run_one_after_another():
    model, x = Model(), torch.ones(1, 2)
    gm = fx.symbolic_trace(model)
    scope = {"torch": torch, "gm": gm, "model": model, "inputs": (x,), "callback": lambda node: int(node.name != "a")}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, scope)
    assert torch.equal(scope["split"](x), gm(x))
    assert scope["names"] == {"submod_0.a": "a", "submod_1.b": "b"}
    assert torch.equal(scope["program"].module()(x), model(x))


@pytest.mark.parametrize(("page", "least"), [(PAGE, 10), (STEP, 3), (PLACEMENT, 3)])
def test_the_files_that_it_names_are_there(page, least):
    names = re.findall(r"`((?:splitkit|docs|notebooks|tests|benchmarks)/[\w./-]*)`", page)
    assert len(names) >= least
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.campaign
def test_the_python_blocks_of_placement_run_one_after_another():
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", PLACEMENT, re.S)
    assert len(blocks) == 7
    for block in blocks:
        exec(re.sub(r"(Stages\(\d, )", r"\1seconds=0.2, ", block), scope)  # which run as well in ten


@pytest.mark.parametrize("file", ["torch_wrong", "torch_raises", "torch_loses", "torch_lacks"])
def test_the_tables_name_each_test_of_a_file_once(file):
    (section,) = re.findall(rf"\(`tests/against_torch/{file}\.py`\).*?\n\n(\|.*?)\n\n", PAGE, re.S)
    named = re.findall(r"`(\w+)`", "".join(row.rsplit("|", 2)[1] for row in section.splitlines()))
    source = (ROOT / "tests" / "against_torch" / f"{file}.py").read_text()
    cases = re.search(r"^CASES = \[(.*?)\]", source, re.M | re.S)  # parameters of one test
    tests = [*re.findall(r"^def (test_\w+)", source, re.M), *re.findall(r"\w+", cases[1] if cases else "")]
    assert sorted(named) == sorted(set(tests) - {"test_the_result_is_another"})


def test_the_python_block_of_view_writes_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "view.md").read_text(), re.S)
    scope = {}
    exec(block, scope)
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "ladder.svg", "timeline.json"}
    assert scope["frame"].html == (tmp_path / "page.html").read_text()


# ---- docs/forward_backward.md


@pytest.fixture(scope="module")
def step():
    """The names that its python blocks leave, run one after another."""
    scope = {}
    page = STEP
    for text, shorter in SHORTER.items():
        assert text in page
        page = page.replace(text, shorter)
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 12
    torch.manual_seed(0)
    for block in blocks:
        exec(block, scope | {"model": Words()} if 'backend="inductor"' in block else scope)
    return scope


class Words(nn.Module):
    """In place of the page's Llama where Inductor makes code, for which that takes 20 s."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 8), nn.Linear(8, 200)

    def forward(self, input_ids, labels, **_):
        scores = self.head(self.embed(input_ids).tanh())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def saved(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).saved


def peak(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak


def again(pair):
    """How often each op is computed in both halves."""
    names = {n.name for n in pair.forward.graph.nodes if n.op == "call_function"}
    return Counter(str(n.target) for n in pair.backward.graph.nodes if n.op == "call_function" and n.name in names)


@pytest.mark.campaign
def test_every_door_gives_the_gradients_of_eager(step):
    model, joint, inputs = step["model"], step["joint"], step["inputs"]
    model.zero_grad()
    model(**inputs).loss.backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    for door in ("trained", "compiled"):
        model.zero_grad()
        step[door](**inputs).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-6)
    for pair in (step["pair"], *step["pairs"].values()):
        outputs, gradients = pair.run(joint.primals(**inputs), joint.tangents())
        for name, gradient in joint.read([*outputs, *gradients]).gradients.items():
            torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)
    weight, x = step["weight"], step["x"]
    (expected,) = torch.autograd.grad((x @ weight).sin().exp().sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.campaign
def test_its_policies_do_what_it_says_of_them(step):
    pairs = step["pairs"]
    whole, least = pairs["save all"], pairs["recompute all"]
    assert not again(whole) and saved(least) == saved(pairs["fewest bytes"]) < min(
        saved(pair) for name, pair in pairs.items() if name not in ("recompute all", "fewest bytes")
    )
    assert saved(pairs["half of the bytes"]) <= saved(whole) / 2 and peak(pairs["peak"]) <= 0.92 * peak(whole)
    assert "No plan recomputes less" in pairs["half of the bytes"].plan.note
    assert saved(pairs["10 % less"]) <= 0.9 * saved(whole)
    assert not {"aten.mm.default", "aten.bmm.default"} & again(pairs["products kept"]).keys()
    core = again(pairs["Megatron"])
    assert sum(n for op, n in core.items() if "attention" in op) == 1 and "aten.mm.default" not in core
    assert again(pairs["every block"])["aten.mm.default"] >= 6 and not any(
        name.startswith("embedding") for name in again(pairs["every block"])
    )
    assert again(pairs["silu again"]) == {"aten.silu.default": 1}
    assert saved(step["without"]) - saved(step["precomputed"]) == (4 - 1) * 32 * 256


def test_it_has_every_policy_for_joint_graphs_and_every_command_is_understood():
    table = STEP.split("## The policies")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert {*rows} == {
        "SaveAll",
        "RecomputeAll",
        "Remat",
        "MinCut",
        "Budget",
        "Frontier",
        "Precompute",
        "SplitBackward",
        "Pipeline",
    }
    assert {*rows} <= {*policies.__all__, "Frontier"}
    commands = re.findall(r"^splitkit (.*)$", STEP, re.M)
    assert len(commands) == 3
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_its_table_names_each_test_beside_torchs_partitioner_once():
    source = (ROOT / "tests" / "frontends" / "test_against_torchs_partitioner.py").read_text()
    section = STEP.split("## What torch's partitioner gets wrong")[1].split("\n## ")[0]
    assert sorted(re.findall(r"`(test_\w+)`", section)) == sorted(re.findall(r"^def (test_\w+)", source, re.M))


# ---- docs/joint_pipelines.md, docs/schedules.md


@pytest.mark.campaign
@pytest.mark.parametrize(("page", "least"), [("joint_pipelines", 4), ("schedules", 4)])
def test_the_python_blocks_of_pipelines_run_one_after_another(page, least, tmp_path, monkeypatch):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schedules, "_KNOWN", dict(schedules._KNOWN))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= least
    scope = {}
    for block in blocks:
        exec(block, scope)
    for command in re.findall(r"^splitkit (.*)$", text, re.M):
        make_parser().parse_args(shlex.split(command))


def test_the_schedule_of_your_own_is_planned(monkeypatch):
    monkeypatch.setattr(schedules, "_KNOWN", dict(schedules._KNOWN))
    page = (ROOT / "docs" / "schedules.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*register_schedule\([^`]*)```", page)
    scope = {"sk": sk, "torch": torch, **vars(sk.extend)}
    exec(block, scope)
    assert "one by one of 8" in scope["plan"].note


# ---- docs/runtime.md


@pytest.mark.campaign
def test_the_python_blocks_of_stages_run_one_after_another(tmp_path, monkeypatch):
    """In a group of one rank; `tests/runtime` has several."""
    import torch.distributed as dist

    page = (ROOT / "docs" / "runtime.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "save_stages" in b or "Schedule1F1B" in b]
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    model, one = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)), {"input": torch.ones(1, 2)}
    gm = sk.capture(model, **one)
    batch, target = {"input": torch.rand(8, 2)}, torch.rand(8, 2)
    scope = {"torch": torch, "dist": dist, "sk": sk, "gm": gm, "plan": sk.plan(gm, policies.Stages(1))}
    scope |= {"inputs_of_one_microbatch": one, "batch": batch, "target": target, "loss": nn.functional.mse_loss}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for block in blocks:
            exec(block.replace("microbatches=8)", "microbatches=8, loss=loss)").replace(*WITH_TARGET), scope)
    finally:
        dist.destroy_process_group()
    assert scope["result"].loss > 0 and all(p.grad is not None for p in scope["own"].submod.parameters())


WITH_TARGET = ("step(**batch)", "step(**batch, target=target)")  # for a model that returns no loss
