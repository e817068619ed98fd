"""Predict steps of pipelines from one trace of one process, and run them: ``--json`` for machines.

Each model is traced by torch's profiler in one process with one thread. Plans with random cuts between layers are then
priced by this trace alone and simulated under two schedules each, and `splitkit profile --ranks 2` runs them on two
processes. Printed are the simulated and the measured step, the median error, and the share of pairs that were predicted
in the order in which they ran (pairs of one model; ``--apart`` leaves out those that were measured closer together).

A machine whose speed drifts spoils absolute times, so a plain step in one process is timed right before and after each
run. ``measured`` is what the run would have taken at the speed at which the trace was made: the seconds of the run
times the seconds of the traced step, divided by the seconds of the plain step beside the run.

    OMP_NUM_THREADS=1 python benchmarks/traced.py --plans 8
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import splitkit as sk
from splitkit.testing import models

LAYERS, SIZES = 8, {"width": 256, "heads": 4, "vocab": 2000, "seq": 128}
SCHEDULES = {2: ("gpipe", "1f1b"), 4: ("interleaved1f1b", "interleavedzerobubble")}
TRACED = 8
"""Steps in a trace."""


def record(name: str, folder: Path) -> Path:
    """Trace a few steps of a model."""
    example = models.build(name, layers=LAYERS, **SIZES)
    path = folder / f"{name}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as prof:
        for _ in range(2 + TRACED):
            example.model(*example.args, **example.kwargs).loss.backward()
            prof.step()
    return path


def random_layers(stages: int, draw: random.Random) -> tuple[int, ...]:
    """Return numbers of layers that add up, each stage with one at least."""
    cuts = sorted(draw.sample(range(1, LAYERS), stages - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True))


def plain_step(example: Any) -> float:
    """Return the median seconds of a step of the whole model in this process."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        example.model(*example.args, **example.kwargs).loss.backward()
        times.append(time.perf_counter() - start)
    return median(times)


def measured(name: str, layers: tuple[int, ...], microbatches: int, folder: Path) -> list[dict[str, Any]]:
    """Run the schedules of a plan on two processes."""
    sizes = ",".join(f"{key}={value}" for key, value in {"layers": LAYERS, **SIZES}.items())
    plan = folder / "plan.json"
    command = [sys.executable, "-m", "splitkit"]
    policy = ["--policy", f"Expert({list(layers)})"]
    subprocess.run(
        [*command, "plan", name, "--size", sizes, *policy, "-o", plan], check=True, stdout=subprocess.DEVNULL
    )
    words = ["--ranks", "2", "--microbatches", str(microbatches), "--schedules", ",".join(SCHEDULES[len(layers)])]
    done = subprocess.run(
        [*command, "profile", plan, *words, "--repeat", "5", "--json"], check=True, capture_output=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["schedules"]
    return found


def rows(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each model, plan and schedule."""
    found = []
    for name in args.models:
        trace = record(name, folder)
        example = models.build(name, layers=LAYERS, **SIZES)
        gm = sk.capture(example.model, *example.args, **example.kwargs)
        costs, draw = sk.costs.traced(gm, trace), random.Random(0)
        traced_step = sum(map(costs.seconds, gm.graph.nodes))
        for number in range(args.plans):
            layers = random_layers((2, 4)[number % 2], draw)
            plan = sk.plan(gm, sk.policies.Expert(layers))
            stages = sk.stage_costs(sk.analyze(gm), plan, costs, optimizer="sgd")
            before = plain_step(example)
            runs = measured(name, layers, args.microbatches, folder)
            speed = 2 * traced_step / (before + plain_step(example))
            for word, run in zip(SCHEDULES[len(layers)], runs, strict=True):
                step = sk.simulate_schedule(stages, word, args.microbatches, ranks=2).seconds
                real = run["step"]["measured"] * speed
                row = {
                    "model": name,
                    "layers": layers,
                    "schedule": run["schedule"],
                    "predicted": step,
                    "measured": real,
                    "speed": speed,
                }
                found.append(row | {"error": step / real - 1})
                told = f"{step * 1e3:.0f} / {real * 1e3:.0f} ms, speed {speed:.2f}"
                print(f"{name} {layers} {run['schedule']}: {told}", file=sys.stderr)
    return found


def summary_of(found: list[dict[str, Any]], apart: float) -> dict[str, Any]:
    """Return the median error, and how many pairs came in the predicted order."""
    pairs = [
        (a, b)
        for a, b in combinations(found, 2)
        if a["model"] == b["model"] and abs(a["measured"] / b["measured"] - 1) >= apart
    ]
    right = sum((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    errors = [abs(row["error"]) for row in found]
    return {"rows": len(found), "median error": median(errors), "pairs": len(pairs), "in order": right}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--plans", type=int, default=8, help="plans of each model (default 8)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--apart", type=float, default=0.05, help="least relative distance of a pair (default 0.05)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = rows(args, Path(folder))
    summary = summary_of(found, args.apart)
    print(json.dumps({"rows": found, "summary": summary}) if args.json else summary)


if __name__ == "__main__":
    main()
