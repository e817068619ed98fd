"""Remedies of errors about exports to other tools and texts of theirs (SK521-SK525)."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from carried import Remedy, refusal
from ownorders import own_order
from torch import nn

import splitkit as sk
from splitkit.exports.import_plan import FORMATS
from splitkit.exports.onnx_stages import annotate_onnx
from splitkit.graph.dataflow import module_path
from splitkit.plans.parts import Offloaded, Part
from splitkit.policies import ByName, Expert, RecomputeAll, Remat, SaveAll, Stages
from splitkit.training.stage_plan import stage_plan

WIDTH, VOCAB = 8, 12
IDS = torch.arange(10).reshape(2, 5)
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, tied=False, embedding=None):
        super().__init__()
        self.tok_embeddings = embedding or nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, x):
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Runs(nn.Module):
    """A list of linear layers alone, which run in this order."""

    def __init__(self, *order, name="layers"):
        super().__init__()
        self.order, self.name = order, name
        self.add_module(name, nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in {*order}]))

    def forward(self, x):
        for i in self.order:
            x = getattr(self, self.name)[i](x)
        return x


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.decoder = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return self.head(x)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Decoder()

    def forward(self, x):
        return self.body(x).square().mean()


@cache
def graph(make=Decoder, *arguments, inputs=IDS, **options):
    return sk.capture(make(*arguments, **options), inputs)


@cache
def split_of(*starts, gm=None):
    gm = gm or graph()
    return sk.split(gm, sk.plan(gm, Expert(list(starts))))


def decoder():
    return split_of("layers.1", "layers.3")


def again(split, *stages):
    """The split with these stages recomputed; all if none is named."""
    chosen = {key: replace(p, call="checkpoint") for key, p in split.plan.parts.items() if not stages or key in stages}
    return replace(split, plan=replace(split.plan, parts={**split.plan.parts, **chosen}))


def exports(split_or_plan, *to, **options):
    """Whether the formats carry it, and read back the stages that were written."""
    for one in to:
        found = sk.export(split_or_plan, to=one, **options)
        flow = split_or_plan.flow if hasattr(split_or_plan, "flow") else None
        if flow is None:
            continue
        back = sk.import_plan(flow.root, found.text, form=one)
        if any(back.home(node) != found.plan.home(node) for node in flow.nodes):
            return False
    return True


def read(text, form="accelerate"):
    """Whether a text is read, as stages that compute what the model computes."""
    gm = graph()
    plan = sk.import_plan(gm, text, form=form)
    return sk.split(gm, plan)(IDS).equal(gm(IDS))


@cache
def joint():
    return sk.capture_joint(Trained(), IDS)


def staged(ends, policy=None):
    """A plan of a training step in stages, with cuts before these blocks."""
    flow = joint().flow
    base, last, found = (policy or SaveAll()).assign(flow, sk.costs.unit(flow)), 0, {}
    for node in flow.nodes:
        path = module_path(node).split(".")
        if path[:2] == ["body", "layers"]:
            last = sum(int(path[2]) >= end for end in ends)
        elif path[:2] in (["body", "norm"], ["body", "lm_head"]):
            last = len(ends)
        found[node] = last
    return stage_plan(flow, {n: s for n, s in found.items() if "forward" in base[n]}, base)


def test_names_of_formats():
    with refusal("SK521", "Known: {...}.") as caught:
        exports(decoder(), "pigeon")
    known = caught.value.remedy.removeprefix("Known: ").rstrip(".").split(", ")
    assert known == [*FORMATS] and exports(decoder(), *known)
    text = sk.export(decoder(), to="vllm").text.partition("=")[2].split()[0].strip('"')
    with refusal("SK521", "Name it with form=: {...}.") as caught:
        sk.import_plan(graph(), text)
    assert "vllm" in caught.value.remedy and read(text, "vllm")


CARRIED = [
    Remedy(
        "SK523",
        "Plan with two stages or more.",
        lambda: exports(sk.split(graph(), Stages(1)), "torch"),
        lambda: exports(sk.split(graph(), Stages(2)), "torch"),
    ),
    Remedy(
        "SK523",
        "Give every node a part.",
        lambda: exports(sk.split(graph(), ByName({"layers.[01]": "a", "layers.[23]": "b"})), "torch"),
        lambda: exports(split_of("layers.2"), "torch"),
    ),
    Remedy(
        "SK523",
        "Plan one pipeline without --replicas, and set the data-parallel size in the tool.",
        lambda: exports(
            replace(decoder(), plan=replace(decoder().plan, parts={**decoder().plan.parts, 1: Part(1, replicas=2)})),
            "torch",
        ),
        lambda: exports(decoder(), "torch"),
    ),
    Remedy(
        "SK523",
        "Plan without recompute.",
        lambda: exports(again(decoder()), "accelerate"),
        lambda: exports(decoder(), "accelerate"),
    ),
    Remedy(
        "SK523",
        "Plan with recompute in all stages or in none.",
        lambda: exports(again(decoder(), 0), "torchtitan"),
        (lambda: exports(again(decoder()), "torchtitan"), lambda: exports(decoder(), "torchtitan")),
    ),
    Remedy(
        "SK523",
        "Plan stages with equal numbers of recomputed layers, or with recompute in all or none of them.",
        lambda: exports(again(decoder(), 0), "megatron"),
        (
            lambda: "--recompute-num-layers 2" in sk.export(again(split_of("layers.2")), to="megatron").text,
            lambda: "recompute" not in sk.export(decoder(), to="megatron").text,
        ),
    ),
    Remedy(
        "SK523",
        "Leave the schedule out.",
        lambda: exports(decoder(), "accelerate", schedule="1f1b"),
        lambda: exports(decoder(), "accelerate"),
    ),
    Remedy(
        "SK523",
        "Make the order for the stages of the plan.",
        lambda: exports(decoder(), "torch", schedule=own_order(["0F0 0B0"])),
        lambda: exports(decoder(), "torch", schedule=own_order(["0F0 0B0", "1F0 1B0", "2F0 2B0"])),
    ),
    Remedy(
        "SK523",
        "Export to torch or torchtitan, which read any order.",
        lambda: exports(decoder(), "megatron", schedule=own_order(["0F0 1F0 1B0 0B0", "2F0 2B0"])),
        (
            lambda: exports(decoder(), "torch", schedule=own_order(["0F0 1F0 1B0 0B0", "2F0 2B0"])),
            lambda: exports(decoder(), "torchtitan", schedule=own_order(["0F0 0B0", "1F0 1B0", "2F0 2B0"])),
        ),
    ),
    Remedy(
        "SK523",
        "Use a number of stages that the ranks divide, or export to torch, whose runtime takes any placement.",
        lambda: exports(decoder(), "torchtitan", schedule=own_order(["0F0 1F0 1B0 0B0", "2F0 2B0"])),
        (
            lambda: exports(
                split_of("layers.1", "layers.2", "layers.3"),
                "torchtitan",
                schedule=own_order(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]),
            ),
            lambda: exports(decoder(), "torch", schedule=own_order(["0F0 1F0 1B0 0B0", "2F0 2B0"])),
        ),
    ),
    Remedy(
        "SK523",
        "Untie it (tie_word_embeddings=False), or train with splitkit, which adds up the gradients of all copies.",
        lambda: exports(split_of("layers.2", gm=graph(tied=True)), "torchtitan"),
        (
            lambda: exports(split_of("layers.2"), "torchtitan"),
            lambda: trains_alike(split_of("layers.2", gm=graph(tied=True))),
        ),
    ),
    Remedy(
        "SK522",
        "Export to torch, accelerate or onnx.",
        lambda: exports(split_of("layers.3", gm=graph(Runs, 0, 1, 0, 2, 3, inputs=X)), "vllm"),
        lambda: exports(split_of("layers.3", gm=graph(Runs, 0, 1, 0, 2, 3, inputs=X)), "torch", "accelerate", "onnx"),
    ),
    Remedy(
        "SK523",
        "Export to accelerate or torch.",
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "vllm"),
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "accelerate", "torch"),
    ),
    Remedy(
        "SK523",
        "Export to torch or accelerate.",
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "torchtitan"),
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "torch", "accelerate"),
    ),
    Remedy(
        "SK523",
        "Export to torch, accelerate or onnx.",
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "megatron"),
        lambda: exports(split_of("decoder.0", gm=graph(TwoLists, inputs=X)), "torch", "accelerate", "onnx"),
    ),
    Remedy(
        "SK523",
        "Capture the model with its embedding and its head.",
        lambda: exports(split_of("layers.1", gm=graph(Runs, 0, 1, 2, inputs=X)), "megatron"),
        lambda: exports(decoder(), "megatron"),
    ),
    Remedy(
        "SK523",
        "Rename the module.",
        lambda: exports(split_of("a,b.1", gm=graph(Runs, 0, 1, 2, name="a,b", inputs=X)), "nnscaler"),
        lambda: exports(split_of("ab.1", gm=graph(Runs, 0, 1, 2, name="ab", inputs=X)), "nnscaler"),
    ),
    Remedy(
        "SK522",
        "Export to torch, which cuts before any module, or to onnx.",
        lambda: exports(split_of("second", gm=no_blocks()), "accelerate"),
        lambda: exports(split_of("second", gm=no_blocks()), "torch", "onnx"),
    ),
    Remedy(
        "SK523",
        "Export a plan with stages: splitkit plan MODEL --stages N.",
        lambda: exports(RecomputeAll().assign(joint().flow, sk.costs.unit(joint().flow)), "megatron"),
        lambda: exports(decoder(), "megatron"),
    ),
    Remedy(
        "SK523",
        "Plan the forward graph (splitkit plan MODEL --stages N), or run the plan with `splitkit train`.",
        lambda: exports(staged([2]), "vllm"),
        lambda: exports(split_of("layers.2"), "vllm"),
    ),
    Remedy(
        "SK523",
        "Plan the forward graph (splitkit plan MODEL --stages N), or run the plan with `splitkit train`.",
        lambda: exports(staged([2]), "torch"),
        (lambda: exports(split_of("layers.2"), "torch"), lambda: steps_alike(staged([2]))),
    ),
    Remedy(
        "SK523",
        "Use splitkit.policies.RecomputeAll within the stages, or run the plan with `splitkit train`.",
        lambda: exports(staged([2], Remat(["aten.relu"])), "megatron"),
        (
            lambda: exports(staged([2], RecomputeAll()), "megatron"),
            lambda: steps_alike(staged([2], Remat(["aten.relu"]))),
        ),
    ),
]


def trains_alike(split):
    """Whether the tied parameter gets the gradients of all its uses."""
    tied = split.flow.root.get_parameter("tok_embeddings.weight")
    return torch.equal(
        *(torch.autograd.grad(module(IDS).square().mean(), tied)[0] for module in (split, split.flow.root))
    )


def steps_alike(plan):
    """Whether a step with this plan has the loss and the gradients of the whole model."""
    captured, model = joint(), copy.deepcopy(joint().model)
    made = captured.split(plan)
    outputs, gradients = made.run(captured.primals(IDS), captured.tangents())
    found = captured.read([*outputs, *gradients])
    model(IDS).backward()
    return all(torch.allclose(found.gradients[name], p.grad, atol=1e-7) for name, p in model.named_parameters())


@cache
def no_blocks():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.second(self.first(x))

    return sk.capture(Two(), X)


@pytest.mark.parametrize("remedy", CARRIED, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_plans(remedy):
    remedy.carry_out()


def interleaved():
    return split_of("layers.1", "layers.2", "layers.3")


SCHEDULES = [
    Remedy(
        "SK523",
        "Use --schedule 1f1b or interleaved-1f1b, or export to torch or torchtitan.",
        lambda: exports(interleaved(), "megatron", schedule="zbv", microbatches=4),
        (
            lambda: exports(interleaved(), "megatron", schedule="1f1b", microbatches=4),
            lambda: exports(interleaved(), "megatron", schedule="interleaved-1f1b", microbatches=4),
            lambda: exports(interleaved(), "torch", "torchtitan", schedule="zbv", microbatches=4),
        ),
    ),
    Remedy(
        "SK523",
        "Use --schedule 1f1b, or export to torch or torchtitan.",
        lambda: exports(decoder(), "deepspeed", schedule="eager-1f1b", microbatches=4),
        (
            lambda: exports(decoder(), "deepspeed", schedule="1f1b", microbatches=4),
            lambda: exports(decoder(), "torch", "torchtitan", schedule="eager-1f1b", microbatches=4),
        ),
    ),
    Remedy(
        "SK523",
        "Use --schedule 1f1b or gpipe, or export to torch or torchtitan.",
        lambda: exports(decoder(), "galvatron", schedule="eager-1f1b", microbatches=4),
        (
            lambda: exports(decoder(), "galvatron", schedule="1f1b", microbatches=4),
            lambda: exports(decoder(), "galvatron", schedule="gpipe", microbatches=4),
            lambda: exports(decoder(), "torch", "torchtitan", schedule="eager-1f1b", microbatches=4),
        ),
    ),
]


@pytest.mark.parametrize("remedy", SCHEDULES, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_schedules(remedy):
    remedy.carry_out()


@pytest.mark.parametrize("placement", ["loop", "V"])
def test_placements(placement):
    split = interleaved()
    with refusal("SK523", "Use --placement loop or V, or export to torch, whose runtime takes any placement."):
        sk.export(split, to="torchtitan", schedule=(own := own_order(["0F0 1F0 1B0 0B0", "2F0 3F0 3B0 2B0"])))
    assert exports(split, "torch", schedule=own)
    stages = sk.stage_costs(split.flow, split.plan, sk.costs.roofline(split.flow.root, "h100"))
    assert exports(split, "torchtitan", schedule=sk.synthesize(stages, 2, ranks=2, placement=placement).order)


def test_cuts_in_memory():
    inside = split_of("layers.1.down", "layers.3")
    with refusal("SK303", "Give more memory, or plan with more stages.") as caught:
        sk.export(inside, to="accelerate", memory=1)
    assert caught.value.code == "SK303"
    most = peak(inside, "accelerate")
    assert exports(inside, "accelerate", memory=most)
    with refusal("SK303", "Give more memory, or plan with more stages."):
        sk.export(inside, to="accelerate", memory=most - 600)
    finer = split_of("layers.0.down", "layers.1", "layers.2", "layers.3", "norm")
    assert exports(finer, "accelerate", memory=most - 600)


def peak(split, to, **options):
    """The memory of the plan of whole modules."""
    return sk.export(split, to=to, **options).rounding.after.peak


def test_cuts_in_memory_of_ranks_with_several_stages():
    split = split_of("layers.1.down", "layers.2", "layers.3")
    loops = {"schedule": "interleaved-1f1b", "microbatches": 4}
    most = peak(split, "megatron", **loops)
    with refusal("SK303", "Give more memory, plan with more stages, or use a schedule with one stage on each rank."):
        sk.export(split, to="megatron", memory=most - 1, **loops)
    assert exports(split, "megatron", memory=most, **loops)
    assert exports(split, "megatron", memory=most - 1, schedule="1f1b", microbatches=4)


def test_more_stages_than_blocks():
    many = split_of("layers.0.down", "layers.1", "layers.2", "layers.3", "norm")
    with refusal("SK522", "Plan with at most {...} stages, or export to a format that cuts inside layers.") as caught:
        sk.export(many, to="vllm")
    most = int(caught.value.remedy.split("at most ")[1].split()[0])
    assert exports(sk.split(graph(), Stages(most)), "vllm") and exports(many, "torch", "onnx")


def test_graphs_without_modules():
    gm = torch.fx.symbolic_trace(lambda x: (x + 1) * 2)
    with refusal("SK522", "Capture the model with splitkit.capture."):
        sk.export(sk.split(gm, {"add": 0, "mul": 1}), to="torch", costs=sk.costs.unit(gm))
    assert exports(split_of("second", gm=no_blocks()), "torch")


def test_a_cut_inside_a_block_of_a_training_step():
    plan = sk.policies.Pipeline(3).assign(joint().flow, sk.costs.roofline(joint().graph_module, "h100"))
    told = (
        "Plan the forward graph (splitkit plan MODEL --stages N), or run the plan with `splitkit train`. Forward plans "
        "are rounded to whole layers."
    )
    with refusal("SK523", "{...} Forward plans are rounded to whole layers.") as caught:
        sk.export(plan, to="megatron")
    assert caught.value.remedy == told
    forward = sk.split(graph(), Stages(3))
    assert exports(forward, "megatron") and sk.export(forward, to="megatron").plan and steps_alike(plan)


def test_offloaded_values():
    kept = staged([2])
    value = next(iter(kept.places))
    with refusal("SK523", "Plan without offloading."):
        sk.export(replace(kept, offloaded=(Offloaded(value, value, value),)), to="megatron")
    assert exports(kept, "megatron")


EXAMPLES = {
    "torch": "x = 3",
    "torchtitan": "[]",
    "megatron": "Ettx|tL",
    "deepspeed": "parts = [0, 5, 3]",
    "accelerate": "{}",
    "transformers": "{}",
    "vllm": "a,b",
    "sglang": "a,b",
    "galvatron": '{"pp_deg": 3, "pp_division": "2,2"}',
    "nnscaler": "pipeline_pivots: ''",
    "onnx": "{}",
}


def test_what_a_text_looks_like():
    assert EXAMPLES.keys() == FORMATS.keys()
    for form, wrong in EXAMPLES.items():
        with refusal("SK524", "It looks like this: {...}") as caught:
            sk.import_plan(graph(), wrong, form=form)
        example = caught.value.remedy.removeprefix("It looks like this: ")
        assert FORMATS[form].read(example), form  # it is refused by no reader
    with refusal("SK524", "It looks like this: {...}") as caught:
        annotate_onnx(Unknown(), '{"pipeline_stage": {"linear": 0}}')
    with refusal("SK525", "Export the same model with torch.onnx.export(..., dynamo=True)."):
        annotate_onnx(Unknown(), caught.value.remedy.removeprefix("It looks like this: "))


class Unknown:
    """A model of ONNX without nodes."""

    graph = ()


def test_the_text_itself(tmp_path):
    (tmp_path / "layout").write_text("Ettt|tL")
    with refusal("SK524", "Give the text itself, or read the file first."):
        sk.import_plan(graph(), tmp_path / "layout")
    assert read("Ettt|tL", None) and read((tmp_path / "layout").read_text(), None)


STARTS = '[["tok_embeddings", "layers.0"], '
WHOLE = '["layers.1", "layers.2", "layers.3", "norm", "lm_head"]]'
FLAGS = '{"pp_deg": 2, "pp_division": "2,2", "checkpoint": "%s"}'
MISFITS = [
    Remedy(
        "SK525",
        "A plan has a part for each of two devices or more.",
        lambda: read('{"": 0}'),
        lambda: read('{"": 0, "lm_head": 1}'),
    ),
    Remedy(
        "SK525",
        "Give the whole of it one place.",
        lambda: read('{"tok_embeddings": 0, "layers.0.up": 1}'),
        lambda: read('{"tok_embeddings": 0, "layers": 1, "norm": 1, "lm_head": 1}'),
    ),
    Remedy(
        "SK525",
        "Name devices as torch does: cuda:0, cpu.",
        lambda: read('{"": "here", "lm_head": "there"}'),
        lambda: read('{"": "cuda:0", "lm_head": "cpu"}'),
    ),
    Remedy(
        "SK525",
        "Name a module in the middle.",
        lambda: read("{'lm_head': SplitPoint.END}", "torch"),
        lambda: read("{'layers.1': SplitPoint.END}", "torch"),
    ),
    Remedy(
        "SK525",
        "Name one module for each cut.",
        lambda: read("{'layers.1': SplitPoint.BEGINNING, 'layers.0': SplitPoint.END}", "torch"),
        lambda: read("{'layers.1': SplitPoint.BEGINNING, 'layers.2': SplitPoint.END}", "torch"),
    ),
    Remedy(
        "SK525",
        "Set the flags of its layers alike.",
        lambda: read(FLAGS % "1,0,0,0", "galvatron"),
        (lambda: read(FLAGS % "1,1,0,0", "galvatron"), lambda: read(FLAGS % "0,0,0,0", "galvatron")),
    ),
    Remedy(
        "SK525",
        "Name it once.",
        lambda: read(STARTS.replace('layers.0"', 'layers.0", "layers.1"') + WHOLE, "torchtitan"),
        lambda: read(STARTS + WHOLE, "torchtitan"),
    ),
    Remedy(
        "SK525",
        "Stages must follow the order of the modules.",
        lambda: read(
            '[["layers.0"], ["tok_embeddings", "layers.1", "layers.2", "layers.3", "norm", "lm_head"]]', "torchtitan"
        ),
        lambda: read(STARTS + WHOLE, "torchtitan"),
    ),
    Remedy(
        "SK525",
        "Leave it out.",
        lambda: read(STARTS + '["rotary"], ' + WHOLE, "torchtitan"),
        lambda: read(STARTS + WHOLE, "torchtitan"),
    ),
    Remedy(
        "SK525",
        "Capture the model as it was for the export.",
        lambda: sk.import_plan(no_blocks(), sk.export(decoder(), to="onnx").text),
        lambda: sk.import_plan(sk.capture(Decoder(), IDS), sk.export(decoder(), to="onnx").text),
    ),
    Remedy(
        "SK525",
        "Export the plan again.",
        lambda: read(cropped(sk.export(decoder(), to="onnx").text), "onnx"),
        lambda: read(sk.export(decoder(), to="onnx").text, "onnx"),
    ),
    Remedy(
        "SK525",
        "Name a module that runs once, and whose first op is the first of a module.",
        lambda: sk.import_plan(looped(), "{'layers.0': SplitPoint.BEGINNING}", form="torch"),
        lambda: sk.import_plan(looped(), "{'layers.2': SplitPoint.BEGINNING}", form="torch"),
    ),
]


class Writes(nn.Module):
    """Its first two blocks share memory that is written."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](first)
        first.add_(1)
        return self.layers[3](self.layers[2](second + first))


def test_cuts_between_what_waits():
    gm = graph(Writes, inputs=X)
    with refusal("SK525", "Cut elsewhere."):
        sk.import_plan(gm, "parts = [0, 1, 4]", form="deepspeed")
    plan = sk.import_plan(gm, "parts = [0, 3, 4]", form="deepspeed")
    assert sk.split(gm, plan)(X).equal(gm(X))


def looped():
    return graph(Runs, 3, 1, 0, 1, 0, 2, 4, inputs=X)


def cropped(text):
    """An export that has lost a node."""
    data = json.loads(text)
    for field in ("pipeline_stage", "module", "op"):
        data[field].popitem()
    return json.dumps(data)


@pytest.mark.parametrize("remedy", MISFITS, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_texts_that_do_not_fit(remedy):
    remedy.carry_out()


def test_lists_of_the_model():
    with refusal("SK525", "They are {...} ...") as caught:
        read("1,2", "vllm")
    name = caught.value.remedy.removesuffix(" ...").split(", ")[-1].partition(".")[0]
    assert read(f"1,{len(getattr(Decoder(), name)) - 1}", "vllm")
    with refusal("SK525", "They are {...} ...") as caught:
        read("parts = [0, 2, 9]", "deepspeed")
    named = caught.value.remedy.removeprefix("They are ").removesuffix(" ...").split(", ")
    text = sk.export(decoder(), to="deepspeed").text
    assert [f"#   {i}: {name}" in text for i, name in enumerate(named)] and read(text, "deepspeed")


def test_modules_of_the_model():
    """The names that come nearest, and what to do where none is near."""
    with refusal("SK525", "Name modules of the model."):
        read('{"": 0, "nothing.like.it": 1}', "accelerate")
    with refusal("SK525", "Name a module that runs."):
        read("{'nothing.like.it': SplitPoint.END}", "torch")
    with refusal("SK525", "List every module."):
        read('{"layers": 0}', "accelerate")
    for text, form in (('{"": 0, "lm_haed": 1}', "accelerate"), ("{'layers.77': SplitPoint.BEGINNING}", "torch")):
        with refusal("SK525", "Did you mean {...}?") as caught:
            read(text, form)
        near = caught.value.remedy.removeprefix("Did you mean ").split("?")[0].split(",")[0].split(" or ")[0]
        assert read(text.replace("lm_haed", near).replace("layers.77", near), form)


@cache
def planned_for(schedule):
    return sk.plan(graph(), Stages(4, schedule=schedule, microbatches=4))


@pytest.mark.parametrize("form", ["onnx", "vllm", "sglang"])
def test_stages_that_share_a_rank(form):
    with refusal("SK523", "Plan one stage for each rank."):
        sk.export(planned_for("interleaved-1f1b"), to=form)
    assert exports(sk.split(graph(), planned_for("1f1b")), form)
