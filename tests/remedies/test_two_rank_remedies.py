"""Remedies of errors that two ranks have together (SK801 to SK807): one launch, one case after the other."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from carried import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import splitkit as sk
from splitkit.plans.parts import Part
from splitkit.runtime import open_checkpoints, pipeline, planned_once, to_devices

COUNT = 2
X, T = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)


class Net(nn.Module):
    def __init__(self, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Branches(Net):
    """Two branches, which a process may reach in either order."""

    def __init__(self, other=False):
        super().__init__()
        self.other = other

    def forward(self, x):
        if self.other:
            c = x.cos()
            s = x.sin()
        else:
            s = x.sin()
            c = x.cos()
        return self.b(self.a(s) + c)


class Looks(Net):
    """Fails on some inputs."""

    def forward(self, x):
        return self.b(self.a(x)[(x.sum(1) * 100).long().clamp(-4)])


def square(output, target):
    return (output - target).square().mean()


def split_of(model=None, stages=2, replicas=1):
    gm = sk.capture(model or Net(), X[:2])
    plan = sk.plan(gm, sk.policies.Stages(stages))
    return sk.split(gm, sk.Plan(plan.places, {key: Part(key, replicas=replicas) for key in plan.parts}))


def made(split=None, schedule="1f1b", **options):
    return pipeline(split or split_of(), schedule, COUNT, loss=square, **options)


def own(pipe):
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in pipe.named_parameters().items()
    }


def right(pipe, model=None, trains=lambda name: True):
    """Whether a step has the loss and the gradients of the unsplit model."""
    model = copy.deepcopy(model or Net())
    want = square(model(X), T)
    want.backward()
    found, grads = pipe.step(X, target=T, loss_everywhere=True), own(pipe)
    wanted = {name: p.grad if trains(name) else None for name, p in model.named_parameters(remove_duplicate=False)}
    assert torch.allclose(found.loss.float(), want.detach(), rtol=1e-5)
    for name, grad in grads.items():
        assert (grad is None) == (wanted[name] is None), name
        assert grad is None or torch.allclose(grad, wanted[name], rtol=1e-4, atol=1e-7), name
    return True


def replicated(**options):
    return made(split_of(stages=1, replicas=2), **options)


def alone():
    """A mesh of this rank alone."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "one"))["one"]


def what_trains(rank):
    pipe = made()
    with refusal("SK804", "Pass the same function on every rank."):
        pipe.train_only(lambda name: name == "a.bias" or rank == 0)
    pipe.train_only(lambda name: name != "b.weight")
    assert right(pipe, trains=lambda name: name != "b.weight")


def shards(rank):
    pipe = replicated()
    pipe.shard()
    with refusal("SK801", "Choose what trains before shard()."):
        pipe.train_only(lambda name: name != "b.weight")
    with refusal("SK801", "Evaluate before shard(), or without it."):
        pipe.evaluation(sk.capture(Net().eval(), X[:2]))
    pipe = replicated()
    pipe.train_only(lambda name: name != "b.weight")
    evaluation = pipe.evaluation(sk.capture(Net().eval(), X[:2]))
    with torch.no_grad():
        assert torch.allclose(evaluation.evaluate(X, target=T).float(), square(Net()(X), T))
    pipe.shard()
    assert right(pipe, trains=lambda name: name != "b.weight")
    with refusal("SK801", "Give all parts several replicas: splitkit train --dp 2 --fsdp."):
        made().shard()
    pipe = replicated()
    pipe.shard()
    assert right(pipe)


def shards_over_other_ranks(rank):
    mesh = alone()
    pipe = replicated()
    with refusal("SK801", 'Use Pipeline.shard(), or fully_shard(part, mesh=pipe.replicas.mesh["dp"]).'):
        fully_shard(pipe.modules[0], mesh=mesh)
        pipe.step(X, target=T)
    pipe = replicated()
    for part in pipe.modules:
        fully_shard(part, mesh=pipe.replicas.mesh["dp"])
    assert right(pipe)
    pipe = made(split_of(Net(tied=True)))
    with refusal("SK801", "Use Pipeline.shard(), which leaves it whole, or put all nodes that read it into one stage."):
        fully_shard(pipe.modules[0], mesh=mesh)
        pipe.step(X, target=T)
    pipe = made(split_of(Net(tied=True), stages=1, replicas=2))
    pipe.shard()
    assert right(pipe, Net(tied=True))


def weights(rank):
    with refusal(
        "SK804", "Build the same model on every rank: call torch.manual_seed with one seed before you make it"
    ):
        made(split_of(Net(seed=rank))).step(X, target=T)
    assert right(made(split_of(Net(seed=5))), Net(seed=5))
    loaded = Net(seed=rank)
    loaded.load_state_dict(Net(seed=5).state_dict())
    assert right(made(split_of(loaded)), Net(seed=5))


def calls(rank):
    pipe = made()
    with refusal("SK804", "Make the same calls on every rank, with the same batch: seed the data loaders of all ranks"):
        pipe.step(X + rank, target=T)
    assert right(pipe)
    rows = torch.utils.data.TensorDataset(X, T)
    loader = torch.utils.data.DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    for x, target in loader:
        pipe.step(x, target=target)


def graphs(rank):
    with refusal("SK804", "Start every rank with the same files, packages and arguments; plan once: splitkit.runtime."):
        made(schedule="1f1b" if rank else "gpipe")
    assert right(made(schedule="gpipe"))
    with refusal("SK804", "Start every rank with the same files, packages and arguments; plan once: splitkit.runtime."):
        made(split_of(Branches() if rank else Net()))
    gm = sk.capture(Net(), X[:2])
    assert right(made(sk.split(gm, planned_once(gm, lambda: sk.plan(gm, sk.policies.Stages(2))))))
    with refusal("SK804", "Plan with splitkit.runtime.planned_once, which puts the graphs into one order before they"):
        made(split_of(Branches(other=bool(rank))))
    gm = sk.capture(Branches(other=bool(rank)), X[:2])
    plan = planned_once(gm, lambda: sk.plan(gm, sk.policies.Stages(2)))
    assert right(made(sk.split(gm, plan)), Branches())


def loaded_later(rank):
    pipe, state = made(split_of(Net(tied=True))), Net(tied=True).state_dict()
    pipe.step(X, target=T)
    with refusal("SK804", "Load the same weights on every rank: Pipeline.load_state_dict with one state dict."):
        pipe.load_state_dict({name: tensor + rank for name, tensor in state.items()})
        pipe.step(X, target=T)
    pipe.load_state_dict(state)
    pipe.step(X, target=T)


def folder_of(name):
    return f"{tempfile.gettempdir()}/{os.environ['SPLITKIT_STORE'].rsplit('/', 2)[1]}{name}"


def optimizers(rank):
    folder, pipe = folder_of(""), made()
    with refusal("SK804", "Create the same one on every rank."):
        kind = torch.optim.SGD if rank else torch.optim.Adam
        open_checkpoints(folder + "a", pipe, kind(pipe.parameters(), lr=0.1)).save()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    open_checkpoints(folder + "b", pipe, optimizer).save()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    checkpoints = open_checkpoints(folder + "c", pipe, optimizer, scheduler=scheduler)
    with refusal(
        "SK804", "Step all schedulers in the same way; one that reads the loss needs the same loss on every rank."
    ):
        scheduler.step(float(rank))
        checkpoints.save()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scheduler.step(pipe.step(X, target=T, loss_everywhere=True).loss)
    open_checkpoints(folder + "d", pipe, optimizer, scheduler=scheduler).save()


def options_of_optimizers(rank):
    pipe = made()
    with refusal(
        "SK804", "Use the same options on every rank. A parameter group that is to differ needs a name"
    ) as caught:
        open_checkpoints(folder_of("e"), pipe, torch.optim.SGD(pipe.parameters(), lr=0.1 + rank))
    open_checkpoints(folder_of("f"), pipe, torch.optim.SGD(pipe.parameters(), lr=0.1)).save()
    group = eval(re.search(r"\{.*\}", caught.value.remedy)[0]) if rank else {"params": pipe.parameters()}
    optimizer = torch.optim.SGD([group], lr=0.1)
    open_checkpoints(folder_of("g"), pipe, optimizer).save()
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    pipe.step(X, target=T)
    optimizer.step()
    for old, new in zip(before, pipe.parameters(), strict=True):
        assert torch.allclose(new, old - (0.01 if rank else 0.1) * new.grad)


def steps_of_optimizers(rank):
    for each, name in ((1 + rank, "h"), (1, "i")):
        pipe = made()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        checkpoints = open_checkpoints(folder_of(name), pipe, optimizer)
        pipe.step(X, target=T)
        for _ in range(each):
            optimizer.step()
        if name == "i":
            assert checkpoints.save().exists()
            continue
        with refusal("SK804", "Call optimizer.step() on every rank after each step of the pipeline."):
            checkpoints.save()


class ByRow(torch.optim.Optimizer):
    """Scales gradients by the mean of each row's squares, as Adafactor does; ``local``: of the rows of this rank."""

    def __init__(self, params, lr, local=False):
        super().__init__(params, {"lr": lr, "local": local})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.square().mean(-1, keepdim=True)
                rows = rows.to_local() if group["local"] else rows
                self.state[p]["rows"] = self.state[p].get("rows", 0) + rows
                p.sub_(p.grad, alpha=group["lr"])


def sharded_optimizers(rank):
    folder = folder_of("sharded-")

    def saved(name, kind, shards):
        """Train a step and save it; then read it in a new run."""
        found = []
        for resume in (False, True):
            pipe = replicated()
            if shards:
                pipe.shard()
            optimizer = kind(pipe.parameters(), lr=0.1)
            checkpoints = open_checkpoints(folder + name, pipe, optimizer, resume=resume)
            if not resume:
                pipe.step(X, target=T)
                optimizer.step()
                checkpoints.save()
            tensors = [getattr(p, "full_tensor", lambda p=p: p)() for p in pipe.parameters()]
            states = [optimizer.state[p].keys() for p in pipe.parameters()]
            found.append((tensors, states))
        (before, state), (after, again) = found
        assert all(map(torch.equal, before, after)) and state == again and all(state)

    for kind in (ByRow, partial(ByRow, local=True)):
        with refusal(
            "SK506", "Use an optimizer whose state is like the parameters, or train without --fsdp and Pipeline.shard."
        ):
            saved("e" if kind is ByRow else "f", kind, shards=True)
    assert not [
        *Path(folder).parent.glob(f"{Path(folder).name}[ef]/step-*")
    ]  # refused before it is written, not when it is read
    saved("g", torch.optim.AdamW, shards=True)
    saved("h", ByRow, shards=False)


def joint(rank):
    from test_rank_remedies import joint_of

    with refusal(
        "SK804", "Build the same model on every rank: call torch.manual_seed with one seed before you make it"
    ):
        pipeline(joint_of(Net(seed=rank))[1], "1f1b", COUNT)
    model = Net(seed=3)
    found = pipeline(joint_of(Net(seed=3))[1], "1f1b", COUNT).step(X)
    want = torch.stack([model(x).sum() for x in X.split(2)]).mean()
    assert rank == 0 or torch.allclose(found.loss.float(), want)


def serves(rank):
    """The processes that the refusal of one rank asks for."""
    from decoders import captured, decoder

    with refusal("SK801", "Generation runs one stage on each rank: split into {...}, or start {...} processes."):
        sk.serve(sk.split(captured("llama"), sk.policies.Stages(1)))
    results = sk.serve(sk.split(captured("llama"), sk.policies.Stages(2))).generate([{"input_ids": [5, 6, 7]}])
    want = decoder("llama").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)
    assert rank or list(results[0].tokens[0]) == want[0, 3:].tolist()


def replicas_of_devices(rank):
    with refusal("SK807", "Run it with splitkit.runtime.pipeline, or plan without replicas."):
        to_devices(split_of(stages=1, replicas=2), "cpu")
    assert right(replicated())


def a_failure(rank):
    """The last: no rank goes on after it."""
    wrong = X * 100
    if not rank:
        with refusal("SK805", "Look at the messages of that rank."):
            made(split_of(Looks())).step(wrong, target=T)
    else:
        with refusal("SK805", "Run the unsplit model on the same input."):
            made(split_of(Looks())).step(wrong, target=T)
        with pytest.raises(IndexError):
            Looks()(wrong[:2])


CASES = (
    what_trains,
    shards,
    shards_over_other_ranks,
    weights,
    calls,
    graphs,
    loaded_later,
    optimizers,
    options_of_optimizers,
    steps_of_optimizers,
    sharded_optimizers,
    joint,
    serves,
    replicas_of_devices,
    a_failure,
)


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    for case in CASES:
        try:
            case(rank)
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": case.__name__, "said": said}), flush=True)


@pytest.mark.campaign
def test_two_ranks():
    from launch import launch

    lines = launch("remedies/test_two_rank_remedies.py", 2)
    assert [line["said"] for line in lines] == [""] * 2 * len(CASES)
