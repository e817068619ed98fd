"""Remedies of errors about runs of splits and of training steps in stages (SK801 to SK807), on one rank."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from besidewhole import require_same
from carried import Remedy, refusal
from decoders import captured, decoder
from test_rank_remedies import SEVERAL, T, X, close, joint_of, made, net, right, split_of, square, stepped
from torch import nn
from torch.utils import _pytree as pytree

import splitkit as sk
from splitkit.runtime import PipelineModule, pipeline
from splitkit.runtime.generation.before_stages import BehindEmbeddings, ModelTokens
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.generation_request import Request
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.testing.pipeline_check import UnsplitModel
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---------------------------------------------------------------- training steps in stages


class Counted(nn.Module):
    """Both layers read a buffer, which is then written."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        x = self.b(self.a(x) + self.seen) + self.seen
        self.seen += 1
        return x


class Averages(nn.Module):
    """Sums its losses up in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        loss = self.b(self.a(x).tanh()).square().mean()
        self.sum += loss.detach()
        return loss


def trains(model, at):
    """Whether a step in two stages, of which the second begins at a node of forward, is the model's."""
    return stepped(pipeline(joint_of(copy.deepcopy(model), at)[1], SEVERAL, 2), copy.deepcopy(model), torch.sum)


def adds(at):
    """Whether a step of `Averages` is right, and adds both losses to the buffer."""
    model = Averages()
    joint = sk.capture_joint(model, X[:2])
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    stages = stage_plan(joint.flow, {n: int(i >= at) for i, n in enumerate(forward)})
    found = pipeline(joint.split(stages), SEVERAL, 2).step(X)
    want = [Averages()(x).detach() for x in X.split(2)]
    return close(found.losses, torch.stack(want)) and close(model.sum, sum(want))


JOINT = [
    Remedy(
        "SK801",
        "Put all nodes that read it, and the one that computes its new value, into one stage: "
        "splitkit.extend.stage_plan(joint.flow, stages).",
        lambda: trains(Counted(), 4),
        lambda: trains(Counted(), 2),
    ),
    Remedy(
        "SK801",
        "Plan it there, because torch starts backward in the last stage.",
        lambda: adds(8),
        lambda: adds(7),
    ),
]


@pytest.mark.parametrize("remedy", JOINT, ids=lambda remedy: remedy.told[:40])
def test_joint_stages(remedy):
    remedy.carry_out()


# ---------------------------------------------------------------- steps and evaluations


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_with_gradients_off(off):
    pipe, staged = made(), pipeline(joint_of(net())[1], SEVERAL, 2)
    with off():
        with refusal("SK802", "Call step outside torch.no_grad() and torch.inference_mode(); forward alone is"):
            pipe.step(X, target=T)
        with refusal("SK802", "Call step outside torch.no_grad() and torch.inference_mode(); forward alone is"):
            staged.step(X)
        assert close(torch.cat(pipe.infer(X)), net()(X))
    assert right(pipe) and stepped(staged, net(), torch.sum)


def in_halves(dtype):
    """A pipeline as a module, of a model whose weights all have a dtype."""
    split = split_of(net().to(dtype), x=X[:2].to(dtype))
    return PipelineModule(made(split=split, loss=lambda output, target: square(output.float(), target)))


def test_a_scaled_loss_of_float16_weights():
    """Its gradients are float16 without any autocast."""
    scaler = torch.amp.GradScaler("cpu")
    with refusal("SK802", "Capture in bfloat16, without a GradScaler; or drive the pipeline itself, with a scaler in "):
        scaler.scale(in_halves(torch.float16)(x=X.half(), target=T)["loss"]).backward()
    found, model = in_halves(torch.bfloat16), net().bfloat16()
    found(x=X.bfloat16(), target=T)["loss"].backward()
    square(model(X.bfloat16()).float(), T).backward()
    own = dict(found.pipe.named_parameters())
    assert all(torch.allclose(own[n].grad, p.grad, rtol=0.1, atol=0.02) for n, p in model.named_parameters())


class Divided(nn.Module):
    """Sums of losses, divided by a number where it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, num_items_in_batch=None):
        lost = self.b(self.a(x).tanh()).square()
        return {"loss": lost.mean() if num_items_in_batch is None else lost.sum() / num_items_in_batch}


def test_evaluations_of_what_is_summed_in_training():
    number = torch.tensor(16.0)
    gm = sk.capture(Divided(), x=X[:2], num_items_in_batch=number)
    pipe = made(split=sk.split(gm, sk.policies.Stages(2)), loss=None, reduction="sum")
    whole = Divided()(X)["loss"]
    assert close(pipe.step(x=X, num_items_in_batch=number).loss, whole)
    gm = sk.capture(Divided().eval(), x=X[:2])
    with refusal(
        "SK802", 'Say what its losses are: pipe.evaluation(gm, reduction="mean"), "sum", or weights of your own.'
    ):
        pipe.evaluation(gm)
    assert close(pipe.evaluation(gm, reduction="mean").evaluate(x=X), whole)
    assert close(pipe.evaluation(gm, reduction="sum").evaluate(x=X), 2 * whole)
    assert close(pipe.evaluation(gm, reduction=lambda batch: 2 * len(batch["x"])).evaluate(x=X), whole)


class Pair:
    """Inputs in one tensor, which torch is told to take apart."""

    def __init__(self, both):
        self.both = both

    @classmethod
    def of(cls, tensors, context=None):
        return cls(torch.stack(tuple(tensors)))


class OfPair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair):
        x, y = pair.both
        return {"loss": (self.b(self.a(x).tanh()) - y).square().mean()}


def test_a_module_beside_a_graph_that_takes_an_input_apart():
    keys = [pytree.SequenceKey(number) for number in range(2)]
    named = lambda pair: (list(zip(keys, pair.both, strict=True)), None)  # noqa: E731
    pytree.register_pytree_node(Pair, lambda pair: (list(pair.both), None), Pair.of, flatten_with_keys_fn=named)
    gm, batch = sk.capture(OfPair(), Pair.of((X[:2], T[:2]))), Pair.of((X, T))
    pipe = made(split=sk.split(gm, sk.policies.Stages(2)), loss=None)
    with refusal("SK802", "Compare with the graph: UnsplitModel(pipe, gm)."):
        UnsplitModel(pipe, OfPair()).step(batch)
    beside = UnsplitModel(pipe, gm)
    losses = beside.step(batch)
    found = pipe.step(batch)
    assert require_same(beside, found, losses).loss < 1e-6
    assert close(found.loss, OfPair()(batch)["loss"])


# ---------------------------------------------------------------- generation

PROMPT = torch.tensor([[5, 6, 7]])


def generates(model, split, reference):
    """Whether a generator in one process gives the tokens of the whole."""
    found = sk.generator(model, split, ["cpu:0", "cpu:1"])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return torch.equal(found.generate(PROMPT, **options), reference.generate(PROMPT, **options))


def test_what_a_call_of_the_model_gives():
    model = decoder("llama")
    own = sk.generator(copy.deepcopy(model), sk.split(copy.deepcopy(captured("llama")), sk.policies.Stages(2)), "cpu")
    positions = torch.arange(3)
    with torch.no_grad():
        with refusal("SK802", "Give what generate gives the model."):
            own(PROMPT, position_ids=positions, logits_to_keep=1)
        found = own(PROMPT, position_ids=positions[None], logits_to_keep=1).logits
        assert torch.allclose(found, model(PROMPT, logits_to_keep=1).logits, atol=1e-4)


@pytest.mark.campaign
def test_an_encoder_without_weights(tmp_path):
    model = decoder("t5")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    split = sk.split(sk.capture_decoder(empty), sk.policies.Stages(2))
    with refusal("SK807", "Load the weights first: splitkit.load(split, folder, devices)."):
        sk.generator(empty, split, ["cpu:0", "cpu:1"])
    sk.load(split, tmp_path, ["cpu:0", "cpu:1"])
    assert generates(empty, split, model)


@cache
def with_images():
    """A model whose language model reads a mask and positions of its own."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "eos_token_id": None}
    tower = {"model_type": "siglip_vision_model", **sizes, "image_size": 28, "patch_size": 7, "projection_dim": 16}
    config = transformers.PaliGemmaConfig(
        vision_config=tower, text_config=text, image_token_index=61, projection_dim=16
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    return model, sk.split(sk.capture_decoder(model), sk.policies.Stages(2))


def test_a_language_model_that_reads_more_than_ranks_can_make():
    model, split = with_images()
    with refusal("SK801", "Generate in one process: sk.generator(model, split, devices)."):
        DecoderChain.of(chain_of(split))
    before = BehindEmbeddings(model, ModelTokens.of(model), torch.device("cpu"))
    request = before.checked(Request.from_data({"input_ids": [[5, 6, 7]]}))
    with refusal("SK801", "Generate in one process: sk.generator(model, split, devices)."):
        before.first(request)
    assert generates(copy.deepcopy(model), split, copy.deepcopy(model))
