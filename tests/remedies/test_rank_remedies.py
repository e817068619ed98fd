"""Remedies of errors about pipelines on ranks (SK330, SK801 to SK804), with several stages on one rank."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from besidewhole import require_same
from campaigns import every_third
from carried import Remedy, refusal
from ownorders import own_order
from torch import nn

import splitkit as sk
from splitkit._torch import ENTER_AUTOCAST
from splitkit.cli.common import with_part_flags
from splitkit.errors import PipelineError
from splitkit.pipeline.schedules import pipeline_order
from splitkit.policies import Stages
from splitkit.runtime import (
    PipelineModule,
    open_checkpoints,
    open_stages,
    pipeline,
    planned_once,
    save_pretrained,
    save_stages,
)
from splitkit.runtime.folder.whole_model import save_safetensors
from splitkit.runtime.ranks import torch_stages
from splitkit.runtime.ranks.border_values import BorderValue
from splitkit.runtime.ranks.measurements import StepRecorder
from splitkit.runtime.ranks.order_runner import order_of, placed_order
from splitkit.runtime.ranks.rank_device import _require_effective_autocast
from splitkit.runtime.ranks.replicas import require_replicable
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.testing.pipeline_check import UnsplitModel
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

SEVERAL = "Interleaved1F1B"  # any number of stages on a rank
X, T = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)


class Net(nn.Module):
    def __init__(self, last=nn.Identity, returns_loss=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.b = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.last, self.returns_loss = last(), returns_loss

    def forward(self, x, target=None):
        y = self.last(self.b(self.drop(self.a(x)).tanh()))
        return {"loss": square(y, target), "logits": y} if self.returns_loss else y


def square(output, target):
    return (output - target).square().mean()


def net(**options):
    """A model without random numbers."""
    made = Net(**options)
    made.drop = nn.Identity()
    return made


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with refusal("SK804", "Start with torchrun and torch.distributed.init_process_group."):
        made()
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)  # torchrun's part: one process
    assert right(made())
    yield
    dist.destroy_process_group()


def made(model=None, parts=2, loss=square, split=None, **options):
    """A pipeline of two microbatches."""
    return pipeline(split or split_of(model, parts), SEVERAL, 2, loss=loss, **options)


def split_of(model=None, parts=2, **inputs):
    return sk.split(sk.capture(model or net(), *(() if inputs else (X[:2],)), **inputs), sk.policies.Stages(parts))


def close(a, b):
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-5, atol=1e-7)


def right(pipe, model=None, trains=lambda name: True):
    """Whether a step has the loss and the gradients of the unsplit model."""
    model = copy.deepcopy(model or net())
    found, want = pipe.step(X, target=T), square(model(X), T)
    want.backward()
    own = dict(pipe.named_parameters())
    grads = [(own[n].grad, p.grad if trains(n) else None) for n, p in model.named_parameters()]
    return close(found.loss, want) and all((a is None) == (b is None) and (a is None or close(a, b)) for a, b in grads)


def by_labels(model, second, **inputs):
    """Two stages, of which the second begins at a node."""
    gm = sk.capture(model, **(inputs or {"x": X[:2]}))
    nodes = sk.analyze(gm).nodes
    start = next(i for i, n in enumerate(nodes) if n.name == second) if second else len(nodes)
    return sk.split(gm, {n: int(i >= start) for i, n in enumerate(nodes)})


class Writes(nn.Module):
    """Writes memory that another stage may read."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = self.a(x)
        if self.kind == "view":
            part = y[0]
            y.mul_(2)
            return self.b(y) + part
        if self.kind == "input":
            x.mul_(2)
            return self.b(y) + x
        return self.b(y)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x)[x.sum(1) > 0].relu()


def runs(split, model):
    """Whether a split infers what the model does, one microbatch at a time."""
    pipe = pipeline(split, SEVERAL, 1, device="cpu")
    with torch.no_grad():
        return close(pipe.infer(X[:2].clone())[0], model(X[:2].clone()))


class Swapped(Net):
    def forward(self, x, target=None):
        return self.a(self.b(x).tanh())


class Smaller(Net):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 4)


class Shorter(Net):
    def forward(self, x, target=None):
        return self.a(x).tanh()


def evaluated(model):
    """The evaluation of a pipeline by a capture of a model."""
    return made(Net()).evaluation(sk.capture(model.eval(), x=X[:2]))


def evaluates(pipe, model=None):
    with torch.no_grad():
        return close(pipe.evaluate(X, target=T), square((model or Net()).eval()(X), T))


ORDER = pipeline_order("1F1B", 2, 4, 2)


def shared_out(policy, dp=None):
    """Give the replicas of a plan to four ranks, as `splitkit train` does."""
    plan = with_part_flags(sk.plan(sk.capture(net(), X[:2]), policy), Namespace(dp=dp, recompute=False))
    counts = [part.replicas for part in plan.parts.values()]
    require_replicable((), counts, 4, 4)
    return placed_order("1f1b", counts[0], len(counts), 4, 4)


REPLICAS = [
    Remedy(
        "SK330",
        "Use a multiple of {...}.",
        lambda: require_replicable((), (2, 2), 4, 5),
        lambda: require_replicable((), (2, 2), 4, 6),
    ),
    Remedy(
        "SK330",
        "Use a multiple of {...}.",
        lambda: require_replicable((), (2, 2), 3, 4),
        lambda: require_replicable((), (2, 2), 4, 4),
    ),
    Remedy(
        "SK330",
        "Plan with one number of replicas, such as Stages(4, replicas=(2,)), or give splitkit train --dp 2.",
        lambda: require_replicable((), (2, 1, 1), 4, 4),
        (lambda: shared_out(Stages(4, replicas=(2,))), lambda: shared_out(Stages(2), dp=2)),
    ),
    Remedy(
        "SK330",
        "Use as many, or another order: a row for each of {...} ranks, {...} stages.",
        lambda: order_of(ORDER, 3, 4, 3),
        (lambda: order_of(ORDER, 2, 4, 2) is ORDER, lambda: order_of(pipeline_order("1F1B", 3, 4, 3), 3, 4, 3)),
    ),
    Remedy(
        "SK330",
        "Put a stage there, or start {...} processes.",
        lambda: order_of(own_order(["0F0 0B0", ""]), 1, None, 2),
        (lambda: order_of(ORDER, 2, 4, 2), lambda: order_of(own_order(["0F0 0B0"]), 1, None, 1)),
    ),
]


@pytest.mark.parametrize("remedy", REPLICAS, ids=lambda remedy: remedy.told[:40])
def test_replicas(remedy):
    remedy.carry_out()


SIMPLE = [
    Remedy("SK802", "Give a whole number.", lambda: made(seed=1.5), lambda: right(made(seed=2))),
    Remedy("SK802", "Give a positive number.", lambda: made().clip_grad_norm(0), lambda: clipped(1e-2)),
    Remedy(
        "SK802",
        "Load a state of the model that was captured.",
        lambda: made().load_state_dict({"a.weight": torch.ones(4, 4)}),
        lambda: loaded(),
    ),
    Remedy(
        "SK802",
        "Give rank_of a rank for each stage, and each rank a stage.",
        lambda: torch_stages.stage(split_of(), 0, rank_of=(0, 1)),
        lambda: [one.stage_index for one in torch_stages.stage(split_of(), 0, rank_of=(0, 0))] == [0, 1],
    ),
    Remedy(
        "SK801",
        "Capture in eval mode (BatchNorm then writes nothing), or run one pipeline: --dp 1.",
        lambda: require_replicable(writes(net(last=lambda: nn.BatchNorm1d(4))), (2,), 2, 2),
        (
            lambda: require_replicable(writes(net(last=lambda: nn.BatchNorm1d(4)).eval()), (2,), 2, 2),
            lambda: require_replicable(writes(net(last=lambda: nn.BatchNorm1d(4))), (1,), 1, 2),
        ),
    ),
    Remedy(
        "SK801",
        "Put all nodes that read or write it into one stage: splitkit.plan(gm, {..., {...}: 0, {...}: 0}), or Stages",
        lambda: chain_of(by_labels(Writes("input"), "linear_1")),
        lambda: runs(by_labels(Writes("input"), None), Writes("input")),
    ),
    Remedy(
        "SK801",
        "Put the nodes that share it into one stage.",
        lambda: chain_of(by_labels(Writes("view"), "mul_")),
        lambda: runs(by_labels(Writes("view"), "linear_1"), Writes("view")),
    ),
    Remedy(
        "SK801",
        "Capture the same model: evaluation = pipe.evaluation(sk.capture(model.eval(), **inputs_of_one_microbatch)).",
        lambda: evaluated(Swapped()),
        lambda: evaluates(evaluated(Net())),
    ),
    Remedy(
        "SK801",
        "Capture the same model: evaluation = pipe.evaluation(sk.capture(model.eval(), **inputs_of_one_microbatch)).",
        lambda: evaluated(Smaller()),
        lambda: evaluates(evaluated(Net())),
    ),
    Remedy(
        "SK801",
        "Capture the same model: evaluation = pipe.evaluation(sk.capture(model.eval(), **inputs_of_one_microbatch)).",
        lambda: evaluated(Shorter()),
        lambda: evaluates(evaluated(Net())),
    ),
    Remedy(
        "SK801",
        "Capture inside torch.autocast({...}, ...), which follows the rank to {...}; or move the model to {...} before",
        lambda: on_rank(autocast("cuda")),
        lambda: on_rank(autocast("cpu")),  # a GPU is needed to move the model there before
    ),
]


def writes(model):
    return chain_of(sk.split(sk.capture(model, X), lambda node: 0)).facts.writes


def clipped(most):
    model, pipe = net(), made()
    pipe.step(X, target=T)
    square(model(X), T).backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), most)
    found, own = pipe.clip_grad_norm(most), dict(pipe.named_parameters())
    return close(found, want) and all(close(own[n].grad, p.grad) for n, p in model.named_parameters())


def loaded():
    other, pipe = net(), made()
    with torch.no_grad():
        other.a.weight.mul_(2)
    pipe.load_state_dict(other.state_dict())
    return right(pipe, other)


class Cast(Net):
    def forward(self, x, target=None):
        with torch.autocast("cpu", torch.bfloat16):
            return self.a(x)


def autocast(kind):
    """A capture on the CPU; autocast of a GPU would be left out where there is none."""
    gm = sk.capture(Cast(), x=X)
    for node in gm.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            node.args = (kind, *node.args[1:])
    return gm


def on_rank(gm):
    _require_effective_autocast(gm, "cuda", frozenset({"cpu"}))


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda remedy: remedy.told[:40])
def test_simple(remedy):
    remedy.carry_out()


def test_a_loss_that_is_no_number():
    for wrong in (lambda out, target: out, lambda out, target: 1.0, lambda out, target: square(out.detach(), target)):
        with refusal("SK802", "Give one number that requires grad."):
            made(loss=wrong).step(X, target=T)
        assert right(made())


def test_outputs_after_steps_without():
    model = net(returns_loss=True)
    split = split_of(model, x=X[:2], target=T[:2])
    batch = {"x": X, "target": T}
    pipe = made(split=split, loss=None)
    pipe.step(**batch)
    with refusal("SK802", "Ask in the first step: step(..., outputs=True)."):
        pipe.step(**batch, outputs=True)
    pipe = made(split=split, loss=None)
    for _ in range(2):
        found = pipe.step(**batch, outputs=True)
        assert close(torch.cat([one["logits"] for one in found.outputs]), model(**batch)["logits"])


def test_an_autocast_around_the_call():
    model, pipe = net(), made()
    with torch.autocast("cpu", torch.bfloat16):
        with refusal("SK802", "Call capture inside torch.autocast(..., {...}); the call needs no autocast") as caught:
            pipe.step(X, target=T)
        want = square(model(X), T)
    shown = re.search(r"torch\.autocast\(.*?\)", caught.value.remedy)[0].replace("...", "'cpu'")
    with eval(shown):
        split = split_of()
    assert close(made(split=split).step(X, target=T).loss, want) and not torch.equal(want, square(model(X), T))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_a_part(training):
    """The capture that the remedy shows is in the mode that was wanted, of which the step or evaluation is right."""
    model, inputs_of_one_microbatch = net(last=lambda: nn.BatchNorm1d(4)).train(training), {"x": X[:2]}
    split = split_of(model, **inputs_of_one_microbatch)
    for part in split.parts.values():
        part.training = training  # captures are in training mode whatever the model was; traced graphs need not be
    pipe = made(split=split)
    pipe.modules[-1].train(not training)
    with refusal(
        "SK802", "Capture the model in the other mode, and run that with the same weights: pipe.eval"
    ) as caught:
        pipe.step(X, target=T)
    shown = re.search(r"pipe\.evaluation\(sk\.capture\(model\.\w+\(\), .*?\)\)", caught.value.remedy)[0]
    other = eval(shown, {"pipe": pipe, "sk": sk, "model": model, "inputs_of_one_microbatch": inputs_of_one_microbatch})
    assert model.training is not training
    with torch.no_grad():
        want = torch.stack([square(model(x), t) for x, t in zip(X.split(2), T.split(2), strict=True)]).mean()
    found = other.evaluate(X, target=T) if training else other.step(X, target=T).loss
    assert close(found, want)
    getattr(pipe.modules[-1], re.search(r"Undo it with (\w+)\(\)", caught.value.remedy)[1])()
    pipe.step(X, target=T)


def test_what_trains():
    pipe = made()
    dict(pipe.named_parameters())["a.weight"].requires_grad_(False)
    with refusal("SK802", "Tell all ranks: pipe.train_only(lambda name: ...)."):
        pipe.step(X, target=T)
    trains = lambda name: name != "a.weight"  # noqa: E731
    pipe.train_only(trains)
    assert right(pipe, trains=trains)


def test_a_folder_of_stages(tmp_path):
    save_stages(split_of(), tmp_path)
    pipe = made(split=open_stages(tmp_path))
    with refusal("SK802", "Make the pipeline of a split: pipeline(split)."):
        pipe.evaluation(sk.capture(net().eval(), x=X[:2]))
    assert evaluates(made().evaluation(sk.capture(net().eval(), x=X[:2])), net())
    with refusal("SK802", "Capture the model, and pass the graph too."):
        UnsplitModel(pipe)
    unsplit = UnsplitModel(pipe, sk.capture(net(), X[:2]))
    losses = unsplit.step(X, target=T)
    assert require_same(unsplit, pipe.step(X, target=T), losses).loss < 1e-6


def test_recorded_steps():
    pipe = made()
    with refusal("SK802", "Run one step first, because the first step is slower than the others."):
        StepRecorder(pipe)
    pipe.step(X, target=T)
    recorder = StepRecorder(pipe)
    with refusal("SK802", "Run a step first."):
        recorder.measured()
    pipe.step(X, target=T)
    assert recorder.measured()


def batch(**more):
    return {"x": X, "target": T, **more}


def module(dtype=None):
    """A pipeline as a module, captured inside autocast to a dtype."""
    model = net(returns_loss=True)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        return PipelineModule(made(split=split_of(model, x=X[:2], target=T[:2]), loss=None)), model


def near(pipe, model, dtype, scale=1):
    """Whether gradients are those of the model within autocast, whose rounding depends on the order of sums."""
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = model(**batch())["loss"]
    loss.backward()
    own = dict(pipe.named_parameters())
    return all(torch.allclose(own[n].grad / scale, p.grad, rtol=0.1, atol=0.02) for n, p in model.named_parameters())


def test_a_module_in_a_loop():
    (net_, model), given = module(), batch()
    loss = net_.train()(**given)["loss"]
    loss.backward(retain_graph=True)
    with refusal("SK802", "Call the model again."):
        loss.backward()
    net_.zero_grad()
    net_(**given)["loss"].backward()
    model(**given)["loss"].backward()
    assert all(close(dict(net_.pipe.named_parameters())[n].grad, p.grad) for n, p in model.named_parameters())
    with refusal("SK802", "Give PipelineModule(pipe, evaluation) a pipeline of the model captured in eval mode."):
        net_.eval()(**given)
    evaluation = net_.pipe.evaluation(sk.capture(model.eval(), x=X[:2], target=T[:2]))
    assert close(PipelineModule(net_.pipe, evaluation).eval()(**given)["loss"], model(**given)["loss"])


def test_a_scaled_loss():
    net_, model = module(torch.float16)
    with refusal("SK802", "Capture in bfloat16, without a GradScaler; or drive the pipeline itself, with a scaler in "):
        (net_.train()(**batch())["loss"] * 128).backward()
    net_, model = module(torch.bfloat16)
    net_.train()(**batch())["loss"].backward()
    assert near(net_.pipe, model, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        split = split_of(net(), x=X[:2])
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    pipe = made(split=split, loss=lambda output, target: scaler.scale(square(output, target)))
    pipe.step(X, target=T)
    assert near(pipe, model, torch.float16, scale=128)


def test_a_value_that_cannot_be_sent():
    split = by_labels(Masked(), "relu")
    with refusal("SK801", "Put the ops that make it and read it into one stage."):
        pipeline(split, SEVERAL, 1).infer(X[:2])
    assert runs(by_labels(Masked(), None), Masked())


def test_a_value_that_does_not_fit_the_next_stage():
    border = BorderValue("x", torch.empty(2, 3, device="meta", requires_grad=True))
    for value in (torch.ones(2, 4, requires_grad=True), torch.ones(2, 3)):
        with refusal(
            "SK803", "Capture with inputs that have the shape of one microbatch, in the mode and the autocast"
        ):
            border.packed(value, torch.device("cpu"), "after stage 0")
    assert right(made())


def test_stages_of_torch():
    """A call of torch's schedule, with the names that the remedy gives."""
    model = Net()
    own = torch_stages.stage(split_of(model), 0)
    with refusal(
        "SK802", "Give every rank all inputs by keyword, and {...}=torch.tensor([...]) where the model draws."
    ) as caught:
        own[0].submod(x=X[:2])
    seed = re.search(r"(\w+)=torch", caught.value.remedy)[1]
    with refusal(
        "SK802", "Give every rank all inputs by keyword, and {...}=torch.tensor([...]) where the model draws."
    ):
        own[0].submod(**{seed: torch.tensor([3])})
    own[0].submod(x=X[:2], **{seed: torch.tensor([3])})


def dynamic(**options):
    """A pipeline for any number of rows."""
    gm = sk.capture(net(), X[:2], dynamic=True)
    return made(split=sk.split(gm, sk.policies.Stages(2)), **options)


class Two(Net):
    """Reads two inputs."""

    def forward(self, x, more):
        return self.b(self.a(x).tanh()) + more


def two(**options):
    gm = sk.capture(Two(), x=X[:2], more=X[:2], **options)
    return made(split=sk.split(gm, sk.policies.Stages(2)))


def shared():
    """Whether every microbatch gets an input as it is."""
    gm = sk.capture(Two(), x=X[:2], more=X[:2])
    pipe = made(split=sk.split(gm, sk.policies.Stages(2)), batch_dims={"more": None})
    with torch.no_grad():
        want = torch.stack([square(Two()(x, X[:2]), t) for x, t in zip(X.split(2), T.split(2), strict=True)]).mean()
    return close(pipe.step(X, X[:2], target=T).loss, want)


def right_of_two(x=X, more=X, target=T, pipe=None):
    with torch.no_grad():
        want = square(Two()(x, more), target)
    return close((pipe or two()).step(x, more, target=target).loss, want)


def each(x=X, more=X, target=T):
    """A step whose batch is given as microbatches."""
    rows = [{"x": a, "more": b} for a, b in zip(x.split(2), more.split(2), strict=True)]
    with torch.no_grad():
        want = square(Two()(x, more), target)
    return close(two().step(microbatches=rows, target=target.split(2)).loss, want)


MICROBATCHES = [
    Remedy(
        "SK802",
        "Give the inputs of the model.",
        lambda: made().step(X, X, target=T),
        lambda: right(made()),
    ),
    Remedy("SK802", "Give a tensor.", lambda: dynamic().step(3, target=T), lambda: right(dynamic())),
    Remedy(
        "SK802",
        "See Pipeline.needs.",
        lambda: made().step(None, target=T),
        lambda: "x" in made().needs and right(made()),
    ),
    Remedy(
        "SK802",
        "Give a multiple of {...}.",
        lambda: made().step(X, target=T[:3]),
        lambda: right(made()),
    ),
    Remedy(
        "SK802",
        "Give each microbatch {...}, as captured.",
        lambda: two().step(microbatches=[{"x": X[:1], "more": X[:1]}] * 2, target=[T[:1]] * 2),
        each,
    ),
    Remedy(
        "SK802",
        "Give the target of each microbatch.",
        lambda: two().step(microbatches=[{"x": X[:2], "more": X[:2]}] * 2, target=[T]),
        each,
    ),
    Remedy(
        "SK802",
        "Give all inputs the same number of rows; make the pipeline with batch_dims={name: None} for an input that "
        "every microbatch gets as it is; {...}.",
        lambda: two(dynamic=True).step(X, torch.cat([X, X]), target=T),
        (lambda: right_of_two(pipe=two(dynamic=True)), each, shared),
    ),
    Remedy(
        "SK802",
        "Give {...} rows or more, or leave the last batch out (drop_last=True in a DataLoader).",
        lambda: dynamic().step(X[:1], target=T[:1]),
        lambda: all(right(dynamic()) for x in torch.utils.data.DataLoader(torch.cat([X, X[:1]]), 4, drop_last=True)),
    ),
    Remedy(
        "SK802",
        "Give one: pipeline(split, loss=lambda output, target: ...); on the command line, --loss cross_entropy.",
        lambda: made(loss=None).step(X),
        lambda: right(made(loss=lambda output, target: square(output, target))),
    ),
]


@pytest.mark.parametrize("remedy", MICROBATCHES, ids=lambda remedy: remedy.told[:40])
def test_microbatches(remedy):
    remedy.carry_out()


def test_batches_of_the_size_that_the_remedy_names():
    with refusal("SK802", "Give {...}{...}: {...}; {...}.{...}") as caught:
        made().step(X[:3], target=T[:3])
    rows = int(re.search(r"float32\[(\d+), 4\]", caught.value.remedy)[1])
    assert made().step(X[:rows], target=T[:rows]) and right(made()) and right(dynamic())
    assert "dynamic=True" in caught.value.remedy and "drop_last=True" in caught.value.remedy
    pair = [{"x": X[:2], "more": X[:2]}] * 3
    with refusal("SK802", "Give {...}, or make the pipeline with microbatches={...}.") as caught:
        two().step(microbatches=pair, target=[T[:2]] * 3)
    fewer, more = map(int, re.findall(r"\d+", caught.value.remedy))
    with torch.no_grad():
        want = square(Two()(X[:2], X[:2]), T[:2])
    assert close(two().step(microbatches=pair[:fewer], target=[T[:2]] * fewer).loss, want)
    pipe = pipeline(two().split, SEVERAL, more, loss=square)
    assert close(pipe.step(microbatches=pair, target=[T[:2]] * more).loss, want)


def test_what_ranks_agree_on():
    """Of one rank, which agrees with itself; several ranks in test_ranks_that_disagree."""
    gm = sk.capture(net(), X[:2])
    assert right(made(split=sk.split(gm, planned_once(gm, lambda: sk.plan(gm, sk.policies.Stages(2))))))


def test_sizes_that_the_graph_does_not_take():
    x, t = X[:3].repeat(2, 1), T[:3].repeat(2, 1)
    with refusal("SK802", "Give {...}{...}: {...}; {...}.{...}") as caught:
        two(dynamic=True).step(x, x[:, :3], target=t)
    rows, columns = map(int, re.findall(r"\[(\d+), (\d+)\]", caught.value.remedy)[0])
    assert right_of_two(x, x[:rows, :columns], t, two(dynamic=True))
    with refusal("SK802", "Give inputs whose sizes match each other as they did at capture."):
        two(dynamic=True).step(microbatches=[{"x": x[:3], "more": x[:2]}] * 2, target=[t[:3]] * 2)
    rows = [{"x": x[:3], "more": x[3:]}] * 2
    with torch.no_grad():
        want = square(Two()(x[:3], x[3:]), t[:3])
    assert close(two(dynamic=True).step(microbatches=rows, target=[t[:3]] * 2).loss, want)


class Folds(Net):
    """Takes an even number of columns; a capture with many of them is not for two, which some code treats apart."""

    def forward(self, x, target=None):
        return (x.view(x.shape[0], 2, -1) * self.a.weight.sum()).sum(1).tanh()


class Places(Net):
    """Takes six columns at most."""

    def forward(self, x, target=None):
        return x[..., None] * self.a.weight.sum() + torch.cat([self.b.weight, self.a.weight[:2]])[: x.shape[1]]


def of_size(model, rows, columns, captured=(2, 4)):
    """Whether a step of two microbatches of any size has the loss of the model."""
    gm = sk.capture(model, torch.ones(captured), dynamic=True)
    x = torch.linspace(-1, 1, rows * columns).view(rows, columns)
    split = sk.split(gm, sk.policies.Stages(2))
    loss = lambda output, target: output.square().mean()  # noqa: E731
    found = made(split=split, loss=loss, batch_dims={"x": 0}).step(x)
    return close(found.loss, model(x).square().mean())


SIZES = [
    Remedy(
        "SK802",
        "Give {...} rows or more for each microbatch, or leave the last batch out (drop_last=True).",
        lambda: of_size(Folds(), 2, 8, (4, 8)),
        lambda: of_size(Folds(), 4, 8, (4, 8)),
    ),
    Remedy(
        "SK802",
        "Give other sizes, or capture with inputs of these sizes.",
        lambda: of_size(Folds(), 4, 2, (4, 8)),
        (lambda: of_size(Folds(), 4, 6, (4, 8)), lambda: of_size(Folds(), 4, 2, (4, 2))),
    ),
    Remedy(
        "SK802",
        "Give other sizes, or capture with inputs of this size.",
        lambda: of_size(Places(), 4, 1, (2, 4)),
        (lambda: of_size(Places(), 4, 6, (2, 4)), lambda: of_size(Places(), 4, 1, (2, 1))),
    ),
]


@pytest.mark.parametrize("remedy", SIZES, ids=lambda remedy: remedy.told[:40])
def test_sizes(remedy):
    remedy.carry_out()


def test_parameters_in_the_parent():
    shared = nn.Sequential(tied := nn.Linear(4, 4), nn.Tanh(), tied)
    gm = sk.capture(shared, X[:2])
    with refusal("SK801", 'Split with parameters="own", and put all nodes that read a buffer that is written into one'):
        chain_of(sk.split(gm, sk.policies.Stages(2), parameters="hoist"))
    assert runs(sk.split(gm, sk.policies.Stages(2), parameters="own"), shared)


def test_an_optimizer_and_files(tmp_path):
    pipe = made()
    with refusal("SK802", "Give it pipe.parameters(), after pipe.shard() if the stages are sharded."):
        open_checkpoints(tmp_path / "a", pipe, torch.optim.SGD(net().parameters(), lr=0.1)).save()
    checkpoints = open_checkpoints(tmp_path / "b", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert checkpoints.save().exists()
    with refusal("SK802", "Use splitkit.runtime.folder.whole_model.save_safetensors(pipe, path)."):
        save_pretrained(pipe, net(), tmp_path / "c")
    save_safetensors(pipe, tmp_path / "c.safetensors")
    assert all(torch.equal(t, net().state_dict()[name]) for name, t in read(tmp_path / "c.safetensors").items())


def read(file):
    from safetensors.torch import load_file

    return load_file(file)


def test_another_model_is_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    pipe = made(split=split_of(model, input_ids=torch.ones(1, 4, dtype=torch.long)), loss=None)
    with refusal("SK802", "Pass the model that was captured, not a part of it or a module around it."):
        save_pretrained(pipe, model.transformer, tmp_path)
    save_pretrained(pipe, model, tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in again.state_dict().items())


def joint_of(model, at=2):
    """A joint graph and its stages, of which the second begins at a node of forward."""
    joint = sk.capture_joint(model, X[:2], loss=torch.sum)
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    return joint, joint.split(stage_plan(joint.flow, {n: int(i >= at) for i, n in enumerate(forward)}))


def test_joint_stages():
    pipe = pipeline(joint_of(net())[1], SEVERAL, 2)
    with refusal("SK802", "Give {...}{...}: {...}; {...}.{...}") as caught:
        pipe.step(X[:3])
    rows = int(re.search(r"\[(\d+)", caught.value.remedy)[1])
    model = net()
    want = torch.stack([model(x).sum() for x in X[:rows].split(2)]).mean()
    assert close(pipe.step(X[:rows]).loss, want)
    with refusal("SK802", "Give a whole number."):
        pipeline(joint_of(net())[1], SEVERAL, 2, seed=0.5)
    managed = net()
    managed.drop = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    joint, stages = joint_of(net())
    joint.model.drop = managed.drop
    with refusal("SK801", "Use the plain model; replicas of its stages share a batch: splitkit train --dp 2."):
        pipeline(stages, SEVERAL, 2)
    assert close(pipeline(joint_of(net())[1], SEVERAL, 2).step(X).loss, want) and right(made())


@pytest.mark.parametrize("at", every_third(range(1, 12), 1))
def test_every_cut_of_a_model_whose_gradients_have_other_sizes(at):
    """Where no activation has the size of a gradient, zeros are sent as its slot."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return self.b(y.view(-1, 2, 4).sum(1)) * y[:, ::2] + y.mean()

    assert stepped(pipeline(joint_of(Wide(), at)[1], SEVERAL, 2), Wide(), torch.sum)


def test_stages_without_their_joint_graph():
    joint, stages = joint_of(net())
    alone = replace(stages, source=None)
    with refusal("SK801", "Divide it by joint.split(plan)."):
        pipeline(alone, SEVERAL, 2)
    found = pipeline(joint.split(alone.plan), SEVERAL, 2).step(X).loss
    model = net()
    assert close(found, torch.stack([model(x).sum() for x in X.split(2)]).mean())


class CastInside(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_an_autocast_around_a_training_step():
    pipe = pipeline(joint_of(net())[1], SEVERAL, 2)
    refused = refusal("SK802", "Enter torch.autocast(..., {...}) in the model's forward, and not around the call.")
    with torch.autocast("cpu", torch.bfloat16), refused:
        pipe.step(X)
    model = CastInside()
    want = torch.stack([model(x).sum() for x in X.split(2)]).mean()
    assert close(pipeline(joint_of(CastInside())[1], SEVERAL, 2).step(X).loss, want)


def test_a_loss_beside_that_of_a_training_step():
    with refusal("SK802", "Capture it with this one: capture_joint(model, ..., loss=...)."):
        pipeline(joint_of(net())[1], SEVERAL, 2, loss=square)
    model = net()
    joint = sk.capture_joint(net(), X[:2], loss=lambda output: output.square().mean())
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    step = joint.split(stage_plan(joint.flow, {n: int(i > 1) for i, n in enumerate(forward)}))
    want = torch.stack([model(x).square().mean() for x in X.split(2)]).mean()
    assert close(pipeline(step, SEVERAL, 2).step(X).loss, want)


def test_a_parameter_that_was_frozen_at_capture():
    model = net()
    model.a.requires_grad_(False)
    pipe = pipeline(joint_of(model)[1], SEVERAL, 2)
    with refusal(
        "SK802", "Call requires_grad_() on it before capture_joint, and freeze it by train_only until it trains."
    ):
        pipe.train_only(lambda name: True)
    model = net()
    pipe = pipeline(joint_of(model)[1], SEVERAL, 2)
    pipe.train_only(lambda name: not name.startswith("a."))
    pipe.step(X)
    assert model.a.weight.grad is None and model.b.weight.grad is not None
    pipe.train_only(lambda name: True)
    pipe.step(X)
    assert model.a.weight.grad is not None


class WritesInput(Net):
    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def forward(self, x):
        x = x.clone() if self.copies else x
        return self.b(self.a(x.mul_(2)).tanh())


def stepped(pipe, model, loss):
    want = torch.stack([loss(model(x.clone())) for x in X.split(2)]).mean()
    return close(pipe.step(X.clone()).loss, want)


JOINT = [
    Remedy(
        "SK801",
        "Capture a model that copies it.",
        lambda: pipeline(joint_of(WritesInput(copies=False))[1], SEVERAL, 2),
        lambda: stepped(
            pipeline(joint_of(WritesInput(copies=True))[1], SEVERAL, 2), WritesInput(copies=True), torch.sum
        ),
    ),
]


@pytest.mark.parametrize("remedy", JOINT, ids=lambda remedy: remedy.told[:40])
def test_joint(remedy):
    remedy.carry_out()


# ---------------------------------------------------------------- how a batch is divided, and what losses are


class Columns(nn.Module):
    """Its batch is in dimension 1, as in ``nn.TransformerEncoderLayer``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh().cumsum(0))


LONG = torch.linspace(-1, 1, 48).view(3, 4, 4)  # three positions, four rows


def in_columns(captured=LONG[:, :2], dynamic=False, reduction="mean", **options):
    gm = sk.capture(Columns(), captured.contiguous(), dynamic=dynamic)
    split = sk.split(gm, sk.policies.Stages(2))
    return made(
        split=split, loss=lambda output, target: (output - target).square().mean(), reduction=reduction, **options
    )


def right_in_columns(pipe, **batch):
    found = pipe.step(**(batch or {"x": LONG, "target": LONG})).loss
    return close(found, (Columns()(LONG) - LONG).square().mean().detach())


def test_a_batch_as_large_as_one_microbatch():
    whole = made(split=split_of())
    with refusal(
        "SK802", "Capture with the inputs of one microbatch{...}; or give {...} as {...}{...}{...}; {...}."
    ) as caught:
        whole.step(X[:2], target=T[:2])
    rows = int(re.search(r"float32\[(\d+), 4\]", caught.value.remedy.split(" as ")[1])[1])
    assert rows == 4 and right(whole)
    halves = [{"x": x} for x in X[:2].repeat(2, 1).split(2)]
    assert whole.step(microbatches=halves, target=list(T.split(2))).loss is not None


def test_a_batch_in_another_dimension():
    with refusal("SK802", "If so, name it where you make the pipeline: batch_dims={{...}: {...}}; {...}.") as caught:
        in_columns().step(x=LONG, target=LONG)
    dims = eval(re.search(r"batch_dims=(\{.*?\})", caught.value.remedy)[1])
    named = r"if another dimension than 0 holds the batch, name it: batch_dims=(\{.*?\})"
    for columns in (LONG[:, :3], LONG[:, :2]):  # a batch of another size, and of one microbatch
        with pytest.raises(PipelineError) as caught:
            in_columns().infer(x=columns)
        assert eval(re.search(named, caught.value.remedy)[1]) == dims
    assert dims == {"x": 1} and right_in_columns(in_columns(batch_dims={**dims, "target": 1}))
    with refusal("SK802", "Name the dimension where you make the pipeline: batch_dims={..., 'target': 1}."):
        in_columns(batch_dims=dims).step(x=LONG, target=LONG)
    each = {"microbatches": [{"x": x} for x in LONG.split(2, 1)], "target": list(LONG.split(2, 1))}
    assert right_in_columns(in_columns(), **each)
    with refusal("SK802", "Name a dimension, from 0 on, of one of {...}, or of the target."):
        in_columns(batch_dims={"y": 1})
    with refusal("SK802", "Name the right one where you make the pipeline: {...}; {...}.") as caught:
        in_columns(dynamic=True).step(x=LONG.repeat(1, 2, 1), target=LONG.repeat(1, 2, 1))
    named = {**eval(re.findall(r"batch_dims=(\{.*?\})", caught.value.remedy)[1]), "target": 1}
    twice = LONG.repeat(1, 2, 1)
    found = in_columns(dynamic=True, batch_dims=named).step(x=twice, target=twice).loss
    assert close(found, (Columns()(LONG) - LONG).square().mean().detach())


def test_microbatches_whose_rows_are_unclear():
    def uneven(pipe):
        parts = [x.contiguous() for x in (LONG[:2, :2], LONG)]
        loss = pipe.step(microbatches=[{"x": x} for x in parts], target=parts).loss
        with torch.no_grad():
            each = [(Columns()(x) - x).square() for x in parts]
        return loss, each

    with refusal(
        "SK802",
        "Name the right one where you make the pipeline, such as batch_dims={{...}: 1}; or give it another reduction "
        'than "mean".',
    ):
        uneven(in_columns(dynamic=True))
    loss, each = uneven(in_columns(dynamic=True, batch_dims={"x": 1, "target": 1}))
    assert close(loss, (2 * each[0].mean() + 4 * each[1].mean()) / 6)  # two rows, and four
    loss, each = uneven(in_columns(dynamic=True, reduction="sum"))
    assert close(loss, each[0].mean() + each[1].mean())


class Counted(Net):
    """Divides a sum by the number of labels of the whole batch."""

    def forward(self, x, num_items_in_batch, target=None):
        return self.b(self.a(x).tanh()).square().sum() / num_items_in_batch


def test_what_losses_are():
    with refusal("SK802", 'Give "mean", "sum", or a function of the inputs of a microbatch that returns its weight.'):
        made(reduction="max")
    assert right(made(reduction="mean"))
    with torch.no_grad():
        whole = (net()(X) - T).square()
    summed = made(reduction="sum", loss=lambda output, target: (output - target).square().sum())
    assert close(summed.step(X, target=T).loss, whole.sum())
    with refusal(
        "SK802", "Let the reduction return how many terms the mean of a microbatch has, such as its kept labels."
    ):
        made(reduction=lambda batch: -1.0).step(X, target=T)
    kept = torch.tensor([1, 1, 1, 0])

    def of_kept(output, target):
        labels = target[:, 0] != 0
        return (output - target).square().mean(1)[labels].mean()

    target = T * kept[:, None]
    weighed = made(reduction=lambda batch: (batch["target"][:, 0] != 0).sum(), loss=of_kept)
    assert close(weighed.step(X, target=target).loss, whole[:3].mean())
    gm = sk.capture(Counted(), x=X[:2], num_items_in_batch=torch.tensor(16.0))
    split = sk.split(gm, sk.policies.Stages(2))
    with refusal("SK802", 'Give reduction="sum", or weights of your own.'):
        made(split=split, loss=lambda output, target: output)
    pipe = made(split=split, loss=lambda output, target: output, reduction="sum")
    number = torch.tensor(8.0)
    assert close(pipe.step(x=X, num_items_in_batch=number).loss, Counted()(X, number).detach())


def test_a_number_that_was_captured():
    class Scaled(Net):
        def forward(self, x, scale):
            return self.b(self.a(x).tanh()) * scale

    def scaled(captured, given):
        gm = sk.capture(Scaled(), x=X[:2], scale=captured)
        pipe = made(split=sk.split(gm, sk.policies.Stages(2)))
        return close(pipe.step(x=X, scale=given, target=T).loss, square(Scaled()(X, given), T).detach())

    with refusal("SK802", "Capture with a tensor in its place, such as torch.tensor(2), or with this value."):
        scaled(2, 3)
    assert scaled(torch.tensor(2), torch.tensor(3)) and scaled(3, 3)
