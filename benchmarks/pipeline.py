"""Steps of training on two real processes, beside torch's ``pipeline()`` and stages by hand: ``--json`` for machines.

All that is compared runs in the same two gloo processes, one thread each, under 1F1B, in turns: a round has one step of
each, in another order every time, and a figure is the median of the rounds' ratios. ``step`` is the time of the slower
process from a barrier to the end; ``busy`` the processor seconds of the busier process; ``waited`` how much of the step
a process was ready and had no core, the larger of the two.

Beware of other load. Where processes wait for a core, a step takes as long as all the work of both, however it is
divided, and says nothing of balance: the same two cuts were 0.37 and 0.46 s with cores of their own, and 0.79 and 0.80
beside four other processes. On a busy Linux give them the cores: ``sudo chrt -r 1 python benchmarks/pipeline.py``.

models    splitkit's stages (``Stages(2)`` at measured prices) against ``torch.distributed.pipelining.pipeline`` with a
          split point by hand after half of the layers, and against that same cut by splitkit; without labels in the
          model and without dropout, which torch could not run or compare. What it says of a model that it cannot run at
          all is in the row.
overhead  the same cut of the same modules by splitkit's chain and as a hand-written `PipelineStage` with its shapes
          given; and on modules that compute next to nothing, the microseconds that a microbatch takes more on a rank.
          "not compared" is the chain without the comparison of the ranks at the start of a step, and the microseconds
          of a step are those of that comparison.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint
from torch.distributed.pipelining import pipeline as torch_pipeline
from torch.nn.functional import cross_entropy

import splitkit as sk
from splitkit.policies import AtMarkers, Stages
from splitkit.runtime import pipeline
from splitkit.runtime.ranks.step_agreement import digest_of_tensors
from splitkit.testing import models

RANKS = 2
SECONDS = 300.0
FIGURES = ("step", "busy", "waited")
Step = Callable[[], None]
Maker = Callable[[int], Step]
"""Rank -> what runs a step there."""


class Logits(nn.Module):
    """A model of transformers as torch's ``pipeline`` can take it: tensors in, one tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


class Uneven(nn.Module):
    """Layers of which each is wider than the one before."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, w), nn.GELU(), nn.Linear(w, width))
            for w in (width * (1 + i) for i in range(layers))
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Even(nn.Module):
    """Equal blocks, which are as many stages by hand as one likes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass(frozen=True)
class Case:
    """A model to be cut.

    Attributes:
        model: takes ``x``.
        x: one microbatch.
        target: of one microbatch.
        loss: of output and target.
        half: the module that the second half of the layers begins with.
    """

    model: nn.Module
    x: torch.Tensor
    target: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    half: str


def words(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def transformer(name: str, half: str, **sizes: int) -> Case:
    """Random weights; GPT-2's head of its own, as torch does not add up the gradients of a shared one."""
    example = models.build(name, **sizes)
    model, inputs = example.model.eval(), dict(example.kwargs)
    model.config.use_cache = False
    if name == "gpt2":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    target = inputs.pop("labels")
    inputs.pop("attention_mask", None)
    (x,) = inputs.values()
    return Case(Logits(model), x, target, cross_entropy if name == "vit" else words, f"model.{half}")


def cases() -> Mapping[str, Callable[[], Case]]:
    text = {"heads": 4, "batch": 2, "seq": 64}
    return {
        "gpt2, large head": lambda: transformer(
            "gpt2", "transformer.h.3", layers=6, width=128, vocab=20000, **text),
        "uneven layers": lambda: Case(
            Uneven(8, 192), torch.randn(64, 192), torch.randn(64, 16), square, "layers.4"),
        "vit": lambda: transformer(
            "vit", "vit.layers.4", layers=8, width=128, heads=4, image=96, patch=16, classes=1000, batch=4),
        "llama": lambda: transformer("llama", "model.layers.3", layers=6, width=128, vocab=16000, **text),
    }  # fmt: skip


class Prepared:
    """A case cut in each way, before there are two processes."""

    def __init__(self, case: Case, microbatches: int) -> None:
        self.case, self.count = case, microbatches
        self.x, self.target = (t.repeat(microbatches, *[1] * (t.dim() - 1)) for t in (case.x, case.target))
        self.gm = sk.capture(case.model, case.x)

    def of_torch(self) -> Maker:
        """Torch's own, with the split point by hand."""
        pipe = torch_pipeline(self.case.model, (self.case.x,), split_spec={self.case.half: SplitPoint.BEGINNING})

        def made(rank: int) -> Step:
            return self.scheduled(pipe.build_stage(rank, torch.device("cpu")))

        return made

    def by_hand(self) -> Maker:
        """The halves of `Even` as stages, with the shapes of what crosses."""
        layers = self.case.model.layers
        middle = len(layers) // 2
        halves = layers[:middle], layers[middle:]
        like = torch.empty_like(self.case.x, device="meta")
        sent = like.clone().requires_grad_()

        def made(rank: int) -> Step:
            stage = PipelineStage(
                halves[rank], rank, RANKS, torch.device("cpu"), input_args=(sent if rank else like,),
                output_args=(sent.clone(),),
            )  # fmt: skip
            return self.scheduled(stage)

        return made

    def scheduled(self, stage: Any) -> Step:
        """A step of torch's schedule."""
        schedule = Schedule1F1B(stage, self.count, loss_fn=self.case.loss)
        parameters = list(stage.submod.parameters())

        def step() -> None:
            if stage.is_first:
                schedule.step(self.x)
            else:
                schedule.step(target=self.target, losses=[], return_outputs=False)
            for p in parameters:
                p.grad = None

        return step

    def of_splitkit(self, policy: Any, costs: Any = None, compared: bool = True) -> Maker:
        """Splitkit's stages; without the comparison of the ranks at the start of a step if not ``compared``."""
        split = sk.split(self.gm, policy, costs=costs)

        def made(rank: int) -> Step:
            pipe = pipeline(split, "1f1b", self.count, loss=self.case.loss)
            if not compared:
                pipe._agreement.begin = lambda prepare: (prepare()[1], False, False)
            parameters = pipe.parameters()

            def step() -> None:
                pipe.step(self.x, target=self.target)
                for p in parameters:
                    p.grad = None

            return step

        return made

    def measured(self) -> Any:
        """Prices of the ops, in seconds of the processor."""
        with patch.object(time, "perf_counter", time.process_time):
            return sk.costs.measured(self.gm, (self.case.x,), min_run_time=0.02, backward=True)


def waited() -> float:
    """Seconds that this thread was ready and had no core; 0 where the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def rounds_of(makers: Mapping[str, Maker], rank: int, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """`FIGURES` of each in each round."""
    steps = {name: make(rank) for name, make in makers.items()}
    for step in steps.values():
        for _ in range(2):
            step()
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    order, dice = list(steps), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            dist.barrier()
            start, busy, idle = time.perf_counter(), time.thread_time(), waited()
            steps[name]()
            took = time.perf_counter() - start
            found[name].append((took, time.thread_time() - busy, (waited() - idle) / took))
    return found


def inside(makers: Mapping[str, Maker], rank: int, rounds: int, store: str, queue: Any) -> None:
    """A process."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
        )
        queue.put((rank, rounds_of(makers, rank, rounds)))
        dist.destroy_process_group()
    except Exception as error:
        queue.put((rank, f"{type(error).__name__}: {str(error).splitlines()[0]}"))


def run(makers: Mapping[str, Maker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """For each the `FIGURES` of its rounds, of the process that has more."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=inside, args=(makers, rank, rounds, f"{folder}/store", queue))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        try:
            found = dict(queue.get(timeout=SECONDS) for _ in processes)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    if failed := [answer for answer in found.values() if isinstance(answer, str)]:
        raise RuntimeError(failed[0])
    return {
        name: {
            what: [
                max(times[i] for times in pair) for pair in zip(*(found[r][name] for r in range(RANKS)), strict=True)
            ]
            for i, what in enumerate(FIGURES)
        }
        for name in makers
    }


def ratios(times: Mapping[str, Mapping[str, list[float]]], to: str) -> dict[str, dict[str, Any]]:
    """Of all others to one: the medians of the rounds' ratios, and the medians themselves; and what was waited."""
    return {
        name: {
            what: {
                "seconds": statistics.median(mine[what]),
                "ratio": statistics.median(a / b for a, b in zip(mine[what], times[to][what], strict=True)),
            }
            for what in ("step", "busy")
        }
        | {"waited": statistics.median(mine["waited"])}
        for name, mine in times.items()
    }


def model_row(name: str, case: Case, microbatches: int, rounds: int) -> dict[str, Any]:
    """A model cut by splitkit, by hand with splitkit, and by torch if it can."""
    prepared = Prepared(case, microbatches)
    makers = {
        "splitkit": prepared.of_splitkit(Stages(RANKS), prepared.measured()),
        "same cut by splitkit": prepared.of_splitkit(AtMarkers({case.half: "beginning"})),
    }
    row: dict[str, Any] = {"model": name}
    try:
        times = run({**makers, "torch": prepared.of_torch()}, rounds)
    except Exception as error:  # when it is made, or over gloo
        row["torch cannot"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        times = run(makers, rounds)
    return row | {"ratios": ratios(times, "splitkit")}


def overhead_row(name: str, case: Case, microbatches: int, rounds: int) -> dict[str, Any]:
    """The chain over stages by hand."""
    prepared = Prepared(case, microbatches)
    half = AtMarkers({case.half: "beginning"})
    makers = {
        "chain": prepared.of_splitkit(half),
        "not compared": prepared.of_splitkit(half, compared=False),
        "by hand": prepared.by_hand(),
    }
    times = run(makers, rounds)

    def more(other: str) -> float:
        return 1e6 * statistics.median(a - b for a, b in zip(times["chain"]["busy"], times[other]["busy"], strict=True))

    return {
        "model": name, "ratios": ratios(times, "by hand"), "more us a microbatch": more("by hand") / microbatches,
        "us a step to compare": more("not compared"),
    }  # fmt: skip


def digest_rate() -> float:
    """Bytes a second of the digests by which ranks compare weights and batches."""
    given, found = torch.randn(1 << 24), []
    for _ in range(5):
        start = time.thread_time()
        digest_of_tensors([given])
        found.append(given.nbytes / (time.thread_time() - start))
    return statistics.median(found)


def even(layers: int, width: int, rows: int) -> Case:
    x = torch.randn(rows, width)
    return Case(Even(layers, width), x, torch.randn_like(x), square, f"layers.{layers // 2}")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model",
        "by",
        "step (s)",
        "step ratio",
        "busy (s)",
        "busy ratio",
        "waited",
        "us a microbatch more",
        "us to compare",
    )
    for row in rows:
        for name, found in row["ratios"].items():
            cells = [f"{found[what][key]:.4f}" for what in ("step", "busy") for key in ("seconds", "ratio")]
            more = f"{row['more us a microbatch']:.0f}" if "more us a microbatch" in row else ""
            compare = f"{row['us a step to compare']:.0f}" if "us a step to compare" in row else ""
            table.add_row(row["model"], name, *cells, f"{found['waited']:.0%}", more, compare)
    Console(width=140).print(table)
    for row in rows:
        if "torch cannot" in row:
            print(f"{row['model']}, torch: {row['torch cannot']}")


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda name=name, make=make: model_row(name, make(), args.microbatches, args.rounds)
        for name, make in cases().items()
    } | {
        name: lambda name=name, sizes=sizes: overhead_row(name, even(*sizes), args.microbatches, args.rounds)
        for name, sizes in {"overhead": (8, 256, 128), "overhead, next to nothing": (2, 8, 2)}.items()
    }
    rows = []
    for name, make in makers.items():
        if not args.only or name.startswith(tuple(args.only)):
            print(name, file=sys.stderr, flush=True)
            rows.append(make())
    summary = {
        "torch over splitkit, step": {
            r["model"]: r["ratios"]["torch"]["step"]["ratio"] for r in rows if "torch" in r["ratios"]
        },
        "the cut by hand over splitkit's, step": {
            r["model"]: r["ratios"]["same cut by splitkit"]["step"]["ratio"] for r in rows if "splitkit" in r["ratios"]
        },
        "the cut by hand over splitkit's, busy": {
            r["model"]: r["ratios"]["same cut by splitkit"]["busy"]["ratio"] for r in rows if "splitkit" in r["ratios"]
        },
        "overhead of the chain, busy": {
            r["model"]: r["ratios"]["chain"]["busy"]["ratio"] - 1 for r in rows if "chain" in r["ratios"]
        },
        "of it to compare the ranks, busy": {
            r["model"]: r["ratios"]["chain"]["busy"]["ratio"] - r["ratios"]["not compared"]["busy"]["ratio"]
            for r in rows
            if "chain" in r["ratios"]
        },
        "digest, GB/s of a core": digest_rate() / 1e9,
        "waited, at most": max((f["waited"] for r in rows for f in r["ratios"].values()), default=0.0),
    }
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        show(rows)
        Console(width=140).print(summary)


if __name__ == "__main__":
    main()
