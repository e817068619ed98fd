"""One rank of `splitkit.cli.selftest.rank_checks`: trains a small model in stages beside the unsplit model."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import splitkit as sk
from splitkit.cli.selftest import host_group
from splitkit.cli.selftest.trial_models import exact_products, small
from splitkit.policies import Pipeline, Stages
from splitkit.runtime import pipeline
from splitkit.testing.pipeline_check import UnsplitModel

_MICROBATCHES, _STEPS = 4, 3
"""More microbatches than ranks, and a step after the optimizer has changed the weights."""


def trained(kind: str, device: torch.device) -> dict[str, Any]:
    """Train for some steps; return how far losses, gradients and weights are from the unsplit model, and where most."""
    example, ranks = small("gpt2", device), dist.get_world_size()
    model = example.model.eval()  # each microbatch would draw its own dropout
    schedule = "zbv" if kind.endswith("ZBV") else "1f1b"
    stages = 2 * ranks if schedule == "zbv" else ranks
    split: Any
    if kind.startswith("joint"):
        joint = sk.capture_joint(model, **example.kwargs)
        policy = Pipeline(stages, schedule=schedule, microbatches=_MICROBATCHES)
        split = joint.split(policy, sk.costs.roofline(joint.graph_module, "h100"))
    else:
        split = sk.split(sk.capture(model, **example.kwargs), Stages(stages))
    pipe: Any = pipeline(split, schedule, _MICROBATCHES, device=device)
    unsplit = UnsplitModel(pipe, small("gpt2", device).model.eval())
    optimizers = [torch.optim.SGD(p, lr=1e-2) for p in (pipe.parameters(), [*unsplit.model.parameters()])]
    apart, worst = 0.0, ""
    for step in range(_STEPS):
        batch = {
            name: torch.cat([t.roll(step + i, -1) for i in range(_MICROBATCHES)]) for name, t in example.kwargs.items()
        }
        found = pipe.step(**batch)
        if kind == "killed rank" and step == 1 and dist.get_rank() == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = unsplit.deviation(found, unsplit.step(**batch))
        if (most := max(seen.loss, seen.gradient, seen.weight)) >= apart:
            apart, worst = most, seen.worst
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"apart": apart, "worst": worst}


def main() -> None:
    """Run the trial of the command line."""
    kind, backend, device = sys.argv[1], sys.argv[2], torch.device(sys.argv[3])
    torch.set_num_threads(1)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if backend == host_group.NAME:
        host_group.register(device.type)
    dist.init_process_group(backend, timeout=timedelta(seconds=25))
    with exact_products():
        print(json.dumps(trained(kind, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
