"""A rank of `test_joint_pipeline`: what it says of stages, weights and batches that ranks cannot run."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import joint_pipeline
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan


def captured(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return sk.capture_joint(model, torch.ones(4, 8), loss=torch.sum)


def stages(joint, cut):
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    return joint.split(stage_plan(joint.flow, {n: int(i >= cut) for i, n in enumerate(forward)}))


def say(case, run):
    try:
        run()
        said = ""
    except SplitError as error:
        said = f"{error.code}: {error.reason}"
    print(json.dumps({"rank": dist.get_rank(), "case": case, "said": said}), flush=True)


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    joint = captured()
    pipe = joint_pipeline(joint, stages(joint, 2), "1f1b", 4)
    say("batch", lambda: pipe.step(torch.ones(6, 8)))
    say("other batch", lambda: pipe.step(torch.full((16, 8), float(rank))))
    other = captured(seed=rank)
    say("weights", lambda: joint_pipeline(other, stages(other, 2), "1f1b", 4))
