"""A rank of `test_sharded_stages`: stages of a model whose parameters are sharded along another dimension of a mesh."""

from __future__ import annotations

import json
import operator
import os
import random
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from shardednets import X, first_of, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.extend import stage_plan
from splitkit.graph.dataflow import module_path
from splitkit.graph.joint_marks import mark_of
from splitkit.graph.shards import full_tensor
from splitkit.policies import Budget, Pipeline, Stages
from splitkit.runtime import open_checkpoints, pipeline

COUNT = 4


class Block(nn.Module):
    """Causal attention with heads of four features, and two products."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (t.unflatten(2, (-1, 4)).transpose(1, 2) for t in (self.q(h), self.k(h), self.v(h)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Lm(nn.Module):
    """A small language model; tied, its first and its last stage share a weight."""

    def __init__(self, tied):
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())}


class Experts(nn.Module):
    """Two experts in each of three layers, each of which gets every other token; sharded, each rank has one of them."""

    def __init__(self, group):
        super().__init__()
        self.group, self.inp = group, nn.Linear(8, 8)
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(2, 8, 8) * 0.3) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for weight in self.experts:
            y = x.unflatten(0, (-1, 2)).transpose(0, 1)
            y = torch.bmm(y, weight).tanh() if self.group is None else self._exchanged(y, weight)
            x = x + y.transpose(0, 1).flatten(0, 1)
        return {"loss": x.square().mean()}

    def _exchanged(self, y, weight):
        sent = collectives.all_to_all_single_autograd(y.flatten(0, 1), None, None, self.group)
        made = (sent @ weight.to_local()[0]).tanh()
        return collectives.all_to_all_single_autograd(made, None, None, self.group).unflatten(0, (2, -1))


class Random(nn.Module):
    """Products, norms, an embedding and a buffer in a random order, some of them twice, with random ways around."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.emb, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=draw.random() < 0.5)
        self.ups = nn.ModuleList(nn.Linear(8, 16, bias=draw.random() < 0.5) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(16, 8, bias=draw.random() < 0.5) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.order = [draw.choice(("mlp", "norm", "scale", "back", "halves")) for _ in range(draw.randint(4, 8))]
        self.picks = [draw.randrange(6) for _ in self.order]
        if draw.random() < 0.4:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        seen = [x]
        for what, pick in zip(self.order, self.picks, strict=True):
            if what == "mlp":
                x = x + self.downs[pick % 3](F.gelu(self.ups[pick % 3](x)))
            elif what == "norm":
                x = self.norms[pick % 2](x)
            elif what == "scale":
                x = x * self.scale + 0.1
            elif what == "back":
                x = x + 0.5 * seen[pick % len(seen)]
            else:
                one, other = x.chunk(2, dim=-1)
                x = torch.cat([other.tanh(), one * other], dim=-1)
            seen.append(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def random_shards(kind, model, mesh):
    """Shard some of the modules of a `Random` net; each takes and returns the whole of each sample."""
    draw = random.Random(f"{kind} shards")
    whole = Replicate()
    plan = {"emb": RowwiseParallel(input_layouts=whole), "head": ColwiseParallel(output_layouts=whole)}
    tied = model.head.weight is model.emb.weight
    kept = {"emb", "head"} if tied or draw.random() < 0.7 else set()
    plan = {name: style for name, style in plan.items() if name in kept}
    for i in range(3):
        way = draw.randrange(5)
        if way < 2:
            plan |= {f"ups.{i}": ColwiseParallel(), f"downs.{i}": RowwiseParallel()}
        elif way == 2:
            plan[f"ups.{i}"] = ColwiseParallel(output_layouts=whole)
        elif way == 3:
            plan[f"downs.{i}"] = RowwiseParallel(input_layouts=whole)
    parallelize_module(model, mesh, plan or {"ups.0": ColwiseParallel(output_layouts=whole)})
    if tied:
        model.head.weight = model.emb.weight
    return model


def build(kind, group=None):
    """The model, and one microbatch."""
    torch.manual_seed(0)
    if kind.startswith("random"):
        return Random(kind), {"ids": torch.randint(0, 16, (2, 4))}
    if kind == "experts":
        return Experts(group), {"x": torch.randn(8, 8)}
    return Lm(kind == "tied"), {"ids": torch.randint(0, 32, (2, 8))}


def parallel(kind, model, mesh):
    """Shard the parameters of a model over a mesh."""
    if kind.startswith("random"):
        return random_shards(kind, model, mesh)
    col, row, rows = ColwiseParallel, RowwiseParallel, Shard(1)
    if kind == "experts":
        for i, weight in enumerate(model.experts):
            model.experts[i] = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        return model
    plan = {"q": col(), "k": col(), "v": col(), "o": row(), "up": col(), "down": row()}
    if kind == "tied":
        whole = {"emb": row(input_layouts=Replicate()), "head": col(output_layouts=Replicate())}
    else:
        own = {"input_layouts": rows}
        plan = {name: col(**own) if isinstance(one, col) else row(output_layouts=rows) for name, one in plan.items()}
        plan |= {"norm": SequenceParallel(), "norm2": SequenceParallel()}
        whole = {
            "emb": row(input_layouts=Replicate(), output_layouts=rows), "norm": SequenceParallel(),
            "head": col(input_layouts=rows, output_layouts=Replicate()),
        }  # fmt: skip
    parallelize_module(model, mesh, whole)
    if kind == "tied":
        model.head.weight = model.emb.weight
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def apart(kind, own, other):
    """The largest difference of gradients from the whole model, relative to the largest entry of each."""
    whole = dict(other.named_parameters())
    most = 0.0
    for name, gradient in own.items():
        # each rank of experts has a batch of its own, and here they have the same
        want = whole[name].grad * (2 if name.startswith("experts") else 1)
        most = max(most, float((full_tensor(gradient) - want).abs().max() / want.abs().max()))
    return most


def above_on_a_rank(measured, planned):
    above = torch.tensor(int(measured > planned))
    dist.all_reduce(above)
    return bool(above)


def in_one_stage(kind, model, batch, other):
    """Plans of the whole training step on two ranks: gradients, and bytes as they were predicted."""
    joint = sk.capture(model, **batch, training=True)
    trained = [name for name, p in other.named_parameters() if p.grad is not None]
    assert sorted(joint.run(**batch).gradients) == sorted(trained)
    most = 0.0
    for budget in ("least", 1.0):
        pair = joint.split(Budget(budget))
        primals, tangents = joint.primals(**batch), joint.tangents()
        planned = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        # gloo's thread may hold what a collective has read for a moment longer; both ranks measure equally often
        peaks = [sk.measure_memory(pair.run, list(primals), list(tangents)).peak]
        while len(peaks) < 8 and above_on_a_rank(min(peaks), planned.peak):
            peaks.append(sk.measure_memory(pair.run, list(primals), list(tangents)).peak)
        assert min(peaks) == planned.peak, (peaks, planned.peak)
        outputs, gradients = pair.run(joint.primals(**batch), joint.tangents())
        most = max(most, apart(kind, joint.read([*outputs, *gradients]).gradients, other))
    nodes = joint.graph_module.graph.nodes
    names = [(n.name, [a.name for a in n.all_input_nodes]) for n in nodes]
    return {"apart": most, "names": names, "taken": [n.args[1] for n in nodes if n.target is operator.getitem]}


def in_stages(kind, model, batch, other, loss, mesh, schedule, how):
    """One step of a pipeline, and the norm of its gradients."""
    stages, across = mesh.size(0), mesh.size(1)
    planned = sk.capture_joint(model, **batch)
    if how == "forward":
        step = planned.split(of_forward(planned))
    else:
        step = planned.split(Pipeline(stages * (2 if schedule == "zbv" else 1), schedule, COUNT, recompute=False))
    group = mesh.get_group("pp")
    if across > 1:
        parts = {key: replace(part, replicas=across) for key, part in step.plan.parts.items()}
        step = planned.split(replace(step.plan, parts=parts))
        group = mesh["pp", "dp"]._flatten("pp_dp").get_group()
    pipe = pipeline(step, schedule, COUNT, group=group)
    if how == "fsdp":
        pipe.shard(mesh["dp"])
    pipe.step(**{name: torch.cat([one] * COUNT) for name, one in batch.items()})
    own = {name: p.grad for name, p in pipe.named_parameters().items() if p.grad is not None}
    assert kind.startswith("random") or any(isinstance(gradient, DTensor) for gradient in own.values())
    held = [(name, p.grad) for name, p in other.named_parameters() if p.grad is not None]
    want = [gradient * (2 if name.startswith("experts") else 1) for name, gradient in held]
    norm = nn.utils.get_total_norm(want)
    lost = abs(float(pipe.evaluate(**{name: torch.cat([one] * COUNT) for name, one in batch.items()}) / loss) - 1)
    most = max(apart(kind, own, other), lost)
    found = {"apart": most, "norm": abs(float(pipe.clip_grad_norm(1.0) / norm) - 1)}
    return found if how == "fsdp" else found | {"eval": evaluated(model, batch, other, pipe)}


def of_forward(joint):
    """Two stages by the modules of forward, cut in the middle of a block."""
    stages, stage = {}, 0
    for node in joint.flow.nodes:
        if mark_of(node) != "is_backward":
            stage = max(stage, int("blocks.1.norm2" in module_path(node)))
            stages[node] = stage
    return stage_plan(joint.flow, stages)


def evaluated(model, batch, other, pipe):
    """How far the loss of the forward alone is from the whole model's, before and after the weights change."""
    evaluation = pipe.evaluation(sk.capture(model.eval(), **batch))
    whole_batch, most = {name: torch.cat([one] * COUNT) for name, one in batch.items()}, 0.0
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for parameter in (*other.parameters(), *pipe.parameters()):
                parameter.mul_(factor)
            loss = other.eval()(**batch)["loss"]
        most = max(most, abs(float(evaluation.evaluate(**whole_batch) / loss) - 1))
    return most


def inferred(model, batch, other, mesh, schedule):
    """How far outputs of the forward alone in stages are from the whole model's, and what a step says."""
    gm, stages = sk.capture(model, **batch), mesh.size(0)
    pipe = pipeline(sk.split(gm, Stages(stages)), schedule, COUNT, group=mesh.get_group("pp"))
    whole_batch = {name: torch.cat([one] * COUNT) for name, one in batch.items()}
    made = pipe.infer(**whole_batch)
    try:
        pipe.step(**whole_batch)
    except SplitError as error:
        said = str(error)
    with torch.no_grad():
        want = other(**batch)["loss"]
    alone = max(abs(float(one["loss"] / want) - 1) for one in (gm(**batch), *(made or ())))
    return {"apart": alone, "step": said, "made": made is not None}


def refused(kind, model, batch, other, mesh):
    """What each wrong call says on this rank."""
    rank, said = dist.get_rank(), {}

    def tried(name, call):
        try:
            call()
            said[name] = ""
        except SplitError as error:
            said[name] = str(error)
        dist.barrier()

    step = sk.capture_joint(model, **batch).split(Pipeline(2, schedule="1f1b", microbatches=COUNT))
    group = mesh.get_group("pp")
    tried("microbatches", lambda: pipeline(step, "1f1b", COUNT + mesh.get_local_rank("tp"), group=group))
    with torch.no_grad():
        if rank in (1, 3):
            model.inp.weight.add_(1)
    tried("weights", lambda: pipeline(step, "1f1b", COUNT, group=group))
    return said


def checkpoints(kind, batch, other, mesh, folder):
    """A run that is saved after its first step and goes on, and one that is resumed from there."""
    whole_batch, group = {name: torch.cat([one] * COUNT) for name, one in batch.items()}, mesh.get_group("pp")
    ended = []
    for resume in (False, True):
        fresh = parallel(kind, build(kind)[0], mesh["tp"])
        step = sk.capture_joint(fresh, **batch).split(Pipeline(2, schedule="1f1b", microbatches=COUNT))
        pipe = pipeline(step, "1f1b", COUNT, group=group)
        if resume:
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.zero_()
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        kept = open_checkpoints(folder, pipe, optimizer, resume=resume)
        while pipe.steps < 2:
            pipe.step(**whole_batch)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.steps == 1:
                kept.save(wait=kind == "tied")
        kept.wait()
        ended.append({name: full_tensor(p.detach()).clone() for name, p in pipe.named_parameters().items()})
    moved = max(float((ended[0][name] - p).abs().max()) for name, p in other.named_parameters() if name in ended[0])
    return {"same": all(torch.equal(one, ended[1][name]) for name, one in ended[0].items()), "moved": moved}


def prepare():
    """What is slow only once is done before there are ranks."""
    with first_of(2) as mesh:
        joint = sk.capture_joint(sharded(mesh["tp"], 1), X)
    joint.split(Pipeline(2, recompute=False))


def main():
    """Say by how much this rank differs from the whole model."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for word in sys.argv[1:]:
        kind, schedule, how = word.split(",")
        across = 2 if how in ("replicas", "fsdp") else 1
        mesh = init_device_mesh("cpu", (ranks // across // 2, across, 2), mesh_dim_names=("pp", "dp", "tp"))
        model, batch = build(kind, mesh.get_group("tp"))
        parallel(kind, model, mesh["tp"])
        other, _ = build(kind)
        loss = other(**batch)["loss"]
        loss.backward()
        if how.startswith("/"):
            found = checkpoints(kind, batch, other, mesh, how)
        elif how == "infer":
            found = inferred(model, batch, other, mesh, schedule)
        elif how == "refused":
            found = refused(kind, model, batch, other, mesh)
        elif schedule == "none":
            found = in_one_stage(kind, model, batch, other)
        else:
            found = in_stages(kind, model, batch, other, float(loss), mesh, schedule, how)
        print(json.dumps({"rank": rank, "case": word, **found}), flush=True)


if __name__ == "__main__":
    main()
