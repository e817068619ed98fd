"""One rank: each case trains a pipeline on batches of many sizes beside the model itself; a JSON line for each."""

from __future__ import annotations

import copy
import gc
import json
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capturedmodels import stored
from same_as_whole import TINY, start
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import splitkit as sk
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime import form_output, open_stages, pipeline, reduced_ties, save_stages, stage
from splitkit.runtime.folder.load import StageFolder
from splitkit.testing import models
from splitkit.testing.pipeline_check import UnsplitModel, gradient_of, relative_difference

Batch = dict[str, torch.Tensor]


class Plain(nn.Module):
    """Only floats with a gradient cross, as old versions of torch need; some turned, and one past a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = first = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            x = layer(x.transpose(0, 1).tanh()).transpose(0, 1)
        return {"loss": ((x * first).mean((1, 2)) - y).square().mean()}


def batch_of(name: str, rows: int, length: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    if name == "plain":
        return {"x": torch.randn(rows, length, 8, generator=rng), "y": torch.randn(rows, generator=rng)}
    tokens = torch.randint(TINY["vocab"], (rows, length), generator=rng)
    made = {"input_ids": tokens, "labels": tokens.roll(1, -1)}
    return made | ({"attention_mask": torch.ones_like(tokens)} if name == "bert" else {})


@cache
def model_of(name: str, drops: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Plain() if name == "plain" else models.build(name, **TINY).model
    return model.train(drops)


@cache
def captured(name: str, drops: bool) -> fx.GraphModule:
    def make() -> fx.GraphModule:
        return sk.capture(copy.deepcopy(model_of(name, drops)), dynamic=True, **batch_of(name, 2, 8, 0))

    return stored(f"{name} {drops} of {Path(__file__).read_text()}", make)


PREPARED: list[tuple[dict[str, Any], Split | StageFolder]] = []


def prepare() -> None:
    """Capture and split once for all ranks, before they are processes of their own."""
    torch.set_num_threads(1)
    for case in json.loads(sys.argv[1]):
        gm = captured(case["model"], case["drops"])
        plan = sk.plan(gm, sk.policies.Stages(case["stages"]), sk.costs.flops(gm))
        counts = zip(plan.parts.items(), case["replicas"], strict=True)
        parts = {key: replace(part, replicas=count) for (key, part), count in counts}
        split = sk.split(gm, replace(plan, parts=parts))
        if case["by"] == "folder":
            with tempfile.TemporaryDirectory() as folder:
                save_stages(split, folder)
                PREPARED.append((case, held := open_stages(folder)))
                held.load(range(case["stages"]))
        else:
            PREPARED.append((case, split))


def by_torch(case: dict[str, Any], split: Split | StageFolder) -> dict[str, Any]:
    """Torch's own schedule on the stages of a graph with symbolic sizes, at the sizes of the capture."""
    batch, count = batch_of(case["model"], 8, 8, 0), case["microbatches"]
    whole, own, losses = copy.deepcopy(model_of(case["model"], False)), stage(split, dist.get_rank()), []
    schedule = Schedule1F1B(own, count, loss_fn=lambda out, _: form_output(own, out)["loss"])
    with reduced_ties(own):
        number = torch.arange(count) if dist.get_rank() else None
        schedule.step(**batch, target=number, losses=losses, return_outputs=False)
    whole(**batch)["loss"].backward()
    known = {name: gradient_of(t) for name, t in whole.named_parameters()}
    names, largest = split.qualified_names, max(float(g.abs().max()) for g in known.values())
    child = split.names[tuple(split.parts)[dist.get_rank()]]
    held = split.module.get_submodule(child).named_parameters(child)
    apart = [relative_difference(gradient_of(t), known[names[name]], 1e-3 * largest) for name, t in held]
    return {"seen": apart}


def run(case: dict[str, Any], split: Split | StageFolder) -> dict[str, Any]:
    name, count = case["model"], case["microbatches"]
    named = {"x": 0} if name == "plain" else None  # attention says which dimension is the sequence
    pipe = pipeline(split, case["schedule"], count, seed=7, batch_dims=named)
    beside = UnsplitModel(pipe) if case["drops"] else None
    seen: list[float | str] = []
    gc.collect()
    gc.disable()  # what is left over must go without it
    for number, step in enumerate(case["batches"]):
        whole = copy.deepcopy(model_of(name, False))
        if isinstance(step[0], int):
            batch: dict[str, Any] = batch_of(name, *step, number)
            loss = whole(**batch)["loss"]
        else:
            each = [batch_of(name, *sizes, 100 * number + i) for i, sizes in enumerate(step)]
            batch = {"microbatches": each}
            loss = sum(whole(**inputs)["loss"] * rows for inputs, (rows, _) in zip(each, step, strict=True))
            loss = loss / sum(rows for rows, _ in step)
        try:
            found = pipe.step(**batch)
        except PipelineError as error:
            seen.append(str(error))
            continue
        if beside is not None:
            apart = beside.deviation(found, beside.step(**batch))
            seen.append(max(apart.loss, apart.gradient, apart.weight))
        else:
            loss.backward()
            seen.append(difference(pipe, whole, found.loss, loss))
        for tensor in pipe.parameters() if beside is None else [*pipe.parameters(), *beside.model.parameters()]:
            tensor.grad = None
    outputs = pipe.infer(**batch)
    live = [stage for stage in gc.get_objects() if issubclass(type(stage), PipelineStage)]
    gc.enable()
    return {"seen": seen, "live": len(live), "own": len(pipe.stages), "outputs": outputs and len(outputs)}


def difference(pipe: Any, whole: nn.Module, found: torch.Tensor | None, loss: torch.Tensor) -> float:
    """The largest relative difference of the loss and of the gradients of this rank."""
    known = dict(whole.named_parameters(remove_duplicate=False))
    largest = max(float(gradient_of(t).abs().max()) for t in known.values())
    own = {name: gradient_of(t) for name, t in pipe.named_parameters().items()}
    apart = [relative_difference(t, gradient_of(known[name]), 1e-3 * largest) for name, t in own.items()]
    return max(*apart, 0.0 if found is None else relative_difference(found, loss.detach()))


def main() -> None:
    start()
    for case, split in PREPARED:
        if case["ranks"] == dist.get_world_size():
            found = by_torch(case, split) if case["by"] == "torch" else run(case, split)
            print(json.dumps(case | found | {"rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
