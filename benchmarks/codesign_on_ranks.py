"""Real steps of `Pipeline` beside the other ways of ``codesign.py``, on gloo processes: ``--json`` for machines.

GPT-2 in float32, one stage and one thread a process, 1F1B. All ways are planned at times measured here, for the same
memory, and run by `splitkit.runtime.pipeline` in the same processes, in turns: a round has one step of each, in
another order every time. ``step`` is the time of the slowest process from a barrier to the end, the median of the
rounds; the ratio is the median of the rounds' ratios to ours. ``peak`` is the most that the fullest process has
allocated at once in a step, beyond what it had before.

With more processes than cores, a step takes as long as all the work together, and says little of balance.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from codesign import Rivals

import splitkit as sk
from splitkit import _torch
from splitkit.cli.launcher import rolled_batch
from splitkit.frontends.joint_capture import Joint
from splitkit.pipeline.schedules import pipeline_order
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.joint_positions import JointPositions, staged_plan
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.testing import models


def plans(joint: Joint, costs: Any, ranks: int, microbatches: int, share: float) -> dict[str, tuple[Any, float]]:
    """Return way -> its plan and its simulated step, all within the same share of the memory without recompute."""
    order = pipeline_order("1f1b", ranks, microbatches)
    frontiers = StageFrontiers(StageProblems(JointPositions(joint.flow), costs, "sgd", False))
    whole, _ = CutSearch(frontiers, order, None, [None] * ranks).run()
    assert whole is not None
    memory = int(share * max(whole.run.peaks))
    search = CutSearch(frontiers, order, None, [memory] * ranks)
    best, _ = search.run()
    rivals = Rivals(frontiers, order, None)
    balanced = [int(search.cuts[e]) for e in next(search._balanced())]
    ways = {"block": rivals.block(memory), "once": rivals.once(balanced, memory)}
    found = {
        name: (staged_plan(frontiers.problems.members, way.ends, way.choices, name), way.run.seconds)
        for name, way in ways.items()
        if way is not None
    }
    policy = sk.policies.Pipeline(ranks, "1f1b", microbatches=microbatches, memory=memory, optimizer="sgd")
    if best is None:
        raise SystemExit(f"no plan fits {memory} bytes: raise --share")
    return {"ours": (policy.assign(joint.flow, costs), best.seconds), **found}


def inside(joint: Joint, ways: Any, batch: Any, rank: int, args: argparse.Namespace, store: str, queue: Any) -> None:
    """A process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks, timeout=timedelta(seconds=300)
    )
    from splitkit.runtime import pipeline

    pipes = {name: pipeline(joint.split(plan), "1f1b", args.microbatches) for name, (plan, _) in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in pipes}
    peaks: dict[str, int] = {}
    for name, pipe in pipes.items():
        pipe.step(*batch[0], **batch[1])
        changes = _torch.allocations_between(lambda pipe=pipe: pipe.step(*batch[0], **batch[1]), "")[0]
        peaks[name] = max(accumulate(changes))
    dice, names = random.Random(0), list(pipes)
    for _ in range(args.rounds):
        dice.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            pipes[name].step(*batch[0], **batch[1])
            times[name].append(time.perf_counter() - start)
    queue.put((rank, times, peaks))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"layers": args.layers, "width": args.width, "heads": 4, "vocab": args.vocab, "seq": args.seq, "batch": 1}
    made = models.build("gpt2", **sizes)
    joint = sk.capture_joint(made.model.eval(), *made.args, **made.kwargs)
    given = [*joint.primals(*made.args, **made.kwargs), *joint.tangents()]
    costs = sk.costs.measured(joint.graph_module, given)
    ways = plans(joint, costs, args.ranks, args.microbatches, args.share)
    batch = rolled_batch(made, args.microbatches, 0, 0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=inside, args=(joint, ways, batch, rank, args, f"{folder}/store", queue))
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        found = [queue.get(timeout=600) for _ in processes]
        for process in processes:
            process.join(10)
    steps = {name: [max(each) for each in zip(*(times[name] for _, times, _ in found), strict=True)] for name in ways}
    rows = [
        {
            "way": name,
            "simulated": ways[name][1],
            "step": statistics.median(steps[name]),
            "ratio": statistics.median(a / b for a, b in zip(steps[name], steps["ours"], strict=True)),
            "simulated_ratio": ways[name][1] / ways["ours"][1],
            "peak": max(peaks[name] for _, _, peaks in found),
        }
        for name in ways
    ]
    if args.json:
        print(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))
        return
    print("way    simulated (ms)  step (ms)   ratio  simulated ratio  peak (MiB)")
    for row in rows:
        print(
            f"{row['way']:6} {row['simulated'] * 1e3:14.1f} {row['step'] * 1e3:10.1f} {row['ratio']:7.3f} "
            f"{row['simulated_ratio']:16.3f} {row['peak'] / 2**20:11.1f}"
        )


if __name__ == "__main__":
    main()
