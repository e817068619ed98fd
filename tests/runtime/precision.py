"""One rank: mixed precision in a pipeline beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from same_as_whole import start
from torch import fx, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import PipelineModule, pipeline

MICROBATCHES, STEPS = 2, 8
SCALE = {"init_scale": 2.0**20, "growth_interval": 2}
"""Float16 overflows at first, so that some steps are skipped and others are not."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        return {"loss": (h.float() - x).square().mean()}


CAPTURED: dict[torch.dtype | None, fx.GraphModule] = {}


def prepare() -> None:
    """Capture once for all ranks."""
    for dtype in (None, torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            CAPTURED[dtype] = sk.capture(Net(), x=torch.zeros(4, 8))


def captured(dtype: torch.dtype | None) -> fx.GraphModule:
    return copy.deepcopy(CAPTURED[dtype])


def batches() -> Iterator[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(4 * MICROBATCHES, 8, generator=rng)


def scaled() -> dict[str, Any]:
    """Training in float16 with a scaler that knows all ranks, beside the unsplit model with torch's own."""
    scaler, own = ShardedGradScaler(device="cpu", **SCALE), torch.amp.GradScaler("cpu", **SCALE)
    split = sk.split(captured(torch.float16), sk.policies.Stages(2))
    pipe = pipeline(split, "1f1b", MICROBATCHES, loss=lambda output, target: scaler.scale(output["loss"]))
    scaler.scale(torch.zeros(()))
    model = captured(torch.float16)
    mine, theirs = (torch.optim.SGD(p, lr=0.5) for p in (pipe.parameters(), list(model.parameters())))
    scales, apart = [], 0.0
    for x in batches():
        pipe.step(x=x)
        for part in x.chunk(MICROBATCHES):
            own.scale(model(x=part)["loss"] / MICROBATCHES).backward()
        for each, optimizer in ((scaler, mine), (own, theirs)):
            each.unscale_(optimizer), each.step(optimizer), each.update()
            optimizer.zero_grad()
        scales.append((scaler.get_scale(), own.get_scale()))
        held = dict(model.named_parameters())
        apart = max(apart, *(float((p - held[n]).abs().max().detach()) for n, p in pipe.named_parameters().items()))
    return {"scales": scales, "apart": apart}


def around() -> dict[str, Any]:
    """What an autocast around the step does, for captures without one and inside the same one."""
    said = {}
    for inside in (None, torch.bfloat16):
        pipe = pipeline(sk.split(captured(inside), sk.policies.Stages(2)), "1f1b", MICROBATCHES)
        x = next(batches())
        for outside in (None, torch.bfloat16, torch.float16):
            block = nullcontext() if outside is None else torch.autocast("cpu", outside)
            said[f"{inside} in {outside}"] = attempt(block, lambda pipe=pipe, x=x: pipe.step(x=x, loss_everywhere=True))
    return {"said": said}


def module() -> dict[str, Any]:
    """A scaler around a pipeline that is called as a module, which runs backward before the loss is scaled."""
    said = {}
    for dtype in (torch.bfloat16, torch.float16):
        pipe = pipeline(sk.split(captured(dtype), sk.policies.Stages(2)), "1f1b", MICROBATCHES)
        loss = PipelineModule(pipe)(x=next(batches()))["loss"]
        try:
            torch.amp.GradScaler("cpu").scale(loss).backward()
            said[str(dtype)] = ""
        except SplitError as error:
            said[str(dtype)] = str(error)
    return {"said": said}


def attempt(block: AbstractContextManager[Any], step: Callable[[], Any]) -> Any:
    try:
        with block:
            return float(step().loss)
    except SplitError as error:
        return str(error)


def main() -> None:
    start()
    for name, case in (("scaled", scaled), ("around", around), ("module", module)):
        print(json.dumps({"case": name, "rank": dist.get_rank()} | case()), flush=True)
    dist.destroy_process_group()
