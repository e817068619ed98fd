"""A rank of `test_joint_pipeline`: trains stages of joint graphs under torch's schedules beside the whole model."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from randomstageplans import all_on_host, random_stage_plan
from smallnets import loss_or_sum
from torch import nn

import splitkit as sk
from splitkit.pipeline.order import host_windows, most_on_host
from splitkit.runtime import pipeline
from splitkit.runtime.ranks.planned_stage import PlannedStage
from splitkit.testing import models
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_parts import StagePart
from splitkit.training.stage_plan import stage_plan

SIZES = {
    "gpt2": {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2},
    "llama": {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2},
    "t5": {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "seq": 8, "batch": 2},
}
CAPTURED, PIPES = {}, []


class Odd(nn.Module):
    """Statistics that are updated, dropout, a frozen layer, a weight that is used twice, and a mask of integers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.frozen, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        keep = (x.sum(1, keepdim=True) > 0).long()
        y = self.drop(self.norm(self.first(x)).relu())
        y = self.frozen(y).tanh() + y
        y = self.drop(self.last(y)) @ self.first.weight.t()
        self.seen += 1
        return (y.square() * keep).mean()


def build(name):
    """A model with named inputs, the same each time."""
    torch.manual_seed(0)
    if name == "odd":
        return models.Example(Odd(), (), {"x": torch.randn(4, 8)})
    return models.build(name, **SIZES[name])


def made(name):
    """A model, and its joint graph for one microbatch."""
    if name not in CAPTURED:
        example = build(name)
        CAPTURED[name] = example, sk.capture_joint(example.model, *example.args, **example.kwargs, loss=loss_or_sum)
    return CAPTURED[name]


def prepare():
    """Capture once for all ranks."""
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        made(name)


def between_layers(flow, stages):
    """Equal shares of forward, in which each stage begins where a layer does."""
    forward = [n for n in flow.nodes if FORWARD in save_all_plan(flow)[n]]
    return {n: i * stages // len(forward) for i, n in enumerate(forward)}


def deferred(flow, plan):
    """The plan with all products that give gradients of weights in weight parts."""
    returned = {n for n in flow.gradients if n is not None}
    late = {}
    for node in reversed(flow.nodes):
        users = [flow.producer(u) for u in node.users if u.op != "output"]
        if plan[node][0][0] == "backward" and node not in flow.once:
            own = plan[node][0][1]
            if all(late.get(u, ((0, -1),))[0][1] == own for u in users) and (users or node in returned):
                late[node] = (StagePart("weight", own),)
    places = {
        n: late.get(n, tuple(StagePart("input", k[1]) if k[0] == "backward" else k for k in keys))
        for n, keys in plan.items()
    }
    return sk.Plan(places)


def moved_bytes(pipe, step):
    """The most bytes that the rank should have on the host, and of moved values on the device, at once."""
    row, moved = pipe.order.ranks[pipe.rank], {s: step.stages[s].host_bytes for s in pipe.stages}
    here = [0] * len(row)
    for (stage, _), w in host_windows(row).items():
        for at in {*range(w.made, w.released + 1), *range(w.asked, w.read + 1)}:
            here[at] += moved[stage]
    return [most_on_host(row, moved), max(here)]


def plan_of(flow, how, stages):
    plan = stage_plan(flow, between_layers(flow, stages))
    if how in ("offload", "offload-deferred"):
        return all_on_host(flow, deferred(flow, plan) if how == "offload-deferred" else plan)
    if how == "whole":
        return plan
    if how == "deferred":
        return deferred(flow, plan)
    return random_stage_plan(flow, stages, int(how))


def batch_of(example, count, step):
    """Different microbatches, in one batch."""
    torch.manual_seed(100 + step)
    return {
        name: torch.cat([value.roll(i + step, -1) for i in range(count)]) if isinstance(value, torch.Tensor) else value
        for name, value in example.kwargs.items()
    }


def whole_losses(example, pipe, batch, step):
    """Run the whole model on each microbatch, from the same seeds; gradients accumulate."""
    losses = []
    for i in range(pipe.microbatches):
        torch.manual_seed(pipe.seed_of(step, i))
        rows = {n: v.chunk(pipe.microbatches)[i] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        loss = loss_or_sum(example.model(**rows))
        (loss / pipe.microbatches).backward()
        losses.append(loss.detach())
    return losses


def main():
    """Train, and say by how much losses, gradients and weights differ from the whole model's."""
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    names, schedule, stages, how, count, *rest = sys.argv[1:]
    count = int(count)
    waiting, expected = [], []
    watch(waiting, expected)
    for name in names.split(","):
        example, joint = made(name)
        step = joint.split(plan_of(joint.flow, how, int(stages)))
        twin = build(name)
        twin.model.load_state_dict(example.model.state_dict())
        twin.model.train(example.model.training)
        pipe = pipeline(step, schedule, count)
        PIPES.append(pipe)
        for part in pipe.modules if "compiled" in rest else ():
            part.compile()
        waiting.clear()
        expected.clear()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        other = torch.optim.SGD(twin.model.parameters(), lr=0.1)
        found = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        for number in range(2):
            batch = batch_of(example, count, number)
            result = pipe.step(**batch)
            losses = whole_losses(twin, pipe, batch, number)
            if result.losses is not None:
                found["loss"] = max(found["loss"], float((result.losses - torch.stack(losses)).abs().max()))
            grads = dict(twin.model.named_parameters())
            for key, p in trained(pipe).items():
                found["gradient"] = max(found["gradient"], float((p.grad - grads[key].grad).abs().max()))
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
        own = trained(pipe)
        for key, p in twin.model.named_parameters():
            if key in own:
                found["weight"] = max(found["weight"], float((p - own[key]).detach().abs().max()))
        found["buffer"] = max(
            (float((b - dict(twin.model.named_buffers())[key]).abs().max()) for key, b in written(pipe)), default=0.0
        )
        print(
            json.dumps(
                {
                    "rank": dist.get_rank(), "model": name, "stages": list(pipe.stages), "trained": sorted(own),
                    "left": [len(m.waiting) for m in pipe.modules], **found,
                    "waiting": waiting, "expected": expected, "moved": moved_bytes(pipe, step),
                    "measured": [pipe.host_bytes, pipe._rank_stages[True].batch.queue.device_most],
                }
            ),
            flush=True,
        )  # fmt: skip


def written(pipe):
    """The buffers that the stages of this rank write, by name."""
    own = {id(m.tensor(name)) for m in pipe.modules for name in m.task.updates.values()}
    return [(key, b) for key, b in pipe.named_tensors().items() if id(b) in own]


def trained(pipe):
    """The parameters of this rank that get a gradient, by name."""
    own = {id(m.tensor(name)) for m in pipe.modules for name in m.task.trained.values()}
    return {key: p for key, p in pipe.named_parameters().items() if id(p) in own}


def waiting_bytes(stage, known):
    """The bytes that now wait for weight graphs, each storage once, without parameters, buffers and known tensors."""
    others = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers(), *known)}
    tensors = (v for values in stage.waiting for v in values if isinstance(v, torch.Tensor))
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in found.items() if key not in others)


def watch(waiting, expected):
    """Note after each backward of a stage with a weight part the bytes that wait, and those that its graphs say."""
    run = PlannedStage.weight_runner

    def noted(self):
        if self.graphs.weight is not None:
            others, self.waiting[:] = self.waiting[:-1], self.waiting[-1:]
            given = PIPES[-1]._rank_stages[True].batch.inputs
            known = [v for inputs in given for v in inputs.values() if isinstance(v, torch.Tensor)]
            waiting.append(waiting_bytes(self, known))
            expected.append(self.graphs.waiting_bytes)
            self.waiting[:0] = others
        return run(self)

    PlannedStage.weight_runner = noted


if __name__ == "__main__":
    main()
