"""A rank of `test_features_of_stages`: what a pipeline can do, with stages of autograd and with planned stages."""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.graph.dataflow import module_path
from splitkit.graph.shards import full_tensor
from splitkit.runtime import (
    PipelineModule,
    StepRecorder,
    form_output,
    open_checkpoints,
    open_stages,
    pipeline,
    reduced_ties,
    save_stages,
    stage,
)
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

COUNT = 4
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two blocks, dropout in both, and a weight that both read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x):
        y = self.drop(self.a(x)).tanh()
        y = self.drop(self.b(y)).tanh() @ self.a.weight
        return {"loss": y.square().mean()}


def net():
    torch.manual_seed(3)
    return Net()


def cut(nodes, stages):
    """The stage of each node: of two, the second begins with the second layer."""
    second = next(i for i, n in enumerate(nodes) if module_path(n).startswith("b"))
    return {n: int(stages > 1 and i >= second) for i, n in enumerate(nodes)}


def split_of(kind, model, stages=2, replicas=1):
    """The model in equal stages."""
    if kind == "autograd":
        gm = sk.capture(model, X[:2])
        nodes = [n for n in gm.graph.nodes if n.op.startswith("call_")]
        plan = sk.plan(gm, cut(nodes, stages))
        made = replace(plan, parts={k: replace(part, replicas=replicas) for k, part in plan.parts.items()})
        return sk.split(gm, made)
    joint = sk.capture_joint(model, X[:2])
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    plan = stage_plan(joint.flow, cut(forward, stages))
    return joint.split(replace(plan, parts={k: replace(p, replicas=replicas) for k, p in plan.parts.items()}))


def whole_step(model, pipe, step=0):
    """Gradients of the whole model, with the seeds of the pipeline; returns the mean loss."""
    losses = []
    for i, rows in enumerate(X.chunk(COUNT)):
        torch.manual_seed(pipe.seed_of(step, i))
        loss = model(rows)["loss"]
        (loss / COUNT).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def apart(pipe, model, of=lambda p: p.grad):
    """The largest difference of what this rank holds from the whole model."""
    whole = dict(model.named_parameters())
    pairs = [(of(p), of(whole[name])) for name, p in pipe.named_parameters().items()]
    return max((float((full_tensor(a) - b).abs().max()) for a, b in pairs if b is not None), default=0.0)


def steps(pipe, other, count, first=0):
    """Train both; returns the largest difference of gradients and weights."""
    own = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
    whole = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    most = 0.0
    for step in range(first, first + count):
        pipe.step(X)
        whole_step(other, pipe, step)
        most = max(most, apart(pipe, other))
        own.step()
        whole.step()
        own.zero_grad()
        whole.zero_grad()
    return max(most, apart(pipe, other, lambda p: p.detach()))


def replicated(kind, folder):
    return steps(pipeline(split_of(kind, net(), 1, 2), "1f1b", COUNT), net(), 2)


def sharded(kind, folder):
    pipe = pipeline(split_of(kind, net(), 1, 2), "1f1b", COUNT)
    pipe.shard()
    assert sum(p.to_local().nbytes for p in pipe.parameters()) < 0.6 * sum(p.nbytes for p in net().parameters())
    found = steps(pipe, net(), 2)
    pipe.step(X)
    norm = pipe.clip_grad_norm(float("inf"))
    pipe.infer(X)  # leaves the gradients where they are
    return max(found, abs(float(pipe.clip_grad_norm(float("inf")) - norm)))


def checkpoints(kind, folder):
    """A run on two stages goes on with one stage on two replicas."""
    first, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    own = torch.optim.SGD(first.parameters(), lr=0.5, momentum=0.9)
    whole = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)

    def train(pipe, optimizer, step):
        pipe.step(X)
        whole_step(other, pipe, step)
        optimizer.step()
        whole.step()
        optimizer.zero_grad()
        whole.zero_grad()

    saved = open_checkpoints(folder / "checkpoints", first, own)
    train(first, own, 0)
    saved.save()
    second = pipeline(split_of(kind, net(), 1, 2), "1f1b", COUNT)
    own = torch.optim.SGD(second.parameters(), lr=0.5, momentum=0.9)
    open_checkpoints(folder / "checkpoints", second, own, resume=True)
    assert second.steps == 1
    train(second, own, 1)
    return apart(second, other, lambda p: p.detach())


def evaluation(kind, folder):
    model, other = net(), net()
    pipe = pipeline(split_of(kind, model), "1f1b", COUNT)
    evaluated = pipe.evaluation(sk.capture(copy.deepcopy(model).eval(), X[:2]))
    optimizer, whole = torch.optim.SGD(pipe.parameters(), lr=0.5), torch.optim.SGD(other.parameters(), lr=0.5)
    pipe.step(X)
    whole_step(other, pipe)
    optimizer.step()
    whole.step()
    other.eval()
    want = torch.stack([other(rows)["loss"].detach() for rows in X.chunk(COUNT)]).mean()
    later = pipe.evaluation(sk.capture(copy.deepcopy(model).eval(), X[:2]))  # each rank has trained its own stage
    return max(abs(float(made.evaluate(X)) - float(want)) for made in (evaluated, later))


def clipping(kind, folder):
    pipe, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    pipe.step(X)
    whole_step(other, pipe)
    norm, want = pipe.clip_grad_norm(0.01), nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    return max(abs(float(norm) - float(want)), apart(pipe, other))


def choosing(kind, folder):
    pipe, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    pipe.train_only(lambda name: not name.startswith("b."))
    other.b.requires_grad_(False)
    pipe.step(X)
    whole_step(other, pipe)
    assert all(p.grad is None for name, p in pipe.named_parameters().items() if name.startswith("b."))
    found = apart(pipe, other)
    pipe.train_only(lambda name: True)
    other.b.requires_grad_(True)
    other.zero_grad()
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(X)
    whole_step(other, pipe, 1)
    return max(found, apart(pipe, other))


def broadcasting(kind, folder):
    pipe = pipeline(split_of(kind, net()), "1f1b", COUNT)
    batch = pipe.broadcast({"x": X} if dist.get_rank() == 0 else None)
    other = net()
    pipe.step(**batch)
    whole_step(other, pipe)
    return apart(pipe, other)


def sizes(kind, folder):
    """Sizes that were not captured are refused, and the pipeline goes on."""
    pipe, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    try:
        pipe.step(torch.randn(12, 6))
    except SplitError as error:
        assert error.code == "SK802", error
    else:
        return float("inf")
    pipe.step(X)
    whole_step(other, pipe)
    return apart(pipe, other)


def losses(kind, folder):
    """The loss on every rank, and the outputs on the last."""
    pipe, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    found = pipe.step(X, outputs=True, loss_everywhere=True)
    want = whole_step(other, pipe)
    assert (found.outputs is not None) == (dist.get_rank() == 1)
    if found.outputs is not None:
        assert torch.allclose(torch.stack([o["loss"].detach() for o in found.outputs]).mean(), want)
    return abs(float(found.loss) - float(want))


def traces(kind, folder):
    pipe = pipeline(split_of(kind, net()), "1f1b", COUNT)
    pipe.step(X)
    recorder = StepRecorder(pipe)
    pipe.step(X)
    found = recorder.measured().to_chrome_trace()
    actions = [event for event in found["traceEvents"] if event.get("ph") == "X"]
    return 0.0 if len(actions) == 2 * 2 * COUNT else float("inf")


def module(kind, folder):
    pipe, other = pipeline(split_of(kind, net()), "1f1b", COUNT), net()
    wrapped = PipelineModule(pipe)
    (wrapped(X)["loss"] * 2).backward()
    (2 * whole_step_of(other, pipe)).backward()
    return apart(pipe, other)


def whole_step_of(model, pipe):
    found = []
    for i, rows in enumerate(X.chunk(COUNT)):
        torch.manual_seed(pipe.seed_of(0, i))
        found.append(model(rows)["loss"])
    return torch.stack(found).mean()


def folders(kind, folder):
    """Stages from disk: a rank holds the parameters of its own stage only."""
    if dist.get_rank() == 0:
        save_stages(split_of(kind, net()), folder / "stages", inputs=((X[:2],), {}))
    dist.barrier()
    held = open_stages(folder / "stages")
    pipe = pipeline(held, "1f1b", COUNT)
    assert len(held.parts) == 1
    assert {name.split(".")[0] for name in pipe.named_parameters()} == ({"a"}, {"a", "b"})[dist.get_rank()]
    return steps(pipe, net(), 2)


def torchs(kind, folder):
    """Torch's own schedule, driven by the user's program."""
    model, other, rank = net(), net(), dist.get_rank()
    own = stage(split_of(kind, model), rank)
    schedule = Schedule1F1B(own, COUNT, loss_fn=lambda out, target: form_output(own, out)["loss"], scale_grads=False)
    with reduced_ties(own):
        target = {"target": torch.zeros(COUNT)} if rank else {}
        schedule.step(x=X, microbatch_seed=torch.arange(COUNT), return_outputs=False, **target)
    for i, rows in enumerate(X.chunk(COUNT)):
        torch.manual_seed(i)
        other(rows)["loss"].backward()
    whole = dict(other.named_parameters())
    pairs = [(p.grad, whole[name].grad) for name, p in model.named_parameters() if (rank or name[0] == "a")]
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None)


FEATURES = {
    f.__name__: f
    for f in (
        replicated, sharded, checkpoints, evaluation, clipping, choosing, broadcasting, sizes, losses, traces, module,
        folders, torchs,
    )
}  # fmt: skip


def main():
    """Say of each feature by how much it differs from the whole model."""
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    kind, place, *names = sys.argv[1:]
    for name in names or FEATURES:
        found = FEATURES[name](kind, Path(place))
        print(json.dumps({"rank": rank, "feature": name, "apart": found}), flush=True)


if __name__ == "__main__":
    main()
