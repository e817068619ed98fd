"""Forward and joint pipelines that were captured on the CPU, on meta, on the first device or on each rank's own."""

from __future__ import annotations

import json
import sys
from typing import Any

import on_ranks
import simgpu
import staged_group
import torch
import torch.distributed as dist
from torch import nn

import splitkit as sk
from splitkit.runtime import pipeline, planned_once

MICROBATCHES = 4
STAGES = {"gpipe": 2, "1f1b": 2, "interleaved1f1b": 4, "zbvzerobubble": 4}


class Net(nn.Module):
    """A tied table, dropout, a buffer that is written, and what a capture burns in: constants, factories, indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        home = "cpu" if x.is_meta else x.device
        h = self.table(x + at % 2) * torch.tensor([1.0, 0.5] * 4, device=home).to(x.device)
        for layer in self.layers:
            h = h + nn.functional.dropout(self.norm(layer(h)).tanh(), 0.2, True)
        self.seen.add_(h.detach().mean())
        noise = 0.1 * torch.randn(h.shape, dtype=h.dtype, device=h.device)
        h = (h + noise)[:, at.flip(0)] * torch.full((8,), 2.0, device=x.device)
        return nn.functional.cross_entropy((h @ self.table.weight.t()).flatten(0, 1), y.flatten())


def net(device: str) -> Net:
    torch.manual_seed(0)
    return Net().double().train().to(device)


def batch_of(step: int, rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    return {name: torch.randint(15, (rows, 5), generator=rng).to(device) for name in ("x", "y")}


def forward(device: str, schedule: str) -> Any:
    gm = sk.capture(net(device), **batch_of(0, 2, device))
    plan = planned_once(gm, lambda: sk.plan(gm, sk.policies.Stages(STAGES[schedule])))
    return pipeline(sk.split(gm, plan), schedule, MICROBATCHES, seed=7)


def joint(device: str, schedule: str) -> Any:
    model = net(device)
    found = sk.capture_joint(model, **batch_of(0, 2, device))
    if device == "meta":
        model.to_empty(device="cpu").load_state_dict(net("cpu").state_dict())
    policy = sk.policies.Pipeline(STAGES[schedule], schedule, microbatches=MICROBATCHES)
    plan = planned_once(found.graph_module, lambda: found.split(policy).plan)
    return pipeline(found.split(plan), schedule, MICROBATCHES, seed=7)


def trained(kind: str, where: str, schedule: str) -> dict[str, Any]:
    """Three steps beside the whole model on the CPU."""
    device = f"{simgpu.TYPE}:{dist.get_rank()}" if where == "home" else where
    pipe = {"forward": forward, "joint": joint}[kind](device, schedule)
    whole = net("cpu")
    mine, theirs = (torch.optim.AdamW(p, lr=1e-2, eps=1e-3) for p in (pipe.parameters(), whole.parameters()))
    worst = {"loss": 0.0, "weight": 0.0}
    for step in range(3):
        batch = batch_of(step, 2 * MICROBATCHES)
        found, losses = pipe.step(**batch), on_ranks.unsplit_step(pipe, whole, batch, step)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        held, own = dict(whole.named_parameters()), pipe.named_parameters()
        worst["weight"] = max(worst["weight"], *(on_ranks.apart(own[n].detach(), held[n].detach()) for n in own))
        worst["loss"] = max(worst["loss"], 0.0 if found.losses is None else on_ranks.apart(found.losses, losses))
    return {**worst, "devices": sorted({str(p.device) for p in own.values()})}


def refused() -> dict[str, Any]:
    """The second rank captures a graph that also uses another device than its own."""

    class Wandering(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            far = torch.ones(4, device=f"{simgpu.TYPE}:{2 * dist.get_rank()}").cpu()
            return super().forward(x + far.to(x.device)).sum()

    home = f"{simgpu.TYPE}:{dist.get_rank()}"
    gm = sk.capture(Wandering(4, 4).to(home), torch.randn(2, 4, device=home))
    try:
        pipeline(sk.split(gm, sk.policies.Stages(2)), "gpipe", MICROBATCHES)
    except sk.errors.SplitError as error:
        return {"refused": str(error)}
    return {}


def attention() -> dict[str, Any]:
    """The ops of a training step with attention that is captured on the rank's device."""

    class Attention(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).unflatten(-1, (2, 4)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q).sum()

    home = f"{simgpu.TYPE}:{dist.get_rank()}"
    joint = sk.capture_joint(Attention(8, 8).to(home), torch.randn(2, 4, 8, device=home))
    return {"kernels": [str(node.target) for node in joint.graph_module.graph.nodes]}


def prepare() -> None:
    simgpu.register()
    staged_group.register()


def main() -> None:
    on_ranks.start()
    for case in json.loads(sys.argv[1]):
        found = {"refused": refused, "attention": attention}.get(case[0], lambda: trained(*case))()
        print(json.dumps({"case": case, "rank": dist.get_rank(), **found, "races": simgpu.races()}), flush=True)
    dist.destroy_process_group()
