"""The benchmark of stages: the rules that it compares with, by hand on toy models, and its rows, on small sizes."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.extend import module_path


@pytest.fixture(scope="module")
def stages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("stages")
    for name in ("stages", "rules", "recompute"):
        sys.modules.pop(name, None)


@pytest.fixture
def rules(stages):
    return sys.modules["rules"]


class Block(nn.Module):
    """A block that its model does not want split: 40 bytes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 2, bias=False)
        self.outer = nn.Linear(2, 5, bias=False)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Toy(nn.Module):
    """An embedding (tied to the head or not), five blocks, and a head."""

    _no_split_modules = ("Block",)

    def __init__(self, words=6, tied=False):
        super().__init__()
        self.embed = nn.Embedding(words, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(5, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_balanced_memory_is_the_mean_and_a_buffer(rules):
    # 120 (embed) + 5 blocks of 80 + 120 (head) = 640 bytes; final modules: 2 of 120, 10 of 40: mean 53 < 80, a block
    assert rules.balanced_memory(Toy(), 4) == [640 // 4 + 100] * 3 + [math.inf]
    model = Toy()
    model._no_split_modules = None
    assert rules.balanced_memory(model, 2) == [640 // 2 + int(1.25 * 53), math.inf]
    # tied, the head has no bytes and is not a module: 520 in all
    assert rules.balanced_memory(Toy(tied=True), 2) == [520 // 2 + 100, math.inf]


def test_the_first_device_keeps_room_for_the_largest_layer_that_is_left(rules):
    found = rules.device_map(Toy(), [260, 260, 260, math.inf])
    # device 0: 120 of the embedding is all that fits beside the room of 120 for the head; `blocks` (400) is split
    assert found == {
        "embed": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "blocks.4": 2, "head": 3
    }  # fmt: skip
    found = rules.device_map(Toy(), [400, 160, math.inf])
    assert [found[f"blocks.{i}"] for i in range(5)] == [0, 0, 1, 1, 2] and found["head"] == 2


def test_modules_that_may_be_split_are(rules):
    model = Toy()
    model._no_split_modules = None
    found = rules.device_map(model, [0, 200, math.inf])
    assert found["embed"] == 1 and found["blocks.0"] == 1  # exactly full: 120 + 80
    found = rules.device_map(model, [0, 190, math.inf])
    assert found["blocks.0.inner"] == 1 and found["blocks.0.outer"] == 2


def test_tied_modules_are_placed_together(rules):
    found = rules.device_map(Toy(tied=True), [0, 200, 160, math.inf])
    assert found["embed"] == found["head"] == 1
    assert [found[f"blocks.{i}"] for i in range(5)] == [1, 2, 2, 3, 3]


def test_a_tied_module_is_split_until_what_is_tied_fits(rules):
    model = nn.Module()
    model.shared = nn.Embedding(6, 5)
    model.decoder = nn.Sequential(nn.Linear(5, 20, bias=False), nn.Linear(5, 6, bias=False))
    model.decoder[1].weight = model.shared.weight
    assert rules.device_map(model, [0, 130, math.inf]) == {"shared": 1, "decoder.1": 1, "decoder.0": 2}


def test_what_fits_nowhere_before_is_on_the_last_device(rules):
    found = rules.device_map(Toy(words=100), [500, 500, 500, math.inf])
    assert set(found.values()) == {3}


def test_vllm_gives_the_remainder_to_the_stages_before_the_last(rules):
    assert rules.middle_heavy(12, 4) == [3, 3, 3, 3]
    assert rules.middle_heavy(12, 8) == [1, 1, 1, 2, 2, 2, 2, 1]
    assert rules.middle_heavy(7, 4) == [2, 2, 2, 1]


def test_deepspeed_takes_the_narrowest_parts(rules):
    assert rules.narrowest([4, 1, 1, 1, 1, 4], 3) == [0, 1, 5]
    assert rules.narrowest([1, 1, 1, 1], 2) == [0, 2]
    assert rules.narrowest([3, 1], 4) == [0, 1]


@pytest.mark.parametrize("tied", [False, True])
def test_plans_of_rules_are_legal_and_follow_the_devices(rules, tied):
    model, ids = Toy(tied=tied), torch.randint(0, 6, (2, 3))
    gm = sk.capture(model, ids)
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    for name, rule in rules.RULES.items():
        plan = rule(flow, model, 3, costs)
        assert set(plan.places) == set(flow.nodes), name
        torch.testing.assert_close(sk.split(gm, plan)(ids), model(ids))
    found = rules.placed(flow, {"embed": 0, "blocks": 1, "head": 0})
    homes = {module_path(node): found.home(node) for node in flow.nodes}
    assert homes["embed"] == 0 and homes["blocks.4.outer"] == 1
    assert homes["head"] == 1  # accelerate would go back to the first device: a stage cannot
    layers = [name for name, _ in rules.layers_of(flow, model)]
    assert layers == ["embed", *(f"blocks.{i}" for i in range(5)), "head"]


def test_nodes_of_no_module_go_where_they_are_first_read(rules):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            mask = x.sign()
            y = self.first(x)
            return self.second(y * mask)

    gm = sk.capture(Masked(), torch.randn(2, 4))
    flow = sk.analyze(gm)
    homes = {node.name: home for node, (home,) in rules.placed(flow, {"first": 0, "second": 1}).places.items()}
    assert homes == {"sign": 1, "linear": 0, "mul": 1, "linear_1": 1}


def run(stages, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["stages.py", *arguments])
    stages.main()
    return capsys.readouterr().out


def test_rows_on_paper(stages, monkeypatch, capsys):
    tiny = {"layers": 2, "width": 64, "heads": 2, "vocab": 5000, "batch": 1, "seq": 16}
    monkeypatch.setattr(stages, "LARGE", {**stages.LARGE, "gpt2": tiny})
    data = json.loads(run(stages, monkeypatch, capsys, "--models", "gpt2", "--stages", "2", "--json"))
    assert [row["setting"] for row in data["rows"]] == ["work", "links", "1f1b"]
    for row in data["rows"]:
        own = row["splitkit"]
        assert own["bottleneck"] == max(own["loads"]) and own["step"] > own["bottleneck"] and own["gap"] < 0.5
        assert row["sizes"] == tiny and set(row["rules"]) == set(sys.modules["rules"].RULES)
        for rule in row["rules"].values():
            assert rule["bottleneck ratio"] == rule["bottleneck"] / own["bottleneck"] >= 1 - 1e-6
    assert data["summary"]["better than splitkit in bottleneck"] == [] and data["summary"]["rows"] == 3
    assert "equal layers" in run(stages, monkeypatch, capsys, "--models", "gpt2", "--stages", "2", "--settings", "work")


def test_measured_rows(stages, monkeypatch, capsys):
    tiny = {"width": 8, "levels": 2, "batch": 1, "image": 16}
    monkeypatch.setattr(stages, "SMALL", {**stages.SMALL, "unet": tiny})
    measured = sk.costs.measured
    monkeypatch.setattr(sk.costs, "measured", lambda *args, **given: measured(*args, **given | {"min_run_time": 1e-3}))
    threads = torch.get_num_threads()
    try:
        data = json.loads(
            run(
                stages, monkeypatch, capsys, "--measure", "--models", "unet", "--stages", "2", "--rounds", "1", "--json"
            )
        )
    finally:
        torch.set_num_threads(threads)
    (row,) = data["rows"]
    for plan in (row["splitkit"], *row["rules"].values()):
        assert len(plan["measured"]) == plan["parts"] and all(seconds > 0 for seconds in plan["measured"])
    least, most = data["summary"]["sums of prices over what ran"]
    assert 0 < least <= most
    assert 0 <= data["summary"]["measured in that order"] <= data["summary"]["pairs predicted apart"]


def test_a_processor_clock_that_stands_still_measures_no_part_as_nothing(stages, monkeypatch):
    """A guest's clock stands still while it settles what its host took: parts that ran then took 0 seconds."""
    case = stages.Case(stages.Example(Toy().eval(), (torch.zeros(1, 3, dtype=torch.long),), {}), measure=False)
    plan = sk.plan(case.gm, sk.policies.Stages(2), case.costs)
    running = time.process_time
    stopped = iter([running()] * 12)
    monkeypatch.setattr(time, "process_time", lambda: next(stopped, None) or running())
    (seconds,) = stages.measured(case, {"splitkit": plan}, 1).values()
    assert len(seconds) == 2 and min(seconds) > 0 and next(stopped, None) is None
