"""`pipeline` and `splitkit train` on the simulated accelerator: the numbers of the CPU, and no races."""

from __future__ import annotations

import json
from itertools import product

import pytest
import simgpu
import torch
from campaigns import these_first
from launch import launch

from splitkit.runtime.ranks import rank_device

pytestmark = pytest.mark.skipif(bool(simgpu.missing()), reason=simgpu.missing())

SCRIPT = "accelerator/on_ranks.py"
CASES = [
    (2, [["burnt", "gpipe", "2"], ["half", "1f1b", "2"], ["llama", "zbvzerobubble", "4"]]),
    (4, [["gpt2", "1f1b", "2", "2"]]),
]
LONG = [
    (2, [["t5", "interleaved1f1b", "4"], ["gpt2", "1f1b", "2", "1", "10"], ["llama", "1f1b", "2", "1", "10"]]),
    (4, [["llama", "zbvzerobubble", "8"]]),
]


def run(ranks, cases):
    return launch(SCRIPT, ranks, json.dumps(cases))


@pytest.mark.parametrize(("ranks", "cases"), these_first(CASES, LONG))
def test_a_pipeline_trains_as_the_whole_on_the_cpu(ranks, cases):
    found = run(ranks, cases)
    assert len(found) == ranks * len(cases)
    for line in found:
        assert max(line["loss"], line["gradient"], line["weight"]) < 1e-9, line
        assert line["device"] == f"simgpu:{line['rank']}" and line["devices"] == [line["device"]]
        assert not line["races"]
        assert line["waits"] == 0, "a stage waited for its device in forward"


@pytest.mark.campaign
def test_stages_are_sharded_over_devices():
    """A tied table, rows of the sequence on different devices, and experts that exchange tokens."""
    cases = ["tied,1f1b", "sequence,1f1b", "sequence,zbv", "experts,1f1b"]
    found = launch("accelerator/sharded.py", 4, *cases, seconds=150)
    assert len(found) == 4 * len(cases)
    for line in found:
        assert line["apart"] < 3e-6 and line["inferred"] < 1e-6 and not line["races"], line
        assert [line["device"]] == line["at"] == [f"simgpu:{line['rank']}"], line


NOW = [["forward", "home", "gpipe"], ["joint", "simgpu:0", "zbvzerobubble"], ["refused"], ["attention"]]
LATER = [
    [kind, where, schedule]
    for kind, places in {"forward": ("cpu", "simgpu:0", "home"), "joint": ("cpu", "meta", "simgpu:0", "home")}.items()
    for where, schedule in product(places, ("gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble"))
]


@pytest.mark.parametrize("cases", these_first([NOW], [([case],) for case in LATER]))
def test_a_graph_may_be_captured_on_another_device_than_its_rank(cases):
    """And one that uses another device than the rank's own is not that of the rank that uses one."""
    found = launch("accelerator/captured_elsewhere.py", 2, json.dumps(cases))
    assert len(found) == 2 * len(cases)
    for line in found:
        assert not line["races"]
        if "kernels" in line:
            assert not [name for name in line["kernels"] if "for_cpu" in name], "the device has kernels of its own"
        elif "refused" in line:
            assert "SK804" in line["refused"] and "code of the parts" in line["refused"], line
        else:
            assert max(line["loss"], line["weight"]) < 1e-9, line
            assert line["devices"] == [f"simgpu:{line['rank']}"]


def test_what_goes_wrong_is_seen():
    """Seeds of the CPU's generator give other dropout; devices that stay burnt in do not run at all.

    An autocast for the accelerator does nothing in a capture on the CPU, which knows other dtypes at borders then.
    """
    cases = [["half there", "1f1b", "2"], ["burnt", "gpipe", "2", "planted"]]
    # the rank that waits for the one with the wrong device may be ended
    lines = launch(SCRIPT, 2, json.dumps(cases), check=False)
    (found,) = {tuple(line["seen"]) for line in lines if "seen" in line}
    assert found == ("the seeds differ", "the devices differ")
    (said,) = {line["refused"] for line in lines if "refused" in line}
    assert "SK801" in said and "enters autocast for simgpu, which did nothing in the capture, on cpu" in said


def test_the_command_trains_checks_and_goes_on(tmp_path):
    words = ["train", "gpt2", "--policy", "Stages(2)", "--microbatches", "4", "--check", "--seed", "3"]
    words += ["--size", "layers=1,width=16,heads=2", "--size", "vocab=32,seq=4"]
    keep = ["--checkpoint", str(tmp_path / "kept"), "--steps"]
    runs = [*words, *keep, "1", "--", *words, *keep, "3", "--resume", "--trace", str(tmp_path / "trace.json")]
    lines = launch("accelerator/commanded.py", 2, *runs)
    first, again = (line["data"] for line in lines if "ended" in line)
    assert first["check"]["same"] and again["check"]["same"] and again["first_step"] == 1
    assert max(again["check"][what] for what in ("loss", "gradient", "weight")) < 1e-4
    told = [line for line in lines if "own" in line]
    assert sorted((line["own"], line["device"]) for line in told) == 2 * [(0, "simgpu:0")] + 2 * [(1, "simgpu:1")]
    assert not any(line["races"] for line in told)


@pytest.mark.parametrize(
    "backends, device",
    [
        ("cpu:gloo,cuda:nccl", "cuda:3"), ("cuda:nccl", "cuda:3"), ("cpu:gloo,cuda:gloo,xpu:gloo", "cpu"),
        ("cpu:gloo", "cpu"), ("cpu:gloo,xpu:xccl", "cpu"),
    ],
)  # fmt: skip
def test_the_device_of_a_rank(backends, device, monkeypatch):
    monkeypatch.setattr(rank_device, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(rank_device, "with_index", lambda found: torch.device(found, 3))
    monkeypatch.setattr(rank_device.dist, "get_backend_config", lambda group: backends)
    assert rank_device.device_of_rank(None, None) == torch.device(device)
