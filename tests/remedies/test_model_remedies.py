"""Remedies of models given by a configuration of transformers, and of models that should fit or generate (SK401)."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from carried import Remedy, refusal
from torch import nn

import splitkit as sk
from splitkit import cli
from splitkit.runtime.folder.tensorfiles import write_tensors
from splitkit.testing.config_models import config_at, config_example

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 2}
VIT = SIZES | {"model_type": "vit", "image_size": 8, "patch_size": 4}
SPEECH = SIZES | {"model_type": "wav2vec2", "conv_dim": [8], "conv_kernel": [4], "conv_stride": [2]}
SPEECH |= {"num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
RWKV = {"model_type": "rwkv", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "attention_hidden_size": 16}
FACTORY = """
import torch
import transformers
from torch import nn


def llama():
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=2, vocab_size=32, max_position_embeddings=64)
    ids = torch.zeros(1, 8, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}


def speech():
    config = transformers.Wav2Vec2Config(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, vocab_size=32, conv_dim=[8], conv_kernel=[4], conv_stride=[2], num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0)
    return transformers.Wav2Vec2ForCTC(config), (), {"input_values": torch.zeros(1, 64)}


def rwkv():
    config = transformers.RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, attention_hidden_size=16)
    return transformers.RwkvForCausalLM(config), (), {"input_ids": torch.zeros(1, 16, dtype=torch.long)}


class Net(nn.Module):
    def __init__(self, loss=False, cast=False):
        super().__init__()
        self.layer, self.loss, self.cast = nn.Linear(8, 8), loss, cast

    def forward(self, x):
        y = self.layer(x)
        if self.cast is not None:
            scale, shift = torch.ones(4, 4, 1), torch.zeros(4)
            scale, shift = (scale.to(y.dtype), shift.to(y.dtype)) if self.cast else (scale, shift)
            y = nn.functional.conv1d(y[None], scale, shift)
        return y.square().mean() if self.loss else y


def net(): return Net(cast=None), torch.zeros(4, 8)
def wrong(): return Net(cast=None), torch.zeros(4, 7)
def step(): return Net(loss=True, cast=None), torch.zeros(4, 8)
def wrong_step(): return Net(loss=True, cast=None), torch.zeros(4, 7)
def in_float32(): return Net(loss=True), torch.zeros(4, 8)
def in_its_own(): return Net(loss=True, cast=True), torch.zeros(4, 8)
"""
HUGE = "1x1GiB"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FACTORY)


def config(fields, name="c", **more):
    """Write a configuration, and return its folder."""
    Path(name).mkdir(exist_ok=True)
    Path(name, "config.json").write_text(json.dumps(fields | more))
    return name


def runs(example):
    """Whether the model of an example runs, and the captured one computes what it computes."""
    model = example.model.eval()
    with torch.no_grad():
        want = model(*example.args, **example.kwargs)
        found = sk.capture(model, *example.args, **example.kwargs)(*example.args, **example.kwargs)
    torch.testing.assert_close(found.logits, want.logits)
    return True


def command(words):
    """Run a command, and return what it printed as data."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        assert not cli.main([*shlex.split(words), "--json"])
    return json.loads(out.getvalue())


def fits(model, **options):
    """Whether a model fits, which `splitkit.fit` finds by running it on ``meta``."""
    return sk.fit(model, HUGE, **options).fits


def factory(name="llama"):
    """Whether a command plans the model of a factory, which runs as eager does."""
    assert command(f"plan my.py:{name} --stages 2")
    return runs(sk.testing.models.load(f"my.py:{name}"))


CONFIGS = [
    Remedy(
        "SK401",
        "Correct it.",
        lambda: config_at(config(LLAMA, hidden_size="wide")),
        lambda: runs(config_example(config(LLAMA, hidden_size=16))),
    ),
    Remedy(
        "SK401",
        "Correct it.",
        lambda: config_at(config(LLAMA, dtype="floaty")),
        lambda: runs(config_example(config(LLAMA, dtype="float32"))),
    ),
    Remedy(
        "SK401",
        "Correct it.",
        lambda: config_example(config(LLAMA, hidden_act="rely")),
        lambda: runs(config_example(config(LLAMA, hidden_act="relu"))),
    ),
    Remedy(
        "SK401",
        "Correct it.",
        lambda: config_example(config(LLAMA, architectures=["ViTForImageClassification"])),
        lambda: runs(config_example(config(LLAMA, architectures=["LlamaForCausalLM"]))),
    ),
    Remedy(
        "SK401",
        "Install a newer transformers, or give a factory that returns the model and its inputs.",
        lambda: config_at(config(LLAMA, model_type="ufo")),
        factory,
    ),
    Remedy(
        "SK401",
        "Install a newer transformers, or give a factory that returns the model and its inputs.",
        lambda: config_example(config(LLAMA, architectures=["UfoForCausalLM"])),
        factory,
    ),
    Remedy(
        "SK401",
        'Add "architectures": ["ClassName"].',
        lambda: config_example(config(VIT)),
        lambda: runs(config_example(config(VIT, architectures=["ViTForImageClassification"]))),
    ),
    Remedy(
        "SK401",
        "Give a factory that returns the model and its inputs.",
        lambda: config_example(config(SPEECH, architectures=["Wav2Vec2ForCTC"])),
        lambda: factory("speech"),
    ),
    Remedy(
        "SK401",
        "Give a factory that returns the model and the inputs of its largest step.",
        lambda: sk.fit(config(RWKV), HUGE, tokens=16),
        lambda: fits("my.py:rwkv"),
    ),
    Remedy(
        "SK401",
        "Give a factory that returns the model and inputs with which it runs.",
        lambda: sk.fit("my.py:wrong", HUGE),
        lambda: fits("my.py:net"),
    ),
    Remedy(
        "SK401",
        "Give a factory that returns the model and inputs with which it returns a loss.",
        lambda: sk.fit("my.py:wrong_step", HUGE, train="sgd"),
        lambda: fits("my.py:step", train="sgd"),
    ),
    Remedy(
        "SK401",
        "Return the loss.",
        lambda: sk.fit("my.py:net", HUGE, train="sgd"),
        lambda: fits("my.py:step", train="sgd"),
    ),
]


@pytest.mark.parametrize("remedy", CONFIGS, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


@pytest.mark.parametrize("train", [None, "sgd"])
def test_a_model_that_does_not_run_in_a_dtype(train):
    with refusal("SK401", "Leave out dtype, or cast inside the model: it does not run in {...}."):
        sk.fit("my.py:in_float32", HUGE, train=train, dtype="bfloat16")
    assert fits("my.py:in_float32", train=train)
    whole = sk.fit("my.py:in_its_own", HUGE, train=train).devices[0].held.weights
    assert sk.fit("my.py:in_its_own", HUGE, train=train, dtype="bfloat16").devices[0].held.weights * 2 == whole


ODD = {"quant_method": "odd"}
SHAPES = {
    f"model.layers.{number}.{name}.weight": shape
    for number in range(2)
    for name, shape in (
        *((f"self_attn.{one}_proj", (16, 16)) for one in "qkvo"),
        *((f"mlp.{one}_proj", (24, 16)) for one in ("gate", "up")),
        ("mlp.down_proj", (16, 24)),
        ("input_layernorm", (16,)),
        ("post_attention_layernorm", (16,)),
    )
} | {"model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16), "model.norm.weight": (16,)}
ROTARY = 32
"""Bytes of the frequencies of positions, which no checkpoint has."""


def stored(tensors=SHAPES, name="c"):
    """Write a Llama's weights as a checkpoint that is quantized in an unknown way, a byte a value."""
    place = Path(config(LLAMA, name, num_hidden_layers=2, quantization_config=ODD), "model.safetensors")
    write_tensors(place, {name: torch.zeros(shape, dtype=torch.int8) for name, shape in tensors.items()})
    return name


def weights(model="c", dtype=None):
    """The bytes of the weights of a model that fits."""
    found = sk.fit(model, HUGE, dtype=dtype)
    assert found.fits
    return found.devices[0].held.weights - ROTARY


def test_weights_of_unknown_size():
    config(LLAMA, num_hidden_layers=2, quantization_config=ODD)
    with refusal(
        "SK401",
        "Put the checkpoint's safetensors files beside it, or give --dtype: bfloat16, float16, float8 or int4.",
    ) as error:
        sk.fit("c", HUGE)
    values = sum(map(math.prod, SHAPES.values()))
    bits = {dtype: 8 * weights(dtype=dtype) / values for dtype in re.findall(r"(?<=[ ])\w+\d+", error.value.remedy)}
    assert bits.keys() == {"bfloat16", "float16", "float8", "int4"}
    sixteen = pytest.approx(16, abs=8 * ROTARY / 2 / values)  # of two bytes each, frequencies take half as many, too
    assert bits["bfloat16"] == bits["float16"] == sixteen and 16 > bits["float8"] >= 8 > bits["int4"] >= 4
    assert command("fit c --devices 1x1GiB --dtype int4")["fits"]
    stored()
    assert weights() == values


def test_files_of_another_model():
    others = {"model.layers.9.mlp.up_proj.weight": (4,)}, {"model.norm.weight": None}
    for change in others:
        stored({name: shape for name, shape in (SHAPES | change).items() if shape})
        with refusal("SK507", "Put the model's own files beside its configuration, all of them."):
            sk.fit("c", HUGE)
    stored()
    assert weights() == sum(map(math.prod, SHAPES.values()))


IDS = torch.tensor([[3, 5, 7, 9]])


def decoder(**rope):
    torch.manual_seed(0)
    fields = {name: value for name, value in LLAMA.items() if name != "model_type"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, **rope)).eval()


def steps_alike(gm, model):
    """Whether the second step of a captured decoder has the logits that the model has."""
    mask, positions, cache = torch.ones_like(IDS), torch.arange(2, 4)[None], transformers.DynamicCache()
    step = {"input_ids": IDS[:, 2:], "attention_mask": mask, "position_ids": positions, "use_cache": True}
    with torch.no_grad():
        model(IDS[:, :2], past_key_values=cache)
        found = gm(**step, logits_to_keep=1, past_key_values=copy.deepcopy(cache)).logits
        torch.testing.assert_close(found, model(**step, logits_to_keep=1, past_key_values=cache).logits)
    return True


def test_decoders_that_are_captured():
    model = decoder()
    least = {}
    for name, value in (("batch", 0), ("tokens", 3)):
        with refusal("SK401", "Give a whole number of at least {...}.") as error:
            sk.capture_decoder(model, **{name: value})
        least[name] = int(re.search(r"\d+", error.value.remedy)[0])
    with refusal("SK401", "Call model.eval()."):
        sk.capture_decoder(model.train())
    model.eval()
    with refusal("SK401", "Give the class with a head for tokens, such as LlamaForCausalLM in place of LlamaModel."):
        sk.capture_decoder(model.model)
    assert steps_alike(sk.capture_decoder(model, **least), model)
    linear = nn.Linear(2, 2).eval()
    with refusal("SK401", "Capture it with splitkit.capture."):
        sk.capture_decoder(linear)
    x = torch.ones(3, 2)
    assert torch.equal(sk.capture(linear, x)(x), linear(x))


def dynamic_rope():
    return decoder(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def mpt():
    return transformers.MptForCausalLM(
        transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32, eos_token_id=2)
    ).eval()


@pytest.mark.parametrize("make", these_first([dynamic_rope], [mpt]))
def test_a_decoder_that_cannot_be_captured(make):
    model = make()
    with refusal(
        "SK401",
        'Generate with model.generate; of a model loaded with device_map="auto", layers are on several devices.',
    ):
        sk.capture_decoder(model)

    def generated(one):
        return one.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)

    found, want = generated(model), IDS
    with torch.no_grad():
        while want.shape[1] < found.shape[1]:
            want = torch.cat([want, model(want).logits[:, -1:].argmax(-1)], 1)
    assert found.shape[1] > IDS.shape[1] and torch.equal(found, want)
    model.save_pretrained("saved")
    assert torch.equal(generated(type(model).from_pretrained("saved", device_map="auto")), found)  # on any devices here
