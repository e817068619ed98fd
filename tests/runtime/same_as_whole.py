"""One rank: each case trains a pipeline beside the unsplit model; a JSON line for each."""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capturedmodels import stored
from ownorders import own_order
from smallnets import UNet
from torch import fx, nn
from train_both import train_both

import splitkit as sk
from splitkit import _torch
from splitkit.costs.links import Links
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.hardware.link_specs import Link
from splitkit.pipeline.message_order import MessageOrder
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.synthesize import load_order, save_order
from splitkit.pipeline.torch_orders import torch_cells
from splitkit.prices import Costs
from splitkit.runtime import pipeline
from splitkit.testing import models

TINY = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2}


class Odd(nn.Module):
    """What crosses: a skip, a mask, an index, a table without gradient, a written tensor; with autocast and no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.register_buffer("scale", torch.linspace(0, 1, 8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, index: torch.Tensor, mask: torch.Tensor, *, weight: torch.Tensor) -> dict[str, Any]:
        x = skip = self.table(index)
        with torch.no_grad():
            shift = self.scale * index.unsqueeze(1)
        hot = mask & (index > 3)
        for block in self.blocks[:2]:
            x = x + block(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[2](x)
        x = self.norm(x.float()).relu_() + shift
        x = torch.where(hot.unsqueeze(1), x, skip)
        x = self.blocks[3](x) @ self.table.weight.t()
        loss = (nn.functional.cross_entropy(x, index, reduction="none") * weight).mean()
        return {"loss": loss, "logits": x, "none": None, "index": index}


class Filled(nn.Module):
    """A table that has no history until it is filled, a value that is not contiguous, an input called ``target``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.a(x)
        table = x.new_empty(x.shape[0], 8)
        table[:, :4], table[:, 4:] = first[:, 4:], first[:, :4]
        turned = first.t().tanh()  # is laid out as `t` made it, so that `view` takes it again:
        hidden = self.c(self.b(turned.t().view(-1).view(2, -1, 8))).view(-1, 8)
        return {"loss": (hidden * table - target).square().mean()}


class Turned(nn.Module):
    """Gradients as torch finds them: of a table that is turned and copied, and one tensor for two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        self.ones, self.others = (nn.ParameterList(torch.randn(8) for _ in range(6)) for _ in range(2))

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(index)
        for layer, one, other in zip(self.layers, self.ones, self.others, strict=True):
            x = (layer(x) + (one + other)).tanh()
        return {"loss": nn.functional.cross_entropy(x @ self.table.weight.t().contiguous(), index)}


def example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "odd":
        return Odd(), {"index": torch.randint(16, (6,)), "mask": torch.rand(6) > 0.5, "weight": torch.rand(6)}
    if name == "turned":
        return Turned(), {"index": torch.randint(16, (6,))}
    if name == "filled":
        return Filled(), {"x": torch.randn(4, 8), "target": torch.randn(4, 8)}
    if name == "unet":
        net = UNet(8, 2)
        return net, {"x": torch.randn(2, 3, 16, 16)}
    made = models.build(name, **TINY)
    made.model.train()
    return made.model, dict(made.kwargs)


def batch_of(inputs: dict[str, torch.Tensor], count: int, seed: int) -> dict[str, torch.Tensor]:
    """Microbatches that differ, one behind the other."""
    rng = torch.Generator().manual_seed(seed)

    def other(t: torch.Tensor) -> torch.Tensor:
        return t[torch.randperm(t.shape[0], generator=rng)].roll(int(torch.randint(9, (), generator=rng)), -1)

    return {name: torch.cat([other(t) for _ in range(count)]) for name, t in inputs.items()}


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


PREPARED: list[tuple[dict[str, Any], dict[str, torch.Tensor], Split]] = []


@cache
def captured(name: str) -> tuple[fx.GraphModule, dict[str, torch.Tensor], Costs]:
    """The graph of a model, its inputs and prices; nobody may change them."""

    def make() -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
        model, inputs = example(name)
        return sk.capture(model, **inputs), inputs

    gm, inputs = stored(f"{name} of {Path(__file__).read_text()}", make)
    return gm, inputs, sk.costs.flops(gm)


@cache
def planned(name: str, stages: int) -> dict[str, Any]:
    gm, _, costs = captured(name)
    cut = sk.policies.AtMarkers(lambda n: n.name == "t_1")
    return sk.plan(gm, cut if name == "filled" else sk.policies.Stages(stages), costs).to_dict()


def prepare() -> None:
    """Capture and split once for all ranks, before they are processes of their own."""
    torch.set_num_threads(1)
    for case in json.loads(sys.argv[1]):
        gm, inputs = copy.deepcopy(captured(case["model"])[:2])
        plan = sk.Plan.from_dict(gm.graph, planned(case["model"], case["stages"]))
        how = {"replicas": case.get("replicas", 1), "call": case.get("call", "plain")}
        parts = {key: replace(part, **how) for key, part in plan.parts.items()}
        PREPARED.append((case, inputs, sk.split(gm, replace(plan, parts=parts))))


def run(case: dict[str, Any], inputs: dict[str, torch.Tensor], split: Split) -> dict[str, Any]:
    gm = split.flow.root
    by_output = case["model"] == "unet"
    count = case["microbatches"]
    mine = own_order(case["order"], "1F1B") if "order" in case else None  # not torch's, for all its name
    made = list[Any]()
    if case.get("messages"):
        mine = in_order(case)
        action_schedule = _torch.action_schedule
        _torch.action_schedule = lambda *given, **more: made.append(action_schedule(*given, **more)) or made[-1]
    pipe = pipeline(split, mine or case["schedule"], count, seed=7, loss=square if by_output else None)
    assert mine is None or pipe.order.ranks == mine.ranks
    if case.get("sharded"):
        pipe.shard()
    batches = []
    for step in range(case.get("steps", 2)):
        batch = batch_of(inputs, count, step)
        batches.append(batch | ({"target": torch.randn(2 * count, *gm(**inputs).shape[1:])} if by_output else {}))
    seen = train_both(pipe, batches, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3), case.get("tolerance", 1e-6))
    try:
        late: Any = pipe.step(**batches[0], outputs=True).outputs
        late = len(late) if late is not None else None
    except PipelineError as error:
        late = error.code
    given = {k: v for k, v in batches[0].items() if k in inputs}
    outputs = pipe.infer(**given)
    if case.get("messages"):  # torch ran these rows, and for inference its own
        _torch.action_schedule = action_schedule
        rows = [made_.pipeline_order_with_comms[pipe.rank] for made_ in made]
        texts = [tuple(str(a) for a in row if "WAIT" not in str(a)) for row in rows]
        assert mine.cells[pipe.rank] in texts and len(set(texts)) == 2, texts
    state = {name: list(t.shape) for name, t in pipe.state_dict().items()}
    return {
        "gradient": max(s.gradient for s in seen), "weight": max(s.weight for s in seen), "steps": len(seen),
        "loss": max(s.loss for s in seen), "state": state, "own": pipe.stages, "borders": pipe.borders,
        "replica": pipe.replicas.own, "late": late,
        "outputs": None if outputs is None else [type(o).__name__ for o in outputs],
    }  # fmt: skip


def in_order(case: dict[str, Any]) -> MessageOrder:
    """The schedule with its messages in an order that torch does not have."""
    order = pipeline_order(case["schedule"], case["stages"], case["microbatches"], case["ranks"])
    costs = [StageCosts(1.0 + s % 3, 2.0, 1.0, activation_bytes=10 + s) for s in range(case["stages"])]
    found = sk.order_messages(costs, order, links=Links(Link(30.0)))
    with tempfile.TemporaryDirectory() as folder:
        save_order(found.order, Path(folder) / "order.csv")
        read = load_order(Path(folder) / "order.csv")
    assert isinstance(read, MessageOrder) and read.cells != torch_cells(order)
    return read


def start() -> None:
    """Join the group of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip


def main() -> None:
    start()
    for case, inputs, split in PREPARED:
        if case["ranks"] != dist.get_world_size():
            continue
        print(json.dumps(case | run(case, inputs, split) | {"rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
