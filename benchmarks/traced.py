"""Predict steps of pipelines from one trace of one process, and run them: ``--json`` for machines.

Each model is traced by torch's profiler in one process with one thread. Plans with random cuts between layers are
priced by this trace alone and simulated under two schedules each. Two gloo processes then run them. Printed are the
simulated and the measured step, the median error, and the share of pairs that were predicted in the order in which they
ran (pairs of one model; ``--apart`` leaves out those that were measured closer together).

The speed of a shared machine changes by half within a minute, which spoils absolute times. So both processes run a
plain step of the whole model right before and after each step of a pipeline. ``measured`` is what the pipeline's step
would have taken at the speed of the trace: its seconds in plain steps, the median of the rounds, times the seconds of
the traced step. Freed memory stays with the process, as on a GPU, where a fresh page costs nothing either.

    OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 python benchmarks/traced.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

import splitkit as sk
from splitkit.cli.rank_process import rolled_batch
from splitkit.testing import models

RANKS, LAYERS, SIZES = 2, 8, {"width": 256, "heads": 4, "vocab": 2000, "seq": 128}
SCHEDULES = {2: ("gpipe", "1f1b"), 4: ("interleaved1f1b", "interleavedzerobubble")}
TRACED = 8
"""Steps in a trace."""


def record(example: Any, path: Path) -> None:
    """Trace a few steps of a model."""
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as prof:
        for _ in range(2 + TRACED):
            example.model(*example.args, **example.kwargs).loss.backward()
            prof.step()


def random_layers(stages: int, draw: random.Random) -> tuple[int, ...]:
    """Return numbers of layers that add up, each stage with one at least."""
    cuts = sorted(draw.sample(range(1, LAYERS), stages - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True))


def inside(runs: Sequence[tuple[Any, str]], example: Any, rank: int, args: Any, store: str, queue: Any) -> None:
    """A process: it puts the seconds of each run's rounds, and those of the plain steps around them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
    )
    from splitkit.runtime import pipeline

    def plain() -> None:
        example.model(*example.args, **example.kwargs).loss.backward()

    def seconds(act: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    given, named = rolled_batch(example, args.microbatches, 0, 0)
    for number, (split, word) in enumerate(runs):
        pipe = pipeline(split, word, args.microbatches)

        def step(pipe: Any = pipe) -> None:
            pipe.step(*given, **named)

        step()
        alone, steps = [seconds(plain)], []
        for _ in range(args.rounds):
            steps.append(seconds(step))
            alone.append(seconds(plain))
        queue.put((number, steps, alone))
    dist.barrier()
    dist.destroy_process_group()


def ratios(runs: Sequence[tuple[Any, str]], example: Any, args: argparse.Namespace) -> list[float]:
    """Return each run's step of the slower process in plain steps."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=inside, args=(runs, example, rank, args, f"{folder}/store", queue))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        found = sorted((queue.get(timeout=600) for _ in range(RANKS * len(runs))), key=lambda one: one[0])
        for process in processes:
            process.join(10)
    return [median(in_plain_steps(found[RANKS * i : RANKS * (i + 1)])) for i in range(len(runs))]


def in_plain_steps(ranks: Sequence[tuple[int, Sequence[float], Sequence[float]]]) -> Iterator[float]:
    """Yield the ratio of each round: the slower process's step by the mean of the plain steps around it."""
    for i in range(len(ranks[0][1])):
        around = [seconds for _, _, alone in ranks for seconds in alone[i : i + 2]]
        yield max(steps[i] for _, steps, _ in ranks) * len(around) / sum(around)


def rows(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each plan and schedule of a model."""
    example = models.build(name, layers=LAYERS, **SIZES)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    with tempfile.TemporaryDirectory() as folder:
        record(example, Path(folder) / "trace.json")
        costs, draw = sk.costs.traced(gm, Path(folder) / "trace.json"), random.Random(0)
    found, runs = [], []
    for number in range(args.plans):
        layers = random_layers((2, 4)[number % 2], draw)
        plan = sk.plan(gm, sk.policies.Expert(layers))
        split, stages = sk.split(gm, plan), sk.stage_costs(sk.analyze(gm), plan, costs, optimizer="sgd")
        for word in SCHEDULES[len(layers)]:
            step = sk.simulate_schedule(stages, word, args.microbatches, ranks=RANKS).seconds
            runs.append((split, word))
            found.append({"model": name, "layers": layers, "schedule": word, "predicted": step})
    traced_step = sum(map(costs.seconds, gm.graph.nodes))
    for row, ratio in zip(found, ratios(runs, example, args), strict=True):
        row |= {"measured": ratio * traced_step, "error": row["predicted"] / (ratio * traced_step) - 1}
        told = f"{row['predicted'] * 1e3:.0f} / {row['measured'] * 1e3:.0f} ms, {row['error']:+.1%}"
        print(f"{name} {row['layers']} {row['schedule']}: {told}", file=sys.stderr)
    return found


def summary_of(found: Sequence[dict[str, Any]], apart: float) -> dict[str, Any]:
    """Return the median error, for each schedule too, and how many pairs came in the predicted order."""
    pairs = [
        (a, b)
        for a, b in combinations(found, 2)
        if a["model"] == b["model"] and abs(a["measured"] / b["measured"] - 1) >= apart
    ]
    right = sum((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    words = dict.fromkeys(row["schedule"] for row in found)
    errors = {word: median(row["error"] for row in found if row["schedule"] == word) for word in words}
    whole = median(abs(row["error"]) for row in found)
    return {"rows": len(found), "median error": whole, **errors, "pairs": len(pairs), "in order": right}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--plans", type=int, default=15, help="plans of each model (default 15)")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each plan and schedule (default 7)")
    parser.add_argument("--apart", type=float, default=0.05, help="least relative distance of a pair (default 0.05)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [row for name in args.models for row in rows(name, args)]
    summary = summary_of(found, args.apart)
    print(json.dumps({"rows": found, "summary": summary}) if args.json else summary)


if __name__ == "__main__":
    main()
