"""One rank of a pipeline on simulated devices in which a rank fails, where, as on NCCL, no other gets an error."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import simgpu
import staged_group
import torch
import torch.distributed as dist
from torch import fx, nn

import splitkit as sk
from splitkit.runtime import pipeline
from splitkit.runtime.ranks import faults

CAPTURED: list[fx.GraphModule] = []


def prepare() -> None:
    """Register the device, and capture once for all ranks."""
    simgpu.register()
    staged_group.register()
    staged_group.TOLD = False
    faults.PATIENCE = faults.PATIENCE = 2.0
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    CAPTURED.append(sk.capture(nn.Sequential(*layers), torch.randn(2, 8)))


def main() -> None:
    rank, what = int(os.environ["RANK"]), sys.argv[1]
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        staged_group.NAME, init_method=os.environ["SPLITKIT_STORE"], rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=6),
    )  # fmt: skip
    split = sk.split(CAPTURED[0], sk.policies.Stages(3))
    pipe = pipeline(split, "1f1b", 4, loss=lambda output, target: output.square().mean())
    pipe.step(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    if rank == 1:
        calls = list[int]()

        def spoil(*given: Any) -> None:
            calls.append(1)
            if len(calls) == 3 and what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if len(calls) == 3:
                raise ValueError("no such thing")

        pipe.modules[0].register_forward_pre_hook(spoil)
    pipe.step(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
