"""One rank on a simulated device of its own: stages of a model that is sharded over such devices, beside the whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import on_ranks
import simgpu
import staged_group
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import splitkit as sk
from splitkit.graph.shards import full_tensor
from splitkit.policies import Pipeline, Stages
from splitkit.runtime import pipeline

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
import sharded_stages

COUNT = 4


def prepare() -> None:
    """Register the device."""
    simgpu.register()
    staged_group.register()


def main() -> None:
    """Print how far gradients, and the outputs of the forward alone, are from the whole model's on the CPU."""
    on_ranks.start()
    mesh = init_device_mesh(simgpu.TYPE, (2, 2), mesh_dim_names=("pp", "tp"))
    group, home = mesh.get_group("pp"), torch.device(simgpu.TYPE, dist.get_rank())
    for kind, schedule in (case.split(",") for case in sys.argv[1:]):
        model, batch = sharded_stages.build(kind, mesh.get_group("tp"))
        model = sharded_stages.parallel(kind, model, mesh["tp"]).to(home)
        own = {name: tensor.to(home) for name, tensor in batch.items()}
        whole_batch = {name: torch.cat([tensor] * COUNT) for name, tensor in batch.items()}
        other, _ = sharded_stages.build(kind)
        loss = other(**batch)["loss"]
        loss.backward()
        joint = sk.capture_joint(model, **own)
        step = joint.split(Pipeline(4 if schedule == "zbv" else 2, schedule, COUNT, recompute=False))
        pipe = pipeline(step, schedule, COUNT, group=group)
        pipe.step(**whole_batch)
        gradients = {name: p.grad for name, p in pipe.named_parameters().items() if p.grad is not None}
        found = {
            "apart": sharded_stages.apart(kind, {name: full_tensor(g).cpu() for name, g in gradients.items()}, other)
        }
        alone = pipeline(sk.split(sk.capture(model, **own), Stages(2)), "gpipe", COUNT, group=group)
        made = alone.infer(**whole_batch) or ()
        found["inferred"] = max((abs(float(one["loss"]) / float(loss) - 1) for one in made), default=0.0)
        found |= {"device": str(pipe.device), "at": sorted({str(g.device) for g in gradients.values()})}
        print(json.dumps({"rank": dist.get_rank(), **found, "races": simgpu.races()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
