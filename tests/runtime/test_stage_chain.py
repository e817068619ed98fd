"""What a chain of stages refuses before anything runs, and what goes over its borders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.graph.dataflow import module_path
from splitkit.graph.input_overlap import check_nodes
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.runtime import to_devices
from splitkit.runtime.devices.device_map import with_numbered_devices
from splitkit.runtime.parent import calls_of
from splitkit.runtime.ranks.measurements import with_passed_on, without_batch
from splitkit.runtime.ranks.stage_chain import chain_of, last_stage_of, loss_without_grad


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.kind == "before":
            return self.b(y.relu_())
        if self.kind == "view":
            part = y[0]
            y.mul_(2)
            return self.b(y) + part
        if self.kind == "buffer":
            self.seen.add_(1)
            return self.b(y) + self.seen
        if self.kind == "input":
            x.mul_(2)
            return self.b(y) + x
        return self.b(y)


def chain(kind: str, second: str):
    """Nodes from the one of that name on are in the second stage."""
    gm = sk.capture(Net(kind), torch.randn(2, 4))
    nodes = sk.analyze(gm).nodes
    start = next(i for i, n in enumerate(nodes) if n.name == second)
    return chain_of(sk.split(gm, {n: int(i >= start) for i, n in enumerate(nodes)}))


@pytest.mark.parametrize("second", ["relu_", "linear_1"])
def test_a_value_is_written_before_or_after_it_crosses(second):
    found = chain("before", second)
    (value,) = found.border(0, ())
    assert found.value(value).written


@pytest.mark.parametrize(("kind", "second"), [("view", "mul_"), ("buffer", "linear_1"), ("input", "linear_1")])
def test_memory_that_stages_would_share_is_refused(kind, second):
    with pytest.raises(PipelineError, match="SK801") as error:
        chain(kind, second)
    assert error.value.nodes and error.value.remedy


def test_inputs_are_not_sent():
    class Late(nn.Module):
        def forward(self, x, mask):
            return x.relu() * mask

    gm = sk.capture(Late(), torch.randn(2), torch.ones(2))
    found = chain_of(sk.split(gm, {"relu": 0, "mul": 1}))
    assert [n.name for n in found.inputs(0)] == ["x"] and [n.name for n in found.inputs(1)] == ["mask"]
    assert len(found.border(0, ())) == 1


def test_a_part_that_is_checkpointed_is_a_stage():
    """It was run by the stage before it, whose optimizer did not know its parameters."""
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 4))
    plan = sk.plan(gm, {"linear": 0, "tanh": 0, "linear_1": 1})
    parts = {key: replace(part, call="checkpoint") for key, part in plan.parts.items()}
    found = chain_of(sk.split(gm, replace(plan, parts=parts)))
    assert [[n.name for n in found.nodes(s) if n.op == "call_function"] for s in (0, 1)] == [
        ["checkpoint"],
        ["checkpoint_1"],
    ]
    assert [found.value(n).name for n in found.border(0, ())] == ["tanh"]
    assert found.own(0) == found.own(1) == {}


class Early(nn.Module):
    """Its first layer gives an output too, and a number that has no gradient."""

    def __init__(self, losses: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.losses = nn.Linear(4, 4), nn.Linear(4, 4), losses

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        z = self.b(y.tanh())
        found = {"hidden": y, "count": (z > 0).sum(), "loss": z.square().mean()}
        return found | ({"other": z.abs().mean()} if self.losses > 1 else {})


@pytest.mark.parametrize(
    ("losses", "loss", "outputs", "wanted"),
    [
        (1, None, False, ["mean"]),
        (1, None, True, ["linear", "sum_1", "mean"]),
        (1, lambda output, target: output["loss"], False, ["linear", "sum_1", "mean"]),
        (2, None, False, ["mean"]),  # what is called loss, beside another number
    ],
)
def test_only_the_loss_is_wanted_where_nobody_asks_for_outputs(losses, loss, outputs, wanted):
    gm = sk.capture(Early(losses), torch.randn(2, 4))
    names = [n.name for n in sk.analyze(gm).nodes]
    found = chain_of(sk.split(gm, {n: int(names.index(n) > names.index("tanh")) for n in names}))
    ends = last_stage_of(found, loss, True, outputs)
    assert [found.value(n).name for n in ends.wanted] == wanted
    border = [found.value(n).name for n in found.border(0, ends.wanted)]
    assert border == (["tanh"] if wanted == ["mean"] else ["linear", "tanh"])
    assert len(last_stage_of(found, loss, False, True).wanted) == 2 + losses


def test_outputs_go_on_where_no_gradient_of_the_loss_would_cross_a_border():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x).mean()

    gm = sk.capture(Apart(), torch.randn(2, 4))
    found = chain_of(sk.split(gm, {"linear": 0, "linear_1": 1, "mean": 1}))
    assert [found.value(n).name for n in last_stage_of(found, None, True, False).wanted] == ["linear", "mean"]


def test_a_size_that_only_the_data_decides_is_refused_by_name():
    """It was a TypeError without a node."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.a(x)[mask].relu()

    gm = sk.capture(Masked(), torch.randn(3, 4), torch.tensor([True, False, True]))
    *first, last = sk.analyze(gm).nodes
    found = chain_of(sk.split(gm, {**dict.fromkeys(first, 0), last: 1}))
    with pytest.raises(PipelineError, match="SK801: index is a value of a size that only the data decides"):
        found.value(found.border(0, ())[0]).sent(True)


def test_what_a_stage_only_passes_on_is_held_there():
    """Stage 1 reads y, which goes on, too, and hands on x, which it does not read; no stage but it only passes on."""

    class Skips(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            x, y = a.sin(), a.cos()
            z = y.tanh()
            return z * x + y

    gm = sk.capture(Skips(), torch.randn(2, 4, requires_grad=True))
    split = sk.split(gm, {"sin": 0, "cos": 0, "tanh": 1, "mul": 2, "add": 2})
    found = chain_of(split)
    assert [n.name for n in found.passed_on(1, ())] == ["sin"]
    stages = [StageCosts(1, 1, saved_bytes=s) for s in (10, 20, 30)]
    assert [s.saved_bytes for s in with_passed_on(found, stages)] == [10, 20 + 2 * 4 * 4, 30]


def test_the_batch_is_there_before_a_step():
    x = 2 * 4 * 4
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    found = chain_of(sk.split(gm, {"linear": 0, "linear_1": 1}))

    def held(saved, later):
        stages = without_batch(found, [StageCosts(1, 1, saved_bytes=saved, deferred_bytes=later)] * 2)
        return [(stage.saved_bytes, stage.deferred_bytes) for stage in stages]

    assert held(50, None) == [(50 - x, None), (50, None)], "stage 1 reads nothing of the batch"
    # what the input part captures, or leaves, of other values stays as it is
    assert held(50, 60)[0] == (50 - x, 60 - x) and held(50, 40)[0] == (50 - x, 50 - x) and held(50, 10)[0] == (18, 10)


@pytest.mark.parametrize(
    "code, other, same",
    [
        ("f(device(type='cuda', index=0))", "f(device(type='cuda', index=1))", True),
        ("x.to('cuda:0') + f(device(type='cuda', index=0))", "x.to('cuda:3') + f(device(type='cuda', index=3))", True),
        ("f(device(type='cuda', index=0))", "f(device(type='cuda'))", False),
        ("f(device(type='cuda', index=0))", "f(device(type='xpu', index=0))", False),
        ("x.to('cuda:0').to('cuda:0')", "x.to('cuda:0').to('cuda:1')", False),
        ("x.to('cuda:0').to('cuda:1')", "x.to('cuda:2').to('cuda:0')", True),
    ],
)
def test_code_is_compared_without_the_numbers_of_devices(code, other, same):
    assert (with_numbered_devices(code) == with_numbered_devices(other)) == same


def test_a_check_that_reads_buffers_of_a_part_is_no_call_of_it():
    layers = (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(3))
    gm = sk.capture(nn.Sequential(*layers), torch.randn(2, 4))
    norms = {n.name for n in gm.graph.nodes if "parametrizations" in module_path(n)}
    split = sk.split(gm, lambda n: 1 - int(n.name in norms) if n.op == "call_function" else None)
    parent = split.module.graph
    assert check_nodes(parent) and len(split.subgraphs[0].outputs) > 1
    assert [n.target for n in calls_of(parent, split.names)] == list(split.names.values())
    assert chain_of(split).stages == 2
    placed, x = to_devices(split, ["cpu:0", "cpu:1"]), torch.randn(2, 4)
    assert placed(x).shape == x.shape


def test_the_loss_of_an_evaluation_is_the_output_of_that_name_or_the_only_number():
    two, three, row = torch.tensor(2.0), torch.tensor(3.0), torch.ones(2)
    assert loss_without_grad({"loss": two, "other": three}) is two
    assert loss_without_grad((row, three, torch.tensor(4))) is three
    for result in (row, (two, three), torch.tensor(4), ()):
        with pytest.raises(PipelineError, match="SK802"):
            loss_without_grad(result)
