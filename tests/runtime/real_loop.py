"""One rank: what a training loop needs around its steps, beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from same_as_whole import start
from torch import nn

import splitkit as sk
from splitkit.runtime import pipeline
from splitkit.testing.pipeline_check import UnsplitModel

MICROBATCHES = 4


class Tied(nn.Module):
    """An embedding that the head shares, dropout, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = h + self.drop(layer(h).tanh())
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch(seed: int, rows: int = 2 * MICROBATCHES) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randint(32, (rows, 5), generator=rng) for name in ("x", "y")}


def halves(model: nn.Module, replicas: int = 1, **inputs: torch.Tensor) -> sk.Split:
    gm = sk.capture(model, **inputs)
    plan = sk.plan(gm, sk.policies.Stages(2))
    parts = {key: replace(part, replicas=replicas) for key, part in plan.parts.items()}
    return sk.split(gm, replace(plan, parts=parts))


def tied(replicas: int = 1) -> sk.Split:
    torch.manual_seed(0)
    return halves(Tied(), replicas, **batch(0, 2))


def clip(split: sk.Split, sharded: bool = False) -> dict[str, Any]:
    """The norm and the clipped gradients, for three norms."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    if sharded:
        pipe.shard()
    unsplit, found = UnsplitModel(pipe), list[dict[str, Any]]()
    for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
        result, losses = pipe.step(**batch(step), loss_everywhere=True), unsplit.step(**batch(step))
        limit = float(torch.nn.utils.clip_grad_norm_(unsplit.model.parameters(), float("inf"), norm_type)) / 3
        true = torch.nn.utils.clip_grad_norm_(unsplit.model.parameters(), limit, norm_type)
        norm = pipe.clip_grad_norm(limit, norm_type)
        found.append(
            {
                "norm": float(norm), "true": float(true), "apart": unsplit.deviation(result, losses).gradient,
                "loss": float(result.loss), "unsplit loss": float(losses.mean()), "losses": len(result.losses),
            }
        )  # fmt: skip
        for parameter in (*pipe.parameters(), *unsplit.model.parameters()):
            parameter.grad = None
    return {"steps": found}


CASES: dict[str, tuple[int, Callable[[], sk.Split], Callable[[sk.Split], dict[str, Any]]]] = {
    "clip": (2, tied, clip),
    "clip replicas": (4, lambda: tied(2), clip),
    "clip shards": (4, lambda: tied(2), lambda split: clip(split, sharded=True)),
}
"""Name -> ranks, what is prepared once, what each rank does with it."""
PREPARED: dict[str, Any] = {}


def prepare() -> None:
    torch.set_num_threads(1)
    for name in json.loads(sys.argv[1]):
        PREPARED[name] = CASES[name][1]()


def main() -> None:
    start()
    for name, prepared in PREPARED.items():
        ranks, _, body = CASES[name]
        if ranks == dist.get_world_size():
            print(json.dumps({"case": name, "rank": dist.get_rank()} | body(prepared)), flush=True)
    dist.destroy_process_group()
