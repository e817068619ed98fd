"""One rank of a run that is saved, or continues from a checkpoint; prints its losses and the digests of its state."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, SequentialLR

import splitkit as sk
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.graph.shards import full_tensor
from splitkit.runtime import open_checkpoints, pipeline

COUNT = 4
"""Microbatches."""


class Net(nn.Module):
    """A tied weight on the first and the last stage, dropout, a frozen parameter, a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.layers[1].bias.requires_grad_(False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.table(index) * self.scale
        for layer in self.layers:
            x = nn.functional.dropout(x + layer(x).tanh(), 0.1)
        return nn.functional.cross_entropy(x @ self.table.weight.t(), index)


class Counting(torch.optim.Optimizer):
    """Momentum, with an int, a list of tensors, a string and a numpy number among its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, torch.tensor(0.5))})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "kept": [torch.zeros_like(p), None], "kind": "counting", "x": np.float32(0.1)}
                state["step"] += 1
                state["kept"][0].mul_(group["betas"][0] * float(group["betas"][1])).add_(p.grad)
                p.sub_(state["kept"][0], alpha=group["lr"] / state["step"])


class Loader:
    """The position is the state."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "noise": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["noise"].item() == state["at"]
        self.at = state["at"]


@cache
def captured(width: int) -> fx.GraphModule:
    torch.manual_seed(0)
    return sk.capture(Net(width), torch.randint(16, (2, 3)).flatten())


def prepare() -> None:
    """Capture and plan once for all ranks."""
    torch.set_num_threads(1)
    for stages in (2, 4):
        planned(captured(8), stages)


@cache
def planned(gm: fx.GraphModule, stages: int) -> sk.Plan:
    return sk.plan(gm, sk.policies.Stages(stages), sk.costs.flops(gm))


def split_of(gm: fx.GraphModule, stages: int, replicas: int = 1) -> Split:
    plan = planned(gm, stages)
    parts = {key: replace(part, replicas=replicas) for key, part in plan.parts.items()}
    return sk.split(gm, replace(plan, parts=parts))


def optimizer_of(kind: str, pipe: Any) -> tuple[Any, Any]:
    if kind == "adamw":  # each parameter in a group of its own, so that ranks have other numbers of groups
        named = pipe.named_parameters()
        own = {id(p): name for name, p in named.items()}
        groups = [{"params": [p], "lr": 1e-2 / (1 + len(own[id(p)]) % 3)} for p in pipe.parameters()]
        made = torch.optim.AdamW(groups)
        return made, SequentialLR(made, [LinearLR(made, 0.5, 1.0, 2), CosineAnnealingLR(made, 20)], [2])
    if kind == "sgd":
        made = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return made, MultiStepLR(made, [2, 4, 4], 0.5)
    made = Counting(pipe.parameters())
    return made, LambdaLR(made, lambda step: 0.9**step)


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=60),
    )  # fmt: skip


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def batch_of(position: int) -> torch.Tensor:
    """Draw a batch from all generators; all ranks draw the same."""
    index = torch.randint(16, (6 * COUNT,)) + position + random.randrange(16) + int(np.random.randint(16))
    return index % 16


def digest(pipe: Any, optimizer: Any) -> dict[str, str]:
    """Return a digest of each parameter, buffer and tensor of the optimizer's state, and the other state as text."""
    found = {}
    for name, tensor in pipe.named_tensors().items():
        found[name] = of_tensor(tensor)
        for key, value in optimizer.state.get(tensor, {}).items():
            each = value if isinstance(value, list) else [value]
            found[f"{name}.{key}"] = ", ".join(of_tensor(v) if isinstance(v, torch.Tensor) else repr(v) for v in each)
    for group in optimizer.param_groups:
        for p in group["params"]:
            (name,) = {n for n, q in pipe.named_parameters().items() if q is p}
            found[f"{name} lr"] = str(float(group["lr"]))
    return found


def of_tensor(tensor: torch.Tensor) -> str:
    whole = full_tensor(tensor.detach()).contiguous()
    return f"{whole.dtype}{hashlib.sha256(whole.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]}"


def run(case: dict[str, Any]) -> dict[str, Any]:
    gm, resume = captured(case.get("width", 8)), case.get("resume", False)
    pipe = pipeline(split_of(gm, case["stages"], case.get("replicas", 1)), "1f1b", COUNT, seed=7)
    if case.get("sharded"):
        pipe.shard()
    optimizer, scheduler = optimizer_of(case["optimizer"], pipe)
    if case.get("forget") == "scheduler":
        scheduler = None
    if resume:  # nothing that is loaded has the right value already
        with torch.no_grad():
            for p in pipe.named_tensors().values():
                p.fill_(9.0)
        for group in optimizer.param_groups:
            group["lr"] = 3.0
    seed(99 if resume else 5)
    loader, saved, losses = Loader(), None, []
    if "folder" in case:
        state = {"epoch": 0, "best": float("inf"), "mean": torch.zeros(3), "sizes": (1, {2: "x"})}
        saved = open_checkpoints(
            case["folder"], pipe, optimizer, scheduler=scheduler, loader=loader, state=state, resume=resume,
            keep=case.get("keep", 2),
        )  # fmt: skip
    opened = digest(pipe, optimizer)
    for step in range(pipe.steps, case["steps"]):
        result = pipe.step(batch_of(next(loader)))
        losses.append(None if result.loss is None else float(result.loss))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if saved is not None and (step + 1 == case["steps"] or case.get("every")):
            saved.state["epoch"] += 1
            saved.state["mean"] += 1
            saved.save(wait=not case.get("beside"))
    found = digest(pipe, optimizer)
    if saved is not None:
        saved.wait()
    more = {} if saved is None else {"state": repr(saved.state), "last": saved.last and saved.last.name}
    return {"losses": losses, "opened": opened, "digest": found, "draw": float(torch.rand(())), **more}


def main() -> None:
    case = json.loads(sys.argv[1])
    if case["ranks"] != int(os.environ["WORLD_SIZE"]):
        return
    start()
    try:
        found = run(case)
    except SplitError as error:
        found = {"code": error.code, "said": str(error)}
    print(json.dumps({"rank": dist.get_rank(), **found}), flush=True)
    dist.destroy_process_group()
