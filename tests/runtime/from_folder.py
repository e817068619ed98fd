"""One rank: loads its stages from a folder and trains them beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from same_as_whole import batch_of, example, square, start
from torch import fx

import splitkit as sk
from splitkit.runtime import open_stages, pipeline, save_stages
from splitkit.testing.pipelines import train_both

PREPARED: list[tuple[dict[str, Any], dict[str, torch.Tensor], fx.GraphModule, Path]] = []


def prepare() -> None:
    """Capture, split and save once, before there are ranks."""
    torch.set_num_threads(1)
    for number, case in enumerate(json.loads(sys.argv[1])):
        model, inputs = example(case["model"])
        gm = sk.capture(model, **inputs)
        folder = Path(sys.argv[2]) / str(number)
        save_stages(sk.split(gm, sk.policies.Stages(case["stages"])), folder)
        PREPARED.append((case, inputs, gm, folder))


def run(case: dict[str, Any], inputs: dict[str, torch.Tensor], gm: fx.GraphModule, folder: Path) -> dict[str, Any]:
    by_output, count = case["model"] == "unet", case["microbatches"]
    held = open_stages(folder)
    pipe = pipeline(held, case["schedule"], count, seed=7, loss=square if by_output else None)
    batches = []
    for step in range(2):
        batch = batch_of(inputs, count, step)
        batches.append(batch | ({"target": torch.randn(2 * count, *gm(**inputs).shape[1:])} if by_output else {}))
    seen = train_both(pipe, batches, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3), whole=gm)
    outputs = pipe.infer(**{name: value for name, value in batches[0].items() if name != "target"})
    return {
        "gradient": max(s.gradient for s in seen), "weight": max(s.weight for s in seen), "own": pipe.stages,
        "loaded": len(held.parts), "names": sorted(pipe.state_dict()),
        "outputs": None if outputs is None else [type(o).__name__ for o in outputs],
    }  # fmt: skip


def main() -> None:
    start()
    for prepared in PREPARED:
        print(json.dumps(prepared[0] | run(*prepared) | {"rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
