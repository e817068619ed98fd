"""A rank of `test_joint_pipeline`: what it says of stages, weights and batches that ranks cannot run."""

from __future__ import annotations

import copy
import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.graph.dataflow import module_path
from splitkit.runtime import pipeline
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan


def captured(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return sk.capture_joint(model, torch.ones(4, 8), loss=torch.sum)


class Counted(nn.Sequential):
    """The first layer and the last read a buffer, which is then written."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        x = self[2](self[1](self[0](x) + self.seen)) + self.seen
        self.seen += 1
        return x


def normed():
    """A pipeline of two layers under spectral norm, whose updated vectors the layers do not read as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)))
    whole, x = copy.deepcopy(model), torch.randn(4, 8)
    joint = sk.capture_joint(model, x, loss=torch.sum)
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    second = next(i for i, n in enumerate(forward) if module_path(n).startswith("1"))
    pipe = pipeline(stages(joint, second), "1f1b", 2)
    pipe.step(x.repeat(2, 1))
    for _ in range(2):
        (whole(x).sum() / 2).backward()
    trained, named = pipe.named_parameters(), dict(whole.named_parameters())
    own = {name.split(".")[0] for name in trained}
    apart = [p.grad - named[name].grad for name, p in trained.items()]
    kept = dict(whole.named_buffers())
    apart += [b - kept[name] for name, b in model.named_buffers() if name.split(".")[0] in own]
    assert len(own) == 1 and max(float(t.abs().max()) for t in apart) < 1e-5


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
    pipe = pipeline(stages(joint, 2), "1f1b", 4)
    say("batch", lambda: pipe.step(torch.ones(6, 8)))
    say("other batch", lambda: pipe.step(torch.full((16, 8), float(rank))))
    first, second = (pipeline(stages(joint, cut), "1f1b", 4) for cut in (2, 6))
    first.step(torch.ones(16, 8))
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    say("same cut", lambda: pipe.step(torch.ones(16, 8)))
    say("other cut", lambda: second.step(torch.ones(16, 8)))
    other = captured(seed=rank)
    say("weights", lambda: pipeline(stages(other, 2), "1f1b", 4))
    torch.manual_seed(0)
    counted = sk.capture_joint(Counted(), torch.ones(4, 8), loss=torch.sum)
    say("buffer", lambda: pipeline(stages(counted, 3), "1f1b", 4))
    say("spectral norm", normed)
