"""One rank on a simulated device of its own: pipelines beside the unsplit model; a JSON line for each."""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import pytest
import simgpu
import staged_group
import torch
import torch.distributed as dist
from torch import nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.graph.losses import loss_of
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime import pipeline
from splitkit.runtime.devices import accelerators
from splitkit.runtime.ranks import rank_device, replicas, stage
from splitkit.testing import models

SIZES = {"layers": 2, "width": 32, "heads": 2, "batch": 2}
TEXT = {**SIZES, "vocab": 64, "seq": 8}


def model_of(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model in training, with dropout where its kind has it."""
    torch.manual_seed(0)
    if name == "burnt":
        return Burnt(), {"index": torch.randint(8, (2, 3))}
    if name in AUTOCAST:
        return Net(), {"x": torch.randn(2, 8)}
    made = models.build(name, **TEXT)
    for module in made.model.modules():
        if name == "llama" and hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return made.model.double().train(), dict(made.kwargs)


def start() -> None:
    """Join the group, as `splitkit train` does."""
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    dist.init_process_group(
        os.environ.get("BACKEND", staged_group.NAME), init_method=os.environ["SPLITKIT_STORE"],
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip


class Burnt(nn.Module):
    """Capture burns its devices in: of factories, of a region of autocast, of a constant and of a written buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(index + torch.arange(2, device="cpu").view(2, 1) % 2)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
        self.seen.add_(y.detach().float().mean((0, 1)))
        mask = torch.ones(3, 3, dtype=torch.bool, device=index.device).tril()
        y = self.b(y.to("cpu", torch.float32)) * mask.sum() + torch.tensor([0.5] * 8)
        return {"loss": (nn.functional.dropout(y, 0.3, True) ** 2).mean()}


class Net(nn.Module):
    """Layers that autocast runs in bfloat16, so that bfloat16 crosses the border."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x
        for layer in self.layers:
            h = layer(h).relu()
        return {"loss": (h.float() - x).square().mean()}


AUTOCAST = {"half": "cpu", "half there": simgpu.TYPE}
"""A model in bfloat16 -> the device type that its capture names in ``torch.autocast``."""


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two tensors are apart, relative to the largest entry."""
    return float((a.cpu().double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))


def unsplit_step(pipe: Any, whole: nn.Module, batch: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """The same step of the whole model on the CPU, with the seeds of the pipeline."""
    losses = []
    for number in range(pipe.microbatches):
        torch.default_generator.manual_seed(pipe.seed_of(step, number))
        given = {name: t.chunk(pipe.microbatches)[number] for name, t in batch.items()}
        losses.append(loss_of(whole(**given)))
        (losses[-1] / pipe.microbatches).backward()
    return torch.stack(losses).detach()


def planted(name: str, schedule: str, stages: str) -> dict[str, Any]:
    """The same with the faults that pipelines on accelerators had."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "DeviceRng", lambda device: accelerators.DeviceRng(torch.device("cpu")))
        worst = trained(name, schedule, stages)
        seen += ["the seeds differ"] if max(worst[what] for what in ("loss", "gradient", "weight")) > 1e-3 else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_device, "follow_device", lambda *args: None)
        try:
            trained(name, schedule, stages)
        except Exception as error:  # of this rank, or of one that waits for it
            seen += ["the devices differ"] if "device" in str(error) or "rank" in str(error) else []
    return {"seen": seen}


def refused(name: str, schedule: str, stages: str) -> str:
    try:
        pipeline(sk.split(CAPTURED[name][0], sk.policies.Stages(int(stages))), schedule, 4)
    except SplitError as error:
        return str(error)
    return ""


def trained(name: str, schedule: str, stages: str, replicas: str = "1", steps: str = "3") -> dict[str, Any]:
    """Some steps beside the whole model on the CPU."""
    if replicas == "planted":
        return planted(name, schedule, stages)
    if name == "half there":
        return {"refused": refused(name, schedule, stages)}
    gm, inputs = copy.deepcopy(CAPTURED[name][0]), CAPTURED[name][1]
    whole = copy.deepcopy(gm)
    plan = sk.plan(gm, sk.policies.Stages(int(stages) * int(replicas), replicas=(int(replicas),)))
    pipe = pipeline(sk.split(gm, plan), schedule, 4, seed=7)
    mine, theirs = (torch.optim.AdamW(p, lr=1e-2, eps=1e-3) for p in (pipe.parameters(), list(whole.parameters())))
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    for step in range(int(steps)):
        rng = torch.Generator().manual_seed(step)
        shifts = torch.randint(9, (4,), generator=rng).tolist()
        batch = {name: torch.cat([t.roll(shift, -1) for shift in shifts]) for name, t in inputs.items()}
        found, losses = pipe.step(**batch), unsplit_step(pipe, whole, batch, step)
        held = parameters_and_buffers(whole)
        seen = {"loss": 0.0 if found.losses is None else apart(found.losses, losses)}
        own = pipe.named_tensors()
        trains = [n for n, p in own.items() if isinstance(p, nn.Parameter) and held[n].grad is not None]
        seen["gradient"] = max(apart(own[n].grad, held[n].grad) for n in trains)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        seen["weight"] = max(apart(t.detach(), held[n].detach()) for n, t in own.items() if n in held)
        worst = {what: max(worst[what], seen[what]) for what in worst}
    devices = {str(t.device) for t in own.values()}
    return {**worst, "device": str(pipe.device), "devices": sorted(devices), "stages": pipe.stages}


def count_waits() -> list[int]:
    """Count how often stages wait for their device in forward."""
    real, found = stage.ChainStage._forward, [0]

    def forward(*given: Any) -> Any:
        before = simgpu.waits()
        made = real(*given)
        found[0] += simgpu.waits() - before
        return made

    stage.ChainStage._forward = forward  # type: ignore[method-assign]
    return found


CAPTURED: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}


def prepare() -> None:
    """Register the device, and capture the models once for all ranks."""
    simgpu.register()
    staged_group.register()
    for name, *_ in json.loads(sys.argv[1]):
        model, inputs = model_of(name)
        with torch.autocast(AUTOCAST.get(name, "cpu"), torch.bfloat16, enabled=name in AUTOCAST):
            CAPTURED[name] = sk.capture(model, **inputs), inputs


def main() -> None:
    start()
    waits = count_waits()
    for case in json.loads(sys.argv[1]):
        waits[0] = 0
        found = {"case": case, "rank": dist.get_rank(), **trained(*case), "waits": waits[0], "races": simgpu.races()}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
