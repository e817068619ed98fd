"""What `splitkit.fit` predicts for inference is what real models and real caches of transformers take."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from campaigns import some_of_all

import splitkit as sk
from splitkit.cli import main
from splitkit.errors import CaptureError, PolicyError
from splitkit.studies.fit.block_fit import InferenceFit, inference_step, weight_bytes
from splitkit.studies.fit.fit import has_attention_alone, is_decoder
from splitkit.studies.fit.fit_model import blocks_of, cards_of, fit_model
from splitkit.testing.config_models import config_model, main_input

from small_configs import DECODERS, ENCODER_DECODERS, config_of  # isort: skip

HUGE = "1x64GiB"


def storages(tensors):
    """Bytes of the memory of tensors, each memory once."""
    return sum({id(one.untyped_storage()): one.untyped_storage().nbytes() for one in tensors}.values())


def cached(cache):
    """The tensors of a cache."""
    both = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in ([one for one in both if one is not None] or [cache]) for layer in part.layers]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def real(family, dtype=torch.float32):
    torch.manual_seed(0)
    config = config_of(family)
    return config, config_model(config, dtype, "cpu")


def predicted(family, tokens, requests=1, chunk=512, dtype=None):
    """What one device holds with all blocks."""
    subject = fit_model(config_of(family), dtype)
    found = InferenceFit(subject, requests, chunk)
    return found.holds(found.step(tokens), 0, len(found.subject.blocks))


@pytest.mark.parametrize("family", (*DECODERS, *ENCODER_DECODERS))
def test_weights_are_those_of_the_real_model(family):
    _, model = real(family, torch.bfloat16)
    held = predicted(family, 8, dtype="bfloat16")
    assert held.weights == storages([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(("family", "tokens"), some_of_all(DECODERS, [12, 40], ()))
def test_the_cache_of_a_decoder_is_that_of_a_real_one(family, tokens):
    """Fed as `fit` says: all but the last chunk at once, then the chunk; 40 tokens are more than the windows of 16."""
    _, model = real(family)
    held = predicted(family, tokens, requests=2, chunk=16)
    ids, new = torch.ones(2, tokens, dtype=torch.long), min(tokens, 8)
    with torch.no_grad():
        cache = model(ids[:, :-new], use_cache=True).past_key_values if tokens > new else None
        cache = model(ids[:, -new:], past_key_values=cache, use_cache=True).past_key_values
    assert held.cache == storages(cached(cache)) > 0


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_the_caches_of_cross_attention_count(family):
    config, model = real(family)
    held = predicted(family, 12, requests=2)
    main = {model.main_input_name: main_input(model, config, 2, 12)}
    with torch.no_grad():
        cache = model(**main, decoder_input_ids=torch.ones(2, 12, dtype=torch.long), use_cache=True).past_key_values
    assert held.cache == storages(cached(cache)) > 0


FORMULAS = {
    "llama": 4 * 2 * 2 * 16,
    "gpt2": 3 * 2 * 4 * 16,
    "mixtral": 4 * 2 * 2 * 16,
    "deepseek": 4 * (24 + 8),
}
"""Values a token: layers x (keys and values) x heads x width of a head; for DeepSeek the latent and the rotated key."""


@pytest.mark.parametrize("family", FORMULAS)
def test_a_token_takes_what_the_configuration_says(family):
    less, more = (predicted(family, tokens, dtype="bfloat16") for tokens in (20, 30))
    assert more.cache - less.cache == 10 * 2 * FORMULAS[family]
    assert more.cache == 30 * 2 * FORMULAS[family]


def test_the_cache_is_that_of_the_captured_graph():
    _, model = real("llama")
    ids = torch.ones(1, 12, dtype=torch.long)
    gm = sk.capture(model, input_ids=ids, use_cache=True, logits_to_keep=1)
    results = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    caches = [value for value in results if value.ndim == 4]
    assert len(caches) == 8 and predicted("llama", 12).cache == sum(
        value.numel() * value.element_size() for value in caches
    )


@pytest.mark.parametrize("family", ("llama", "gemma3", "gpt2", "mixtral"))
def test_the_total_is_what_a_real_step_takes(family):
    """The peak of a step of 16 tokens after 40, measured on real tensors, is at most 10 % below the prediction."""
    _, model = real(family)
    ids = torch.ones(2, 56, dtype=torch.long)
    held = predicted(family, 56, requests=2, chunk=32)
    with torch.no_grad():
        caches = [model(ids[:, :40], use_cache=True).past_key_values]
        inputs = {"input_ids": ids[:, 40:].clone(), "use_cache": True, "logits_to_keep": 1}
        measured = sk.measure_memory(lambda: model(past_key_values=caches.pop(), **inputs))
    assert 0.9 * held.total <= measured.peak <= 1.02 * held.total


def test_cuts_are_the_best_of_all():
    """No cuts between blocks fit more tokens, and one token more fits with none."""
    subject = fit_model(config_of("llama"), "bfloat16")
    found = InferenceFit(subject, chunk=16)
    cards = cards_of(["260KiB", "200KiB"])
    most = found.most_tokens(cards)

    def fits(tokens):
        step, count = found.step(tokens), len(found.subject.blocks)
        held = [(found.holds(step, 0, cut).total, found.holds(step, cut, count).total) for cut in range(count + 1)]
        return any(one <= cards[0].limit and other <= cards[1].limit for one, other in held)

    assert 64 < most < 10_000 and fits(most) and not fits(most + 1)


def test_tied_weights_count_on_each_device_once():
    config = config_of("gpt2")
    one, two = sk.fit(config, HUGE, tokens=4), sk.fit(config, ["180KiB", "280KiB"], tokens=4, dtype="bfloat16")
    assert config.tie_word_embeddings and len([device for device in two.devices if device.names]) == 2
    shared = 160 * 64 * 2
    assert sum(device.held.weights for device in two.devices) == one.devices[0].held.weights // 2 + shared


def test_what_does_not_fit_comes_with_what_would():
    config = config_of("llama")
    config.num_hidden_layers = 8
    config.num_key_value_heads = config.num_attention_heads  # else a GPU has no fused attention in float32
    found = sk.fit(config, "2x640KiB", tokens=96, dtype="float32")
    assert not found.fits and found.next == "" and "too much" in str(found)
    changes = {one.change: one for one in found.alternatives}
    assert {"devices", "dtype"} <= set(changes)
    more = changes["devices"].value
    assert sk.fit(config, f"{more}x640KiB", tokens=96, dtype="float32").fits
    assert not sk.fit(config, f"{more - 1}x640KiB", tokens=96, dtype="float32").fits
    assert sk.fit(config, "2x640KiB", tokens=96, dtype=changes["dtype"].value).fits
    if found.tokens:
        assert sk.fit(config, "2x640KiB", tokens=found.tokens, dtype="float32").fits
        assert changes["tokens"].value == found.tokens
    assert all(one.fullest <= 640 * 1024 * 0.95 for one in found.alternatives)


def test_devices_that_are_added_are_like_the_largest():
    found = sk.fit(config_of("llama"), "150KiB,300KiB", tokens=8, dtype="float32")
    (more,) = [one for one in found.alternatives if one.change == "devices"]
    assert not found.fits and "like 300KiB" in more.text


def test_fewer_bits_take_their_bytes_and_scales():
    blocks = blocks_of(fit_model(config_of("llama"), "bfloat16").model)
    layers = [block for block in blocks if ".layers." in block.name]
    values = 4 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64)
    norms = 4 * 2 * 64 * 2
    squares, groups = 4 * 7, 4 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert weight_bytes(layers, 8) == values + 4 * squares + norms
    assert weight_bytes(layers, 4) == values // 2 + 2 * groups + norms
    assert weight_bytes(layers) == 2 * values + norms


def test_the_context_bounds_models_that_cannot_go_beyond():
    found = sk.fit(config_of("whisper"), HUGE, tokens=8)
    assert found.tokens == found.context == 64


def test_a_config_file_its_folder_and_its_quantization(tmp_path):
    data = config_of("llama").to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    plain = sk.fit(str(tmp_path), HUGE, tokens=8)
    assert plain.to_dict() | {"model": 0, "next": 0} == sk.fit(
        str(tmp_path / "config.json"), HUGE, tokens=8
    ).to_dict() | {"model": 0, "next": 0}
    (tmp_path / "config.json").write_text(json.dumps(data | {"quantization_config": {"quant_method": "fp8"}}))
    eight = sk.fit(str(tmp_path), HUGE, tokens=8)
    assert (
        eight.devices[0].held.weights
        == sk.fit(config_of("llama"), HUGE, tokens=8, dtype="float8").devices[0].held.weights
    )
    (tmp_path / "config.json").write_text(json.dumps(data | {"quantization_config": {"quant_method": "odd"}}))
    with pytest.raises(CaptureError, match="odd"):
        sk.fit(str(tmp_path), HUGE)


def test_a_model_with_inputs_of_its_own_has_no_number_of_tokens(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def make(width=8):\n"
        "    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])\n"
        "    return model, torch.zeros(5, width)\n"
    )
    found = sk.fit(f"{file}:make", ["1000B", "1560B"], sizes={"width": 8})
    layer, value = 4 * (8 * 8 + 8), 4 * 5 * 8
    assert found.fits and found.tokens is None and "--size width=8" in found.next
    assert [len(device.names) for device in found.devices] == [1, 3]
    assert [device.held.weights for device in found.devices] == [layer, 3 * layer]
    assert found.devices[1].held.activations == 3 * value
    with pytest.raises(PolicyError, match="its own inputs"):
        sk.fit(f"{file}:make", HUGE, tokens=4)


@pytest.mark.parametrize("train", [None, "adam"])
def test_the_next_command_names_the_one_device_that_has_all_of_the_model(train, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).square().mean()\n"
        "def make():\n"
        "    return Net(8, 8), torch.zeros(5, 8)\n"
    )
    found = sk.fit(f"{file}:make", "h100,l4", train=train)
    (used,) = (device.card.name for device in found.devices if device.names)
    assert f" --devices {used} " in found.next and "--stages" not in found.next
    assert main(shlex.split(found.next)[1:-1] + [str(tmp_path / "plan.json")]) == 0


CONVOLUTIONS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind(8, 8, 3, padding=1) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return {"loss": x.square().mean()}

class Timed(Net):
    def forward(self, x):
        return super().forward(x + torch.arange(8.0))  # promotes to float32

def conv(): return Net(nn.Conv1d), torch.randn(2, 8, 8)
def unet(): return Net(nn.ConvTranspose2d), torch.randn(2, 8, 8, 8)
def timed(): return Timed(nn.Conv1d), torch.randn(2, 8, 8)
"""


ASKS_FOR_VALUES = """
import torch, transformers as tf
def llama():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=90)
    ids = torch.ones(2, 12, dtype=torch.long)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), (), dict(input_ids=ids, attention_mask=ids, labels=ids)
class Skips(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = x if self.training and torch.rand([]) < 0.1 else layer(x)
        return {"loss": x.sum()}
def skips():
    return Skips(), (torch.randn(4, 16),)
"""


@pytest.mark.parametrize("train", [None, "adamw"])
@pytest.mark.parametrize("name", ["llama", "skips"])
def test_masks_and_layers_that_are_left_out_need_no_values(tmp_path, monkeypatch, name, train):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asks.py").write_text(ASKS_FOR_VALUES)
    assert not sk.fit(f"asks.py:{name}", "1x1KiB", train=train).fits
    assert sk.fit(f"asks.py:{name}", "1x1GiB", train=train).fits


@pytest.mark.parametrize("train", [None, "sgd"])
def test_float32_inputs_of_a_factory_are_cast_with_its_model(tmp_path, train):
    file = tmp_path / "own.py"
    file.write_text(CONVOLUTIONS)
    for name in ("conv", "unet"):
        whole = sk.fit(f"{file}:{name}", HUGE, train=train).devices[0].held
        half = sk.fit(f"{file}:{name}", HUGE, train=train, dtype="bfloat16").devices[0].held
        assert (half.weights * 2, half.activations * 2) == (whole.weights, whole.activations)
        found = sk.fit(f"{file}:{name}", [f"{whole.total}B"], train=train)  # 5 % stay free
        assert not found.fits and ("dtype", "bfloat16") in [(one.change, one.value) for one in found.alternatives]
    found = sk.fit(f"{file}:timed", "1x2KiB", train=train)  # does not run in bfloat16, which is no alternative then
    assert not found.fits and "bfloat16" not in [one.value for one in found.alternatives]
    with pytest.raises(CaptureError, match=r"SK401.*inputs of its factory in bfloat16.*\n.*Leave out dtype"):
        sk.fit(f"{file}:timed", HUGE, train=train, dtype="bfloat16")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"devices": "2x24"}, "Give the unit"),
        ({"devices": "0x24GiB"}, "Write 2x24GiB"),
        ({"dtype": "int3"}, "Use one of"),
        ({"microbatches": 4}, "for training only"),
        ({"train": "lion"}, "adamw"),
        ({"train": "adamw", "dtype": "int4"}, "cannot be trained"),
        ({"train": "adamw", "schedule": "zbv", "devices": "2x24GiB"}, "one stage per device"),
    ],
)
def test_what_makes_no_sense_is_refused(given, what):
    with pytest.raises(PolicyError, match="SK302") as caught:
        sk.fit(config_of("llama"), **{"devices": HUGE, **given})
    assert what in str(caught.value)


def test_a_model_with_weights_is_refused_and_one_on_meta_is_not_changed():
    config, model = real("llama")
    with pytest.raises(PolicyError, match="has real weights"):
        sk.fit(model, HUGE)
    bare = config_model(config, torch.float32)
    assert sk.fit(bare, HUGE, tokens=8, dtype="bfloat16").fits
    assert next(bare.parameters()).dtype == torch.float32


def test_a_model_that_asks_for_values_is_refused_with_the_reason(tmp_path):
    file = tmp_path / "asks.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Asks(nn.Module):\n"
        "    def forward(self, x):\n        return x * x.sum().item()\n"
        "def make():\n    return Asks(), torch.ones(3)\n"
    )
    with pytest.raises(CaptureError, match="does not run on meta"):
        sk.fit(f"{file}:make", HUGE)


def test_the_blocks_that_run_first_come_first():
    subject = fit_model(config_of("whisper"), None)
    blocks = blocks_of(subject.model)
    order = [blocks[n].name for n in inference_step(subject, 4, 1, 512).order]
    assert order.index("model.encoder.layers.1") < order.index("model.decoder.layers.0") < order.index("proj_out")


SMALLEST = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}


def test_as_many_tokens_as_positions_are_no_limit():
    """Mistral 7B has 32,768 of both, and no embedding of positions."""
    import transformers

    alike = transformers.MistralConfig(**SMALLEST, num_attention_heads=2, max_position_embeddings=64)
    assert fit_model(alike, None).longest is None and fit_model(alike, None).context == 64
    learned = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=64)
    assert fit_model(learned, None).longest == 64


def test_the_next_command_generates_only_where_the_decoder_can_be_captured(tmp_path):
    import transformers

    alike = transformers.MistralConfig(**SMALLEST, num_attention_heads=2)
    assert not is_decoder(str(tmp_path), fit_model(alike, None).model)
    alike.save_pretrained(tmp_path)
    assert is_decoder(str(tmp_path), fit_model(alike, None).model)
    assert is_decoder(str(tmp_path), fit_model(transformers.MambaConfig(**SMALLEST, state_size=4), None).model)
    hybrid = transformers.Qwen3NextConfig(**SMALLEST, layer_types=["linear_attention"])
    assert not is_decoder(str(tmp_path), fit_model(hybrid, None).model)
    inner = transformers.T5Config(), transformers.EncodecConfig(), transformers.MusicgenDecoderConfig()
    music = transformers.MusicgenConfig(**dict(zip(("text_encoder", "audio_encoder", "decoder"), inner, strict=True)))
    with pytest.raises(ValueError, match="ambiguous"):  # an encoder of text stands beside the decoder
        music.get_text_config()
    assert is_decoder(str(tmp_path), _Decoder(music)) and not has_attention_alone(_Decoder(music))


class _Decoder:
    def __init__(self, config):
        self.config = config

    def can_generate(self):
        return True

    def forward(self, input_ids, past_key_values):
        pass
