"""A rank that captures a model in an order of its own, as hash seeds of processes have it; prints what came of it."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import setorder
import torch
import torch.distributed as dist

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.plans.plan_file import fingerprint
from splitkit.runtime import pipeline, planned_once


def main() -> None:
    rank, what = int(os.environ["RANK"]), sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    try:
        print(json.dumps({"rank": rank, "said": "", **trained(rank, what)}), flush=True)
    except SplitError as error:
        print(json.dumps({"rank": rank, "said": str(error)}), flush=True)


def trained(rank: int, what: str) -> dict[str, object]:
    model = setorder.model(rank, torch.tanh if what == "op" and rank else torch.relu)
    gm = sk.capture(model, setorder.inputs(4))

    def make() -> sk.Plan:
        return sk.plan(gm, sk.policies.Stages(2))

    plan = make() if what == "apart" else planned_once(gm, make)
    pipe = pipeline(sk.split(gm, plan), "1f1b", 2)
    x = setorder.inputs(8)
    found = pipe.step(x)
    whole = setorder.model(0)
    loss = sum(whole(part) for part in x.chunk(2)) / 2
    loss.backward()
    theirs = dict(whole.named_parameters())
    own = pipe.named_parameters()
    apart = [float((p.grad - theirs[name].grad).abs().max()) for name, p in own.items() if p.grad is not None]
    return {
        "graph": fingerprint(gm.graph),
        "loss": None if found.loss is None else float(found.loss),
        "whole": float(loss),
        "apart": max(apart),
    }
