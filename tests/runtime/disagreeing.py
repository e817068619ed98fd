"""Two ranks that disagree, one case after the other; each rank prints what it was told, as JSON."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from train_both import train_both

import splitkit as sk
from splitkit.errors import PipelineError, SplitError
from splitkit.graph.dataflow import module_path
from splitkit.runtime import open_stages, pipeline, save_stages
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.stage import RankStages

COUNT = 4
CAPTURED: list[tuple[fx.GraphModule, dict[str, Any], Path]] = []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden * self.scale).tanh()
        return self.head(self.drop(hidden))  # in one stage, as torch 2.11 can run it


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(seed: int = 0, rows: int = 2 * COUNT) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randint(16, (rows, 5), generator=rng) for name in ("x", "target")}


def prepare() -> None:
    """Capture, plan and save once for all ranks."""
    torch.manual_seed(0)
    gm = sk.capture(Tied(), batch(rows=2)["x"])
    plan = sk.plan(gm, sk.policies.Stages(2), sk.costs.unit(gm))
    folder = Path(tempfile.mkdtemp())
    save_stages(sk.split(gm, plan), folder)
    CAPTURED.append((gm, plan.to_dict(), folder))


def made(change: Callable[[fx.GraphModule], None] | None = None) -> Pipeline:
    """A pipeline of two stages; ``change`` is called on rank 1 with the graph before it is split."""
    gm, plan, _ = CAPTURED[0]
    gm = copy.deepcopy(gm)
    if change is not None and dist.get_rank() == 1:
        change(gm)
    return pipeline(sk.split(gm, sk.Plan.from_dict(gm.graph, plan)), "1f1b", COUNT, loss=loss, seed=3)


def calls(rank: int) -> None:
    """Calls that differ; after all of them the pipeline trains as if there had been none."""
    pipe = made()
    second = rank == 1
    at = 2 * COUNT - 2 * second
    told("batch", lambda: pipe.step(batch(rank)["x"], target=batch()["target"]))
    told("target", lambda: pipe.step(batch()["x"], target=batch(rank)["target"]))
    told("rows", lambda: pipe.step(batch(rows=at)["x"], target=batch()["target"]))
    told("argument", lambda: pipe.step(**{"y" if second else "x": batch()["x"]}, target=batch()["target"]))
    told("kind", lambda: pipe.step(**batch()) if second else pipe.infer(batch()["x"]))
    pipe.steps = 5 * second
    told("number", lambda: pipe.step(**batch()))
    pipe.steps = 0
    divide = pipe.divide
    pipe.divide = fails if second else divide
    told("bug", lambda: pipe.step(**batch()))
    pipe.divide = divide
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr(RankStages, "_made", refuses)
        told("stages", lambda: pipe.step(**batch()))
    seen = train_both(pipe, [batch(0), batch(1)], lambda p: torch.optim.SGD(p, lr=0.1))
    target = batch()["target"] if second else None
    told("right", lambda: pipe.step(batch()["x"], target=target), len(seen), pipe.steps, *sorted(pipe.needs))


def fails(*args: object, **kwargs: object) -> list[object]:
    raise KeyError("no such target")


def refuses(*args: object) -> None:
    raise PipelineError("SK801", "these stages cannot be made")


def weights(rank: int) -> None:
    """Weights that differ when the pipeline is made, or before its first step, or later."""
    told("alone", lambda: made(lambda gm: gm.get_parameter("layers.3.bias").data.add_(1)))
    told("all", lambda: made(lambda gm: [p.data.add_(1) for p in gm.parameters()]))
    told("frozen", lambda: made(lambda gm: gm.get_parameter("layers.3.bias").requires_grad_(False)))
    pipe = made()
    state = {name: t.clone() for name, t in CAPTURED[0][0].state_dict().items()}
    if rank:
        pipe.named_parameters()["head.weight"].data[3, 3] += 1
    told("copies", lambda: pipe.step(**batch()), pipe.steps)
    pipe.load_state_dict(state)
    told("loaded", lambda: pipe.step(**batch()), pipe.steps)
    if rank:  # only this rank knows that there is something to compare
        pipe.load_state_dict(state | {"head.weight": state["head.weight"] * 2})
    told("later", lambda: pipe.step(**batch()), pipe.steps)


def diverging(rank: int) -> None:
    """Ranks that part while they train: an evaluation, a checkpoint or a comparison finds it."""

    def trained(**options: float) -> tuple[Pipeline, torch.optim.Optimizer]:
        pipe = made()
        optimizer = torch.optim.SGD(pipe.parameters(), **{"lr": 0.1, **options})
        pipe.compare_optimizer(optimizer)
        for _ in range(2):
            pipe.step(**batch(pipe.steps))
            optimizer.step()
        return pipe, optimizer

    pipe, optimizer = trained()
    told("agree", lambda: (pipe.compare_ranks(), pipe.infer(batch()["x"])))
    pipe.step(**batch())
    if rank:
        pipe.named_parameters()["head.weight"].data[3, 3] += 1
    told("changed", lambda: pipe.infer(batch()["x"]))
    told("option at once", lambda: trained(momentum=0.5 * rank))
    pipe, optimizer = trained()
    optimizer.param_groups[0]["lr"] *= 1 + rank
    told("option later", pipe.compare_ranks)
    pipe, optimizer = trained()
    pipe.step(**batch())
    if not rank:
        optimizer.step()
    told("forgotten", pipe.compare_ranks)


def several(rank: int) -> None:
    """Pipelines of the same weights: a second one that has each weight on the same rank, and one that has not."""
    gm, plan, _ = copy.deepcopy(CAPTURED[0])
    names = [n.name for n in gm.graph.nodes]
    later = names[names.index(next(n.name for n in gm.graph.nodes if module_path(n) == "layers.1")) :]
    same = sk.Plan.from_dict(gm.graph, plan)
    cuts = same, same, lambda n: int(n.name in later) if n.op == "call_function" else None
    first, alike, other = (pipeline(sk.split(gm, cut), "1f1b", COUNT, loss=loss, seed=3) for cut in cuts)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for pipe in (other, alike, first):
        pipe.step(**batch())
    optimizer.step()
    told("alike", lambda: alike.step(**batch()))
    told("other cut", lambda: other.step(**batch()), other.steps)


def replicas(rank: int) -> None:
    """Two replicas of one stage, whose copies differ before they are sharded, and are no copies any more after that."""
    gm = copy.deepcopy(CAPTURED[0][0])
    plan = sk.plan(gm, sk.policies.Stages(2, replicas=(2,)), sk.costs.unit(gm))
    pipe = pipeline(sk.split(gm, plan), "1f1b", COUNT, loss=loss)
    changed = pipe.named_parameters()["layers.0.bias"].data
    changed *= 1 + rank
    told("replica", lambda: pipe.step(**batch()))
    changed /= 1 + rank
    pipe.step(**batch())
    changed *= 1 + rank
    told("replica later", pipe.compare_ranks)
    changed /= 1 + rank
    pipe.shard()
    told("sharded", lambda: pipe.step(**batch()))


def unequal(rank: int) -> None:
    """Ranks that cannot compare everything: weights on meta, stages of a folder, a stage without parameters."""

    def on_meta() -> None:
        gm, plan = copy.deepcopy(CAPTURED[0][0]), CAPTURED[0][1]
        if not rank:
            gm.get_submodule("layers.3").bias = nn.Parameter(torch.empty(8, device="meta"))
        pipeline(sk.split(gm, sk.Plan.from_dict(gm.graph, plan)), "1f1b", COUNT, loss=loss).step(**batch())

    def of_folder(lacks: bool) -> None:
        folder = CAPTURED[0][2]
        if lacks and rank:
            folder = Path(tempfile.mkdtemp())
            for file in CAPTURED[0][2].glob("*.json"):
                (folder / file.name).write_bytes(file.read_bytes())
        pipeline(open_stages(folder), "1f1b", COUNT, loss=loss).step(**batch())

    def bare() -> None:
        gm = sk.capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.zeros(2, 8))
        split = sk.split(gm, lambda node: int("tanh" in node.name))
        pipe = pipeline(split, "1f1b", COUNT, loss=lambda output, target: output.sum())
        assert len(pipe.named_parameters()) == 2 * (rank == 0)
        pipe.step(torch.ones(2 * COUNT, 8))

    told("lacks", lambda: of_folder(True))
    told("folder", lambda: of_folder(False))
    told("bare", bare)
    told("meta", on_meta)


def gone(rank: int) -> None:
    pipe = made()
    pipe.step(**batch())
    if rank:
        os._exit(0)
    told("gone", lambda: pipe.step(**batch()))


def told(case: str, run: Callable[[], object], *more: object) -> None:
    said, code = "", ""
    try:
        run()
    except SplitError as error:
        said, code = str(error), error.code
    except KeyError as error:
        said = repr(error)
    print(json.dumps({"case": case, "rank": dist.get_rank(), "said": said, "sk": code, "more": more}), flush=True)


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=2, timeout=timedelta(seconds=30),
    )  # fmt: skip
    for run in (calls, weights, several, diverging, replicas, unequal, gone):
        run(rank)
