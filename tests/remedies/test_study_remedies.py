"""Remedies of errors about fits, sweeps, explanations, partitions and checkpoints (SK30x-SK31x)."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import stagedsteps
import torch
from carried import Remedy, refusal
from torch import nn
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.operator_support import create_op_support
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.stage_prices import stage_costs
from splitkit.plans.record import Plan
from splitkit.policies import Budget, Pipeline, SaveAll, Stages

X = torch.linspace(-1, 1, 32).reshape(4, 8)
OWN = """import torch
from torch import nn
def make(rows=5):
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.zeros(rows, 8)
"""


@cache
def config():
    import transformers

    return transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=64,
    )  # fmt: skip


def model(device="meta"):
    import transformers

    with torch.device(device):
        return transformers.LlamaForCausalLM(config())


def own():
    Path("own.py").write_text(OWN)
    return "own.py:make"


def fit(shown=None, devices="2x24GiB", **options):
    """Whether a fit is found, which for these models is always one that fits."""
    return sk.fit(config() if shown is None else shown, devices, **options).fits


@cache
def gm():
    return sk.capture(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), X)


@cache
def costs():
    return sk.costs.roofline(gm(), "h100")


def sweep(graph=None, stages=(2,), microbatches=(4,), schedules=("1f1b",), **options):
    graph = graph or gm()
    prices = stagedsteps.captured()[1] if graph is not gm() else costs()
    return bool(sk.sweep(graph, prices, stages=stages, microbatches=microbatches, schedules=schedules, **options))


def joint():
    return stagedsteps.captured()[0]


def priced(**options):
    plan = sk.plan(gm(), Stages(2), costs())
    return stage_costs(sk.analyze(gm()), plan, costs(), optimizer="adam", **options)


class Strange(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("it steps on real weights only")


CASES = [
    Remedy("SK302", "Give the unit: 2x24GiB.", lambda: fit(devices="2x24"), lambda: fit(devices="2x24GiB")),
    Remedy(
        "SK302",
        "Write 2x24GiB, or rtx-3090,rtx-4090.",
        lambda: fit(devices="0x24GiB"),
        (lambda: fit(devices="2x24GiB"), lambda: fit(devices="rtx-3090,rtx-4090")),
    ),
    Remedy("SK302", "Write 2x24GiB.", lambda: fit(devices="999999999TiB"), lambda: fit(devices="2x24GiB")),
    Remedy(
        "SK302",
        "Name the optimizer: train='adamw'.",
        lambda: fit(microbatches=4),
        lambda: fit(microbatches=4, train="adamw"),
    ),
    Remedy(
        "SK302",
        "Give dtype='bfloat16' (--dtype bfloat16).",
        lambda: fit(train="adamw", dtype="int4"),
        lambda: fit(train="adamw", dtype="bfloat16"),
    ),
    Remedy(
        "SK302",
        "Use 1f1b or gpipe; `splitkit sweep` compares other schedules.",
        lambda: fit(train="adamw", schedule="zbv"),
        (
            lambda: fit(train="adamw", schedule="1f1b"),
            lambda: fit(train="adamw", schedule="gpipe"),
            lambda: sweep(joint(), stages=(4,), schedules=("zbv",)),
        ),
    ),
    Remedy(
        "SK302",
        "Give the sizes of its inputs to the factory (--size), or a transformers configuration.",
        lambda: fit(own(), tokens=4),
        (lambda: fit(own(), sizes={"rows": 4}), lambda: fit(config(), tokens=4)),
    ),
    Remedy(
        "SK302",
        "Give tokens and requests instead.",
        lambda: fit(sizes={"rows": 4}),
        lambda: fit(tokens=4, requests=2),
    ),
    Remedy(
        "SK302",
        "Give a path of a config.json, or place:factory.",
        lambda: fit(3),
        (lambda: fit(saved_config()), lambda: fit(own())),
    ),
    Remedy(
        "SK302",
        "Give its config.json, a model of transformers made under torch.device('meta'), or place:factory.",
        lambda: fit(model("cpu")),
        (lambda: fit(saved_config()), lambda: fit(model("meta")), lambda: fit(own())),
    ),
    Remedy(
        "SK302",
        "Give the joint graph that splitkit.capture_joint returns.",
        lambda: sweep(chunks=(1, 2)),
        lambda: sweep(joint(), chunks=(1, 2)),
    ),
    Remedy(
        "SK302",
        "Give whole numbers >= 1: (1, 2).",
        lambda: sweep(joint(), chunks=()),
        lambda: sweep(joint(), chunks=(1, 2)),
    ),
    Remedy(
        "SK302",
        "Give whole numbers >= 1: (2, 4, 8).",
        lambda: sweep(microbatches=()),
        lambda: sweep(microbatches=(2, 4, 8)),
    ),
    Remedy(
        "SK302",
        "These schedules are for training: name an optimizer.",
        lambda: sweep(optimizer=None),
        (lambda: sweep(optimizer="adam"), lambda: sweep(joint(), optimizer="adam")),
    ),
    Remedy(
        "SK302",
        "These schedules are for training: name an optimizer.",
        lambda: sweep(joint(), optimizer=None),
        lambda: sweep(joint(), optimizer="sgd"),
    ),
    Remedy(
        "SK302",
        "Give splitkit.memory.saved_storages.activations of the graph, or none.",
        lambda: priced(activations=3),
        (lambda: priced(activations=activations(sk.analyze(gm()))) == priced(), priced),
    ),
    Remedy(
        "SK314",
        "Make a plan with splitkit.plan(gm, policy), and keep gm.",
        lambda: Plan.of({}).explain(),
        lambda: bool(str(sk.plan(gm(), Stages(2)).explain())),
    ),
    Remedy(
        "SK316",
        "Compare plans of one kind: two of Pipeline, or two of one device.",
        lambda: sk.compare_plans(step_plan(), staged_plan()),
        (
            lambda: sk.compare_plans(staged_plan(), staged_plan(False)).figures,
            lambda: sk.compare_plans(step_plan(), joint().split(SaveAll(), stagedsteps.captured()[1]).plan).figures,
        ),
    ),
]


def saved_config():
    config().save_pretrained("saved")
    return "saved/config.json"


@cache
def step_plan():
    return joint().split(Budget(0.9, of="saved"), stagedsteps.captured()[1]).plan


@cache
def staged_plan(recompute=True):
    return joint().split(Pipeline(2, recompute=recompute), stagedsteps.captured()[1]).plan


@pytest.mark.parametrize("remedy", CASES, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remedy.carry_out()


def test_values_that_the_messages_name():
    with refusal("SK302", "Use one of {...}.") as caught:
        fit(dtype="int3")
    for dtype in caught.value.remedy.removeprefix("Use one of ").rstrip(".").split(", "):
        assert fit(dtype=dtype), dtype
    with refusal("SK302", "Name an optimizer: {...}.") as caught:
        fit(train="lion")
    for optimizer in caught.value.remedy.removeprefix("Name an optimizer: ").rstrip(".").split(", "):
        assert fit(train=optimizer), optimizer
    with refusal("SK302", "Ask for {...} or less.") as caught:
        fit(gpt(), tokens=65)
    assert fit(gpt(), tokens=int(caught.value.remedy.split()[2]))
    with refusal("SK302", "Name 1 to {...} devices.") as caught:
        fit(devices=[])
    most = int(caught.value.remedy.split()[3])
    assert fit(devices=["24GiB"]) and fit(devices=["24GiB"] * 2) and most >= 2
    with refusal("SK302", "Name 1 to {...} devices."):
        fit(devices=["24GiB"] * (most + 1))
    with refusal("SK302", "Give several: {...}.") as caught:
        sweep(schedules=())
    assert sweep(schedules=eval(caught.value.remedy.removeprefix("Give several: ").removesuffix(".")))


@cache
def gpt():
    import transformers

    return transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=64)


def test_optimizers_of_a_card():
    made, prices = stagedsteps.captured()

    def plan(**options):
        return made.split(Budget(card="24GiB", **options), prices)

    with refusal("SK302", "Name one of {...}, or leave it out of Budget(card=...).") as caught:
        plan(optimizer=lambda parameters: Strange(parameters, lr=0.1))
    names = caught.value.remedy.removeprefix("Name one of ").partition(", or leave")[0].split(", ")
    assert plan() and all(plan(optimizer=name) for name in names)


def test_nodes_of_a_plan():
    plan = sk.plan(gm(), Stages(2))
    with refusal("SK314", "Nodes have the names of [n.name for n in gm.graph.nodes].") as caught:
        plan.explain("nowhere")
    names = eval(caught.value.remedy.removeprefix("Nodes have the names of ").rstrip("."), {"gm": gm()})
    assert all(str(plan.explain(name)) for name in names)
    assert all(str(plan.explain(n.name)) for n in gm().graph.nodes if n.op == "call_function")
    with refusal("SK314", "Did you mean {...}?") as caught:
        plan.explain("linear_9")
    assert str(
        plan.explain(caught.value.remedy.removeprefix("Did you mean ").split("?")[0].split(" or ")[0].split(",")[0])
    )


def wave(x):
    return torch.tan(torch.cos(torch.sin(x)))


def waves():
    traced = torch.fx.symbolic_trace(wave)
    rule = create_op_support(lambda _, node: node.op == "call_function")
    return sk.CapabilityBasedPartitioner(traced, rule), {n.name: n for n in traced.graph.nodes}


def fused(*groups):
    """Whether the graph with these partitions computes what it computed."""
    partitioner, node = waves()
    made = partitioner.fuse_partitions([Partition(i, [node[n] for n in names]) for i, names in enumerate(groups)])
    return torch.allclose(made(X), wave(X))


def test_partitions():
    with refusal("SK310", "Give each node one partition."):
        fused(["sin"], ["sin", "cos"])
    assert fused(["sin"], ["cos"])
    partitioner, _ = waves()
    first = partitioner.propose_partitions()
    partitioner.fuse_partitions(first)
    with refusal("SK310", "Propose partitions of the graph as it is now; nodes that were fused before are gone."):
        partitioner.fuse_partitions(first)
    assert torch.allclose(partitioner.fuse_partitions(partitioner.propose_partitions())(X), wave(X))
    with refusal(
        "SK311",
        "Two nodes may be in one partition only if everything between them is in it too; writes, random numbers and "
        "changes of the ambient state also order nodes. The partitions of propose_partitions() have no cycles.",
    ):
        fused(["sin", "tan"])
    assert fused(["sin", "cos", "tan"])
    partitioner, _ = waves()
    assert torch.allclose(partitioner.fuse_partitions(partitioner.propose_partitions())(X), wave(X))


class Block(nn.Module):
    def __init__(self, act=torch.tanh, counts=False):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), act, nn.Linear(16, 8)
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Blocks that run as checkpoints with a context in training."""

    def __init__(self, *blocks):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.contexts = {}

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            known = self.contexts.get(i, self.contexts.get("all"))
            x = block(x) if known is None else checkpoint(block, x, use_reentrant=False, context_fn=known)
        return x.square().sum()


def planned(net, layers="blocks.*", **contexts):
    """The net with a context for all of its blocks, or for one."""
    net.contexts |= {"all": sk.checkpoint_context(net, 0.5, X, layers=layers)}
    return net


def trains(net, whole=None):
    """Whether a step has the gradients of the net without checkpoints."""
    plain = copy.deepcopy(whole or net)
    if whole is None:
        plain.contexts = {}
    found, wanted = net(X), plain(X)
    found.backward()
    wanted.backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return torch.equal(found, wanted) and all(torch.allclose(a.grad, b.grad) for a, b in pairs)


def test_layers_as_checkpoints():
    assert trains(planned(Net()))
    counting = Net(Block(counts=True), Block(counts=True))
    with refusal(
        "SK307", "Use splitkit.apply, which never runs a write twice, or leave this layer out of the checkpoints."
    ):
        planned(counting)
    applied = sk.apply(counting, Budget(0.5, of="saved"), X)
    assert float(applied(X) - counting(X)) == 0.0 and float(counting.blocks[0].calls) == 2.0
    mixed = Net(Block(counts=True), Block())
    mixed.contexts[1] = sk.checkpoint_context(mixed, 0.5, X, layers="blocks.1")
    assert trains(mixed)


def test_layers_that_differ():
    net = Net(Block(), Block(act=torch.relu))
    with refusal(
        "SK307",
        "Plan them one by one, each with its own context: checkpoint_context(model, 0.5, layers={...}, **batch).",
    ) as caught:
        planned(net)
    other = caught.value.remedy.partition("layers=")[2].split("'")[1]
    net.contexts = {
        0: sk.checkpoint_context(net, 0.5, X, layers="blocks.0"),
        1: sk.checkpoint_context(net, 0.5, X, layers=other),
    }
    assert other == "blocks.1" and trains(net)


class Cast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_training_as_it_was_planned():
    net = planned(Net())
    with (
        refusal(
            "SK307",
            "Plan with the inputs and the mode that training has: splitkit.checkpoint_context(model, 0.5, **batch). "
            "Enter an autocast in the model's forward, where planning sees it.",
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        net(X)
    assert trains(planned(Cast())) and trains(planned(Net()))


class Asks(nn.Module):
    """Sets a memory budget of torch's partitioner, or none."""

    def __init__(self, budget):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.budget = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), budget

    def forward(self, x):
        if self.budget is None:
            return self.inner(x).sum()
        with torch.fx.traceback.annotate({"_region_activation_memory_budget": self.budget}):
            return self.inner(x).sum()


def test_budgets_of_the_model():
    def compiled(policy, budget):
        torch._dynamo.reset()
        made, plain = Asks(budget), Asks(None)
        backend = sk.backend(policy) if policy is not None else "aot_eager"
        torch.compile(made, backend=backend, fullgraph=True)(X).backward()
        plain(X).backward()
        pairs = zip(made.parameters(), plain.parameters(), strict=True)
        return all(torch.allclose(a.grad, b.grad) for a, b in pairs)

    with refusal(
        "SK305",
        "Set it in one place: remove it from the model and plan with splitkit.policies.Budget({...}, of='saved'), or "
        "let torch obey it: joint.partition(...), torch.compile(model).",
    ) as caught:
        sk.capture_joint(Asks(0.25), X).split(Budget(0.5, of="saved"))
    policy = eval(caught.value.remedy.partition("plan with ")[2].partition(", or let")[0], {"splitkit": sk})
    assert sk.capture_joint(Asks(None), X).split(policy).plan and compiled(policy, None) and compiled(None, 0.25)


def test_the_least_memory_with_offload():
    made, prices = stagedsteps.captured()
    with refusal(
        "SK303",
        "Budget({...}, {...}) takes that plan or a better one; a smaller batch or shorter sequence needs less.",
    ) as caught:
        made.split(Budget(1, offload="pcie5"), prices)
    policy = eval(caught.value.remedy.partition(" takes that")[0], {"Budget": Budget})
    pair = made.split(policy, prices)
    peak = int(caught.value.remedy.partition("(")[2].partition(",")[0])
    assert sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak <= peak


CALLED = (
    "Call model.train(): layers of transformers are checkpoints in training only. Or name layers that run: "
    "checkpoint_context(model, 0.5, layers='blocks.*', ...)."
)


def test_layers_that_no_checkpoint_runs():
    whole, batch = model("cpu"), {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}
    with refusal("SK307", "Call model.train(): layers of transformers are checkpoints in training only."):
        sk.checkpoint_context(whole.eval(), 0.5, **batch)
    assert sk.checkpoint_context(whole.train(), 0.5, **batch).layers
    net = Net()
    net.spare = nn.ModuleList([Block()])
    with refusal("SK307", "Call model.train(): layers of transformers are checkpoints in training only.") as caught:
        planned(net, layers="spare.*")
    assert caught.value.remedy == CALLED and planned(net, layers="blocks.*").contexts["all"].layers
