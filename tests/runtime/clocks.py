"""A rank whose clock is hours away from those of the others, as on another machine; prints what it recorded."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import setorder
import torch
import torch.distributed as dist

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import StepRecorder, pipeline


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    true = time.perf_counter
    time.perf_counter = lambda: true() + 5000.0 * rank
    gm = sk.capture(setorder.model(0), setorder.inputs(4))
    pipe = pipeline(sk.split(gm, sk.policies.Stages(2)), "1f1b", 4)
    refused = ""
    try:
        StepRecorder(pipe)
    except SplitError as error:
        refused = str(error)
    pipe.step(setorder.inputs(16))
    recorder = StepRecorder(pipe)
    begin = true()
    for _ in range(3):
        pipe.step(setorder.inputs(16))
    took = true() - begin
    step = recorder.measured()
    late = [
        step_of["1F", e.microbatch].start - e.end
        for step_of in [{(f"{x.stage}{x.kind}", x.microbatch): x for x in step.timeline}]
        for e in step.timeline
        if (e.stage, e.kind) == (0, "F")
    ]
    told = {"rank": rank, "refused": refused, "took": took, "seconds": step.seconds, "late": min(late)}
    told |= {"ranks": step.order.ranks, "recorded": len(recorder.steps), "memory": step.memory}
    print(json.dumps(told), flush=True)
