"""One rank: loads its stages from a folder and trains them beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from same_as_whole import batch_of, captured, planned, square, start
from torch import fx
from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble
from train_both import train_both

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import form_output, open_stages, pipeline, reduced_ties, save_stages, stage

PREPARED: list[tuple[dict[str, Any], dict[str, torch.Tensor], fx.GraphModule, Path]] = []


def prepare() -> None:
    """Capture, split and save once, before there are ranks."""
    torch.set_num_threads(1)
    for number, case in enumerate(json.loads(sys.argv[1])):
        gm, inputs = copy.deepcopy(captured(case["model"])[:2])
        folder = Path(sys.argv[2]) / str(number)
        save_stages(sk.split(gm, sk.Plan.from_dict(gm.graph, planned(case["model"], case["stages"]))), folder)
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
    try:
        refused = repr(pipe.evaluation(gm))
    except SplitError as error:
        refused = str(error)
    return {
        "refused": refused,
        "gradient": max(s.gradient for s in seen), "weight": max(s.weight for s in seen), "own": pipe.stages,
        "loaded": len(held.parts), "names": sorted(pipe.state_dict()),
        "outputs": None if outputs is None else [type(o).__name__ for o in outputs],
    }  # fmt: skip


def by_torch(folder: Path, inputs: dict[str, torch.Tensor], gm: fx.GraphModule, homes: list[int]) -> dict[str, float]:
    """Two steps of torch's own schedule, whose gradients are added up, beside the unsplit model."""
    count, held, whole = 4, open_stages(folder), copy.deepcopy(gm)
    own = stage(held, dist.get_rank(), rank_of=homes)
    kind = Schedule1F1B if len(homes) == 2 else ScheduleZBVZeroBubble
    schedule = kind(own, count, loss_fn=lambda out, _: form_output(own, out)["loss"] / count, scale_grads=False)
    for step in range(2):
        batch, seeds = batch_of(inputs, count, step), torch.arange(count) + 7 * step
        with reduced_ties(own):
            number = torch.arange(count) if dist.get_rank() == homes[-1] else None
            schedule.step(**batch, microbatch_seed=seeds, target=number, return_outputs=False)
        for i in range(count):
            torch.manual_seed(int(seeds[i]))
            (whole(**{name: t.chunk(count)[i] for name, t in batch.items()})["loss"] / count).backward()
    found = {}
    for name, parameter in held.module.named_parameters():
        if name.split(".")[0] in {held.names[key] for key in held.parts}:
            wants = whole.get_parameter(held.qualified_names[name]).grad
            found[name] = float((parameter.grad - wants).abs().max() / wants.abs().max().clamp(min=1e-12))
    return found


def main() -> None:
    start()
    for prepared in PREPARED:
        if homes := prepared[0].get("homes"):
            case, inputs, gm, folder = prepared
            print(json.dumps(case | {"apart": by_torch(folder, inputs, gm, homes), "model": "by torch"}), flush=True)
            continue
        print(json.dumps(prepared[0] | run(*prepared) | {"rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
