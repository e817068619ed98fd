"""One rank on a simulated device of its own: pipelines beside the unsplit model; a JSON line for each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import simgpu
import staged_group
import torch
import torch.distributed as dist

import splitkit as sk
from splitkit.runtime import pipeline
from splitkit.testing import models
from splitkit.testing.pipeline_check import UnsplitModel

SIZES = {"layers": 4, "width": 32, "heads": 2, "batch": 2}
TEXT = {**SIZES, "vocab": 64, "seq": 8}


def model_of(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model in training, with dropout where its kind has it."""
    torch.manual_seed(0)
    made = models.build(name, **TEXT)
    return made.model.double().train(), dict(made.kwargs)


def start() -> None:
    """Join the group, as `splitkit train` does."""
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    dist.init_process_group(
        os.environ.get("BACKEND", staged_group.NAME), init_method=os.environ["SPLITKIT_STORE"],
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip


def trained(name: str, schedule: str) -> dict[str, Any]:
    """Three steps beside the unsplit model, which runs on the CPU's numbers, dropout included."""
    model, inputs = model_of(name)
    gm = sk.capture(model, **inputs)
    ranks = dist.get_world_size()
    pipe = pipeline(sk.split(gm, sk.policies.Stages(ranks)), schedule, 4, seed=7)
    unsplit = UnsplitModel(pipe)
    mine = torch.optim.AdamW(pipe.parameters(), lr=1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(unsplit.model.parameters(), lr=1e-2, eps=1e-3)
    apart = 0.0
    for step in range(3):
        rng = torch.Generator().manual_seed(step)
        batch = {k: torch.cat([t.roll(int(torch.randint(9, (), generator=rng)), -1) for _ in range(4)])
                 for k, t in inputs.items()}  # fmt: skip
        found, losses = pipe.step(**batch), unsplit.step(**batch)
        seen = unsplit.deviation(found, losses)
        apart = max(apart, seen.loss, seen.gradient, seen.weight)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    devices = {str(t.device) for t in pipe.named_tensors().values()}
    return {"apart": apart, "device": str(pipe.device), "devices": sorted(devices), "stages": pipe.stages}


def prepare() -> None:
    simgpu.register()
    staged_group.register()


def main() -> None:
    start()
    found = trained(*sys.argv[1:])
    print(json.dumps({"case": sys.argv[1:], "rank": dist.get_rank(), **found, "races": simgpu.races()}), flush=True)
    dist.destroy_process_group()
