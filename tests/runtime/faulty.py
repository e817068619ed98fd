"""One rank of a pipeline in which something goes wrong; prints what it was told, as JSON."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import pipeline, planned_once
from splitkit.runtime.ranks import faults

LIMIT = 3.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


CAPTURED: list[fx.GraphModule] = []


def prepare() -> None:
    """Capture once for all ranks."""
    torch.manual_seed(0)
    CAPTURED.append(sk.capture(Net(), torch.randn(2, 8)))


def main() -> None:
    rank, what = int(os.environ["RANK"]), sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
    start = time.monotonic()
    faults.SILENCE = LIMIT / 2
    log = Log()
    logging.getLogger("splitkit.runtime").addHandler(log)
    try:
        run(rank, what)
    except SplitError as error:
        took = time.monotonic() - start
        print(
            json.dumps({"rank": rank, "said": str(error), "sk": error.code, "took": took, "log": log.lines}), flush=True
        )
        return
    took = time.monotonic() - start
    print(json.dumps({"rank": rank, "said": "", "sk": "", "took": took, "log": log.lines}), flush=True)


class Log(logging.Handler):
    """Keeps what this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(rank: int, what: str) -> None:
    gm = CAPTURED[0]
    borders = 2 if what == "plan" and rank == 1 else 1
    labels = {n: int(i >= 2 * borders) + int(i >= 4) for i, n in enumerate(sk.analyze(gm).nodes)}
    if what == "once":
        plan = planned_once(gm, lambda: sk.plan(gm, sk.policies.Stages(300)))
    if what == "replicas":
        labels = dict.fromkeys(labels, 0)
    plan = sk.plan(gm, labels if what != "once" else plan)
    if what == "replicas":
        plan = replace(plan, parts={key: replace(part, replicas=3) for key, part in plan.parts.items()})
    split = sk.split(gm, plan)
    count = 9 if what == "replicas" else 8 if what == "count" and rank == 2 else 4
    pipe = pipeline(split, "1f1b", count)
    x = torch.randn(18 if what == "replicas" else 8, 8)
    pipe.step(x)
    part: Any = pipe.modules[0]
    if rank == (2 if what.endswith("last") else 1):
        spoil(part, what.removesuffix("_last"))
    if what == "slow" and rank == 1:
        time.sleep(0.75 * LIMIT)
    if what == "elsewhere" and rank == 1:
        pipe.clip_grad_norm(1.0)
    if what == "batch":
        x = torch.randn(7, 8)
    pipe.step(x)


def spoil(part: nn.Module, what: str) -> None:
    """Let the stage of this rank do it from its third microbatch on."""
    calls = []

    def before(module: nn.Module, args: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            return None
        if what in ("raise", "replicas"):
            raise ValueError("no such thing")
        if what == "die":
            os._exit(9)
        if what == "stop":
            end_after(4 * LIMIT)
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "hang":
            time.sleep(3 * LIMIT)
        return None

    part.register_forward_pre_hook(before)
    if what == "shape":
        part.register_forward_hook(lambda module, args, out: out[:1] if len(calls) > 2 else out)
    if what == "dtype":
        part.register_forward_hook(lambda module, args, out: out.double() if len(calls) > 2 else out)
    if what in ("backward", "words"):

        def fail(grad: torch.Tensor) -> None:
            if what == "words":
                raise RuntimeError("connection to the tokenizer timed out: its peer closed the socket")
            raise ValueError("no such gradient")

        part.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)


def end_after(seconds: float) -> None:
    """End this process later, from another one: it cannot do so itself while it is stopped."""
    own = os.getpid()
    if not os.fork():
        time.sleep(seconds)
        os.kill(own, signal.SIGKILL)
        os._exit(0)
