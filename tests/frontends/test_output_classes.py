"""A split returns the same object as the model, also when its class is the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import these_first
from torch import nn

import splitkit as sk


class Object:
    def __init__(self, h):
        self.h, self.more, self.note = h, [h * 2, {"k": h + 1}], "kept"


class Slots:
    __slots__ = ("inner", "size")

    def __init__(self, h):
        self.inner, self.size = Object(h), h.shape


class Items(dict):
    pass


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        return self.kind(self.linear(x).relu())


@pytest.mark.parametrize(
    "kind", [Object, Slots, lambda h: Items(a=h), lambda h: (torch.distributions.Cauchy(h, 1, False),)]
)
def test_an_output_may_be_of_a_class_that_nobody_registered(kind):
    model, x = Returns(kind), torch.randn(2, 4)
    gm = sk.capture(model, x)
    made = sk.split(gm, sk.policies.Stages(2))
    assert type(made(x)) is type(model(x))
    sk.compare(model, made, x).raise_if_different()
    sk.compare(model, copy.deepcopy(gm), x).raise_if_different()


def test_an_output_registered_without_paths_can_be_compared():
    class Out:
        def __init__(self, h):
            self.h = h

    torch.utils._pytree.register_pytree_node(Out, lambda o: ([o.h], None), lambda leaves, _: Out(*leaves))
    model, x = Returns(Out), torch.randn(2, 4)
    made = sk.split(sk.capture(model, x), sk.policies.Stages(2))
    sk.compare(model, made, x).raise_if_different()
    assert not sk.compare(model, Returns(Out), x).same


@pytest.mark.parametrize(
    ("family", "training"),
    these_first(
        [("bart", True), ("opt", False)],
        [("bart", False), ("opt", True), *((name, how) for name in ("gpt_neox", "qwen3") for how in (False, True))],
    ),
)
def test_a_transformers_model_may_return_its_cache(family, training):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "ffn_dim", "word_embed_proj_dim"), 16),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
        **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_attention_heads"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
        **{"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    auto = transformers.AutoModelForSeq2SeqLM if family == "bart" else transformers.AutoModelForCausalLM
    model, ids = auto.from_config(config).train(training), torch.randint(3, 40, (2, 6))
    inputs = {"input_ids": ids, "decoder_input_ids" if family == "bart" else "labels": ids}
    made = sk.split(sk.capture(model, **inputs), sk.policies.Stages(2))
    result = made(**inputs)
    assert type(result.past_key_values).__name__ in ("DynamicCache", "EncoderDecoderCache")
    assert result.past_key_values.get_seq_length() == 6
    sk.compare(model, made, **inputs).raise_if_different()
