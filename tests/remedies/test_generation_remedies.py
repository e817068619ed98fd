"""Remedies of errors about generation (SK801 to SK808): requests, decoders, and what runs beside their stages.

A group of one rank serves a decoder of one stage in this process.
"""

from __future__ import annotations

import copy
import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
from carried import Remedy, refusal
from decoders import IMAGE, captured, decoder
from torch import nn

import splitkit as sk
from splitkit._torch import FakeTensorMode, attributes_of
from splitkit.graph.caches import caches_of
from splitkit.runtime.generation.before_stages import BehindEncoder, ModelTokens
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.encoder_caches import decoder_cache, decoder_memory, kept_caches
from splitkit.runtime.generation.generation_request import Request
from splitkit.runtime.ranks.stage_chain import chain_of

transformers = pytest.importorskip("transformers")

PROMPT = [5, 6, 7]
TOKENS = 4
CPUS = ["cpu:0", "cpu:1"]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split_of(family, parts=1):
    return sk.split(captured(family), sk.policies.Stages(parts))


def one_layer(family="llama", change=None):
    """A decoder of its own, which may be changed; `captured` and `decoder` are shared."""
    model = copy.deepcopy(decoder(family))
    if change is not None:
        change(model)
    return model


@cache
def generator(family="llama"):
    return sk.generator(one_layer(family), sk.split(copy.deepcopy(captured(family)), sk.policies.Stages(2)), CPUS)


@cache
def plain(family="llama", *options):
    return sk.serve(split_of(family), model=decoder(family), **dict(options))


def served(asked, family="llama", **options):
    """The tokens of a request, or its error."""
    return answer(plain(family, *options.items()), asked)


def answer(serving, asked):
    (result,) = serving.generate([asked])
    if result.error is not None:
        raise result.error
    return [list(row) for row in result.tokens]


def expected(rows=(PROMPT,), family="llama", new=TOKENS, **further):
    """What the unsplit model generates."""
    found = decoder(family).generate(torch.tensor([*rows]), max_new_tokens=new, do_sample=False, **further)
    start = 1 if decoder(family).config.is_encoder_decoder else len(rows[0])
    return [row[start:] for row in found.tolist()]


def asked(prompt=PROMPT, **further):
    return {"input_ids": prompt, "max_new_tokens": TOKENS, **further}


def greedy(**further):
    """Whether a request is answered with the greedy tokens: those drawn from the one that is most likely."""
    return served(asked(**{"do_sample": True, "top_k": 1, **further})) == expected()


def number(caught):
    """The last number that a remedy names."""
    return int(re.findall(r"\d+", caught.value.remedy)[-1])


def beams():
    ids = torch.tensor([PROMPT])
    found, want = (
        model.generate(ids, num_beams=2, max_new_tokens=TOKENS, do_sample=False)
        for model in (generator(), decoder("llama"))
    )
    return torch.equal(found, want)


def assisted(model):
    helper = {"assistant_model": one_layer()}
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, **helper)
    return found[:, len(PROMPT) :].tolist() == expected()


REQUESTS = [
    Remedy("SK802", "Generate in one process: splitkit.generator.", lambda: served(asked(num_beams=2)), beams),
    Remedy(
        "SK802",
        "Leave it out, or generate with the unsplit model.",
        lambda: served(asked(assistant_model=1.5)),
        (lambda: served(asked()) == expected(), lambda: assisted(decoder("llama"))),
    ),
    Remedy(
        "SK802",
        "Give input_ids, or a prompt and a tokenizer.",
        lambda: served({"max_new_tokens": TOKENS}),
        lambda: served(asked()) == expected(),  # the other in test_a_prompt_and_a_tokenizer
    ),
    Remedy(
        "SK802",
        "Use the tokenizer of this model.",
        lambda: served(asked([5, 96, 7])),
        lambda: served(asked([5, 95, 7])) == expected([[5, 95, 7]]),  # its last token
    ),
    Remedy(
        "SK802",
        "Shorten the prompt.",
        lambda: served(asked([5] * 9), positions=8),
        lambda: served(asked(), positions=8) == expected(),
    ),
    Remedy(
        "SK802",
        "Ask for fewer new tokens, or for fewer sequences at once.",
        lambda: served(asked([PROMPT] * 2, max_new_tokens=4), cache_tokens=10),
        (
            lambda: served(asked([PROMPT] * 2, max_new_tokens=3), cache_tokens=10) == expected([PROMPT] * 2, new=3),
            lambda: served(asked(), cache_tokens=10) == expected(),
        ),
    ),
    Remedy(
        "SK802",
        "Give at least one token, for example the one that begins a text.",
        lambda: served(asked([[]])),
        lambda: served(asked([decoder("llama").config.bos_token_id])) == expected([[1]]),
    ),
    Remedy(
        "SK802",
        "Give a number from 0 to 1.",
        lambda: greedy(min_p=1.5),
        (lambda: greedy(min_p=0), lambda: greedy(min_p=0.5), lambda: greedy(min_p=1)),
    ),
    Remedy(
        "SK802",
        "Give true or false.",
        lambda: greedy(do_sample="yes"),
        (lambda: greedy(do_sample=True), lambda: greedy(do_sample=False)),
    ),
    Remedy(
        "SK802",
        'Give names and tensors: {"pixel_values": ...}.',
        lambda: served(asked(inputs=[1]), "llava"),
        lambda: served(asked(with_image(), inputs={"pixel_values": image()}), "llava") == seen(),
    ),
    Remedy(
        "SK802",
        "Give token ids: [5, 6, 7], or [[5, 6, 7], [8, 9]].",
        lambda: served(asked("five")),
        (
            lambda: served(asked([5, 6, 7])) == expected(),
            lambda: served(asked([[5, 6, 7], [8, 9]])) == [*expected(), *expected([[8, 9]])],
        ),
    ),
    Remedy(
        "SK802",
        "Give whole numbers: [5, 6, 7].",
        lambda: served(asked(eos_token_id=1.5)),
        lambda: served(asked(eos_token_id=[5, 6, 7])) == expected(eos_token_id=[5, 6, 7]),
    ),
    Remedy(
        "SK802",
        "Give whole numbers.",
        lambda: served(asked([5, 6.5, 7])),
        lambda: served(asked([5, 6, 7])) == expected(),
    ),
    Remedy(
        "SK802",
        'Give a dict such as {"input_ids": [5, 6, 7], "max_new_tokens": 20}.',
        lambda: served(Request(prompts=5)),
        lambda: served({"input_ids": PROMPT, "max_new_tokens": TOKENS}) == expected(),
    ),
    Remedy(
        "SK802",
        "Give input_ids.",
        lambda: served({"decoder_input_ids": PROMPT, "max_new_tokens": TOKENS}),
        lambda: served(asked()) == expected(),
    ),
    Remedy(
        "SK802",
        "Give input_ids.",
        lambda: served(asked(decoder_input_ids=PROMPT)),
        lambda: served(asked()) == expected(),
    ),
    Remedy(
        "SK802",
        "Give equally many tokens for each sequence.",
        lambda: served(asked(decoder_input_ids=[[0, 5], [0]], prompt=[PROMPT] * 2), "t5"),
        lambda: (
            served(asked(decoder_input_ids=[[0, 5], [0, 5]], prompt=[PROMPT] * 2), "t5")
            == [row[1:] for row in expected([PROMPT] * 2, "t5", TOKENS, decoder_input_ids=torch.tensor([[0, 5]] * 2))]
        ),
    ),
    Remedy(
        "SK802",
        "Give the images, such as pixel_values.",
        lambda: served(asked(with_image()), "llava"),
        lambda: served(asked(with_image(), pixel_values=image()), "llava") == seen(),
    ),
    Remedy(
        "SK802",
        "Give a tensor, or nested lists of equal lengths.",
        lambda: served(asked(with_image(), pixel_values=[[1.0, 2.0], [3.0]]), "llava"),
        (
            lambda: served(asked(with_image(), pixel_values=image()), "llava") == seen(),
            lambda: served(asked(with_image(), pixel_values=image().tolist()), "llava") == seen(),
        ),
    ),
    Remedy(
        "SK802",
        "Give what the model's processor makes.",
        lambda: served(asked(with_image(), pixel_values=image()[:, :2]), "llava"),
        lambda: served(asked(with_image(), pixel_values=image()), "llava") == seen(),
    ),
]


def with_image():
    return [5, IMAGE, IMAGE, IMAGE, IMAGE, 7]


def image():
    return torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)


def seen():
    return expected([with_image()], "llava", pixel_values=image())


@pytest.mark.parametrize("remedy", REQUESTS, ids=lambda remedy: remedy.told[:40])
def test_requests(remedy):
    remedy.carry_out()


@pytest.mark.parametrize("name", ["penalty_alpha", "assistant_model"])
def test_ways_of_generate_that_take_back_tokens(name):
    """`splitkit.generator` has these neither, as assisted generation needs logits of several positions."""
    with refusal("SK802", "Leave it out, or generate with the unsplit model."):
        served(asked(**{name: 0.5}))
    assert served(asked()) == expected()
    with refusal("SK802", "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has."):
        assisted(generator())


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "no_repeat_ngram_size", "seed"])
def test_whole_numbers(name):
    with refusal("SK802", "Give a whole number of at least {...}.") as caught:
        served(asked(**{name: -1}))
    least = number(caught)
    found = served(asked(**{name: least}))
    assert found == (expected(new=least) if name == "max_new_tokens" else expected())
    with refusal("SK802", "Give at most {...}.") as caught:
        served(asked(**{name: 2**63}))
    if name == "max_new_tokens":
        most = number(caught)
        with refusal("SK802", "Shorten the prompt, or ask for at most {...} new tokens.") as caught:
            served(asked(max_new_tokens=most), positions=8)
        assert served(asked(max_new_tokens=number(caught)), positions=8) == expected(new=5)
    else:
        assert served(asked(**{name: number(caught)})) == expected()


@pytest.mark.parametrize("name, wrong", [("temperature", 0), ("top_p", 1.5), ("repetition_penalty", 0)])
def test_numbers(name, wrong):
    for value in (wrong, float("inf")):
        with refusal("SK802", "Give a {...}number above {...}{...}.") as caught:
            greedy(**{name: value})
        assert ("finite" in caught.value.remedy) == (name != "top_p")
    assert greedy(**{name: 1}) and served(asked(**{name: 1e-3, "do_sample": True, "top_k": 1}))


def test_fields_and_inputs():
    with refusal("SK802", "Did you mean {...}?") as caught:
        served(asked(max_new_token=3))
    meant = re.search(r"Did you mean (\w+)\?", caught.value.remedy)[1]
    assert served(asked(**{meant: 3})) == expected(new=3)
    with refusal("SK802", "Fields: {...}.") as caught:
        served(asked(nothing="like it"))
    assert {*caught.value.remedy.removeprefix("Fields: ").rstrip(".").split(", ")} == {*vars(Request())}
    with refusal("SK802", "Give prompts without padding: input_ids=[[5, 6, 7], [8, 9]]."):
        served(asked(attention_mask=image()), "llama")
    with refusal("SK802", "It reads input_ids."):
        served(asked(cats=image()), "llama")
    with refusal("SK802", "It reads {...}.") as caught:
        served(asked(cats=image()), "llava")
    assert "pixel_values" in caught.value.remedy
    with refusal("SK802", "Did you mean {...}?") as caught:
        served(asked(pixel_value=image()), "llava")
    assert caught.value.remedy.startswith("Did you mean pixel_values? It reads ")
    assert served(asked([[5, 6, 7], [8, 9]])) == [*expected(), *expected([[8, 9]])]
    assert served(asked(with_image(), pixel_values=image()), "llava") == seen()


DECODERS = [
    Remedy(
        "SK801",
        "Capture one step of the decoder: sk.capture_decoder(model).",
        lambda: sk.serve(sk.split(linear(), sk.policies.Stages(1))),
        lambda: answer(sk.serve(split_of("llama")), asked()) == expected(),
    ),
    Remedy(
        "SK801",
        "Capture one step of the decoder: sk.capture_decoder(model).",
        lambda: sk.generator(decoder("llama"), sk.split(linear(), sk.policies.Stages(1)), "cpu"),
        lambda: beams(),
    ),
    Remedy(
        "SK801",
        "Generation runs one stage on each rank: split into {...}, or start {...} processes.",
        lambda: sk.serve(split_of("llama", 2)),
        lambda: answer(sk.serve(split_of("llama", 1)), asked()) == expected(),  # processes: in test_rank_remedies
    ),
    Remedy(
        "SK801",
        "Give a model of transformers that generates.",
        lambda: sk.generator(nn.Linear(2, 2), split_of("llama"), "cpu"),
        lambda: beams(),
    ),
    Remedy(
        "SK801",
        "Give that model.",
        lambda: sk.serve(split_of("t5"), model=decoder("llava")),
        lambda: served(asked(), "t5") == expected(family="t5"),
    ),
    Remedy(
        "SK801",
        "Give the model that was captured, or none.",
        lambda: sk.serve(split_of("llama"), model=nn.Linear(2, 2)),
        (
            lambda: answer(sk.serve(split_of("llama"), model=decoder("llama")), asked()) == expected(),
            lambda: answer(sk.serve(split_of("llama")), asked()) == expected(),
        ),
    ),
    Remedy(
        "SK801",
        "Give the model that was captured: sk.serve(split, model=model).",
        lambda: sk.serve(split_of("t5")),
        lambda: served(asked(), "t5") == expected(family="t5"),
    ),
    Remedy(
        "SK802",
        "Call model.eval().",
        lambda: sk.serve(split_of("t5"), model=one_layer("t5").train()),
        lambda: (
            answer(sk.serve(split_of("t5"), model=one_layer("t5").train().eval()), asked()) == expected(family="t5")
        ),
    ),
    Remedy(
        "SK802",
        "Give a whole number of at least 1.",
        lambda: sk.serve(split_of("llama"), in_flight=0),
        lambda: answer(sk.serve(split_of("llama"), in_flight=1), asked()) == expected(),
    ),
    Remedy(
        "SK802",
        "Give a whole number.",
        lambda: decoder_cache(split_of("llama"), sequences=2, tokens=1.5),
        lambda: set(decoder_cache(split_of("llama"), sequences=2, tokens=0).values()) == {0},
    ),
    Remedy(
        "SK804",
        "Give the model that was captured, or capture this one.",
        lambda: sk.serve(split_of("t5"), model=one_layer("t5", other_encoder)),
        lambda: served(asked(), "t5") == expected(family="t5"),  # the other in test_another_model_is_captured
    ),
    Remedy(
        "SK807",
        "Give the first rank a model with its weights, for example by from_pretrained.",
        lambda: sk.serve(split_of("t5"), model=one_layer("t5").to("meta")),
        lambda: answer(sk.serve(split_of("t5"), model=one_layer("t5")), asked()) == expected(family="t5"),
    ),
]


def linear():
    return sk.capture(nn.Linear(2, 2), torch.ones(2, 2))


def local(family, model):
    """Whether a generator in one process gives the tokens of the whole."""
    split = sk.split(copy.deepcopy(captured(family)), sk.policies.Stages(2))
    found = sk.generator(model, split, CPUS).generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)
    return [row[1 if family == "t5" else len(PROMPT) :] for row in found.tolist()] == expected(family=family)


def other_encoder(model):
    last = [value for name, value in model.named_parameters() if "encoder" in name][-1]
    with torch.no_grad():
        last[0] += 1


def captured_anew(family, change):
    model = one_layer(family, change)
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(1))
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)
    return answer(sk.serve(split, model=model), asked()) == want[:, 1 if family == "t5" else len(PROMPT) :].tolist()


@pytest.mark.parametrize("remedy", DECODERS, ids=lambda remedy: remedy.told[:40])
def test_decoders(remedy):
    remedy.carry_out()


def test_counts_of_a_step():
    split = split_of("llama", 2)
    with refusal("SK802", "Give a whole number from {...} on.") as caught:
        decoder_memory(split, sequences=1, tokens=3, query=4)
    found = decoder_memory(split, sequences=1, tokens=number(caught), query=4)
    assert {key: part.cache for key, part in found.items()} == decoder_cache(split, sequences=1, tokens=4)


def apart(at):
    """Two parts: the second begins at a node, or behind it (1); ``None`` leaves all in the first."""
    gm = copy.deepcopy(captured("llama"))
    _, updated = caches_of(gm)[0]
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    first = len(nodes) if at is None else nodes.index(updated) + at
    return sk.split(gm, {node: int(index >= first) for index, node in enumerate(nodes)})


def test_a_cache_in_two_parts():
    with refusal("SK801", "Plan with policies.Stages, which keeps each cache in one part."):
        kept_caches(apart(1))
    assert local("llama", one_layer())
    with refusal("SK801", "Put all nodes that read a cache into one stage."):
        DecoderChain.of(chain_of(apart(0)))
    assert answer(sk.serve(apart(None)), asked()) == expected()


def step(model=None, length=1, **given):
    return (model or generator())(torch.arange(5, 5 + length)[None], **given)


def last(**given):
    """The logits of the last token of three."""
    return torch.allclose(step(**given, length=3).logits[:, -1], step(decoder("llama"), 3).logits[:, -1], atol=1e-4)


def embeds():
    return decoder("llama").get_input_embeddings()(torch.tensor([PROMPT]))


def cached(sequences, family="llama"):
    cache = transformers.DynamicCache()
    decoder(family)(torch.ones(sequences, 2, dtype=torch.long), past_key_values=cache)
    return cache


def continued(model, past):
    return model(torch.full((2, 1), 7), past_key_values=past, use_cache=True, logits_to_keep=1)


def goes_on(cache_of):
    found, want = (continued(model, cache_of(model)).logits for model in (generator(), decoder("llama")))
    return torch.allclose(found, want, atol=1e-4)


def own_cache(model):
    return model(torch.ones(2, 2, dtype=torch.long), use_cache=True, logits_to_keep=1).past_key_values


def shuffled():
    """A cache with a layer more than the model has."""
    past = cached(2)
    past.layers.append(transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=4))
    return past


def of_encoder(model, **given):
    return model(decoder_input_ids=torch.tensor([[0]]), **given).logits


def encoded():
    ids = torch.tensor([PROMPT])
    found = of_encoder(generator("t5"), encoder_outputs=generator("t5").get_encoder()(ids))
    return torch.allclose(found, of_encoder(decoder("t5"), input_ids=ids), atol=1e-4)


def generated(**options):
    ids = torch.tensor([PROMPT])
    found = generator().generate(ids, max_new_tokens=TOKENS, do_sample=False, **options)
    return found[:, len(PROMPT) :].tolist() == expected()


STEPS = [
    Remedy(
        "SK802",
        "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has.",
        lambda: step(length=3),
        (lambda: last(logits_to_keep=1), generated),
    ),
    Remedy(
        "SK802",
        "Call it without {...}; it was captured without.",
        lambda: step(output_attentions=True),
        lambda: last(logits_to_keep=1),
    ),
    Remedy(
        "SK802",
        "Read logits and past_key_values by name.",
        lambda: step(return_dict=False),
        lambda: (
            (out := step(use_cache=True)) and len(out.past_key_values.layers) == 2 and out.logits.shape == (1, 1, 96)
        ),
    ),
    Remedy(
        "SK802",
        "Give what the graph was captured with.",
        lambda: generator()(inputs_embeds=embeds()),
        lambda: last(logits_to_keep=1),
    ),
    Remedy(
        "SK802",
        "Give those of model.get_encoder(), as generate does.",
        lambda: of_encoder(generator("t5")),
        encoded,
    ),
    Remedy(
        "SK802",
        "Generate without cache_implementation, or give a DynamicCache.",
        lambda: generated(cache_implementation="static"),
        (generated, lambda: generated(past_key_values=transformers.DynamicCache())),
    ),
    Remedy(
        "SK802",
        "Give the cache that an earlier call returned.",
        lambda: continued(generator(), shuffled()),
        lambda: goes_on(own_cache),
    ),
    Remedy(
        "SK802",
        "Give as many.",
        lambda: continued(generator(), cached(3)),
        lambda: goes_on(lambda model: cached(2)),
    ),
]


@pytest.mark.parametrize("remedy", STEPS, ids=lambda remedy: remedy.told[:40])
@torch.no_grad()
def test_steps(remedy):
    remedy.carry_out()


@torch.no_grad()
def test_a_mask():
    with refusal("SK802", "Give one of {...}.") as caught:
        step(length=3, attention_mask=torch.ones(1, 5, dtype=torch.long), logits_to_keep=1)
    sizes = eval(re.search(r"\[.*\]", caught.value.remedy)[0])
    assert last(attention_mask=torch.ones(sizes, dtype=torch.long), logits_to_keep=1)


@torch.no_grad()
def test_a_logit_is_nan():
    gm, weight = copy.deepcopy(captured("llama")), "lm_head.weight"
    gm.get_parameter(weight)[3] = float("nan")
    with refusal("SK805", "Look at the weights, or compute in another dtype."):
        answer(sk.serve(sk.split(gm, sk.policies.Stages(1))), asked())
    gm.get_parameter(weight).copy_(captured("llama").get_parameter(weight))
    assert answer(sk.serve(sk.split(gm, sk.policies.Stages(1))), asked()) == expected()


def overflows(model):
    """In half precision."""
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 3e4


@pytest.mark.campaign
def test_a_logit_is_nan_in_half_precision():
    with refusal("SK805", "Look at the weights, or compute in another dtype."):
        captured_anew("llama", lambda model: (overflows(model), model.half()))
    assert captured_anew("llama", overflows)


@pytest.mark.campaign
def test_another_model_is_captured():
    with refusal("SK804", "Give the model that was captured, or capture this one."):
        sk.serve(split_of("t5"), model=one_layer("t5", other_encoder))
    assert captured_anew("t5", other_encoder)


def in_half(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())
    return module


def test_the_dtype_of_an_encoder():
    split, model = sk.split(in_half(copy.deepcopy(captured("t5"))), sk.policies.Stages(1)), in_half(one_layer("t5"))
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)[:, 1:].tolist()
    with refusal("SK803", "Give the model in the dtype in which it was captured."):
        answer(sk.serve(split, model=copy.deepcopy(model).half()), asked())
    assert answer(sk.serve(split, model=model), asked()) == want


class Stepper(nn.Module):
    """A step that was written by hand, with a cache under a name of its own."""

    def forward(self, input_ids, past_key_values):
        new = torch.cat([past_key_values["mine"], input_ids[..., None].float()], 1)
        return {"logits": new.sum(1, keepdim=True), "past_key_values": {"mine": new}}


def test_a_cache_by_another_name():
    ids = torch.ones(1, 1, dtype=torch.long)
    gm = sk.capture(Stepper(), input_ids=ids, past_key_values={"mine": torch.ones(1, 3, 1)})
    with refusal("SK802", "Capture with sk.capture_decoder."):
        made = sk.generator(one_layer(), sk.split(gm, sk.policies.Stages(1)), "cpu")
        made(ids, past_key_values=transformers.DynamicCache())
    assert local("llama", one_layer())


def tied(model):
    model.lm_head.weight = model.get_input_embeddings().weight


def on_fake_gpus(model, gm, parts):
    """A generator whose parts are on one fake GPU each; nothing is computed."""
    model, gm = copy.deepcopy((model, gm))
    mode, made = FakeTensorMode(), {}
    for module in (*model.modules(), *gm.modules()):
        for table in attributes_of(module)[:2]:
            for name, old in table.items():
                if old is not None:
                    if id(old) not in made:
                        fake = mode.from_tensor(old.detach())
                        made[id(old)] = nn.Parameter(fake) if isinstance(old, nn.Parameter) else fake
                    table[name] = made[id(old)]
    with mode:
        split = sk.split(gm, sk.policies.Stages(parts))
        return sk.generator(model, split, [f"cuda:{part}" for part in range(parts)])


def test_a_weight_that_is_read_whole_and_by_a_part_elsewhere():
    model = one_layer("llava", tied)
    gm = sk.capture_decoder(model)
    with refusal("SK808", "Untie the weight, or let the first part read it."):
        on_fake_gpus(model, gm, 2)
    on_fake_gpus(decoder("llava"), captured("llava"), 2)
    on_fake_gpus(model, gm, 1)
    given = {"input_ids": torch.tensor([with_image()]), "pixel_values": image(), "max_new_tokens": TOKENS}
    want = model.generate(**given, do_sample=False)
    found = sk.generator(model, sk.split(gm, sk.policies.Stages(1)), "cpu").generate(**given, do_sample=False)
    assert torch.equal(found, want) and local("llava", one_layer("llava"))


SPEECH = torch.linspace(-1, 1, 8 * 40).view(1, 8, 40)
START = [3, 90]


def started(family, change=None, **data):
    """What the decoder reads first, of a model whose encoder runs whole."""
    model = one_layer(family, change)
    before = BehindEncoder(model, ModelTokens.of(model), torch.device("cpu"))
    request = before.checked(Request.from_data(data))
    before.first(request)
    return [list(row) for row in request.decoded]


def several_languages(model):
    model.generation_config.lang_to_id = {"<|en|>": 80}


ENCODERS = [
    Remedy(
        "SK802",
        "Shorten the prompt.",
        lambda: started("bart", short_encoder, input_ids=[5] * 9),
        lambda: started("bart", short_encoder, input_ids=[5] * 8) == [[3]],
    ),
    Remedy(
        "SK802",
        "Leave input_ids out; tokens with which the decoder starts are decoder_input_ids.",
        lambda: started("whisper", input_ids=START, input_features=SPEECH),
        (
            lambda: started("whisper", input_features=SPEECH) == [START],
            lambda: started("whisper", decoder_input_ids=START, input_features=SPEECH) == [START],
        ),
    ),
    Remedy(
        "SK802",
        "Give {...}, as the processor makes them.",
        lambda: started("whisper", decoder_input_ids=START),
        lambda: started("whisper", decoder_input_ids=START, input_features=SPEECH) == [START],
    ),
    Remedy(
        "SK802",
        "Give one for each sequence.",
        lambda: started("whisper", input_features=torch.zeros(0, 8, 40)),
        lambda: started("whisper", input_features=SPEECH.expand(2, 8, 40)) == [START] * 2,
    ),
    Remedy(
        "SK802",
        "Give decoder_input_ids; for Whisper those of the language, the task and text without times.",
        lambda: started("whisper", several_languages, input_features=SPEECH),
        lambda: (
            started("whisper", several_languages, input_features=SPEECH, decoder_input_ids=[3, 80, 90]) == [[3, 80, 90]]
        ),
    ),
]


def short_encoder(model):
    model.config.max_position_embeddings = 8


@pytest.mark.parametrize("remedy", ENCODERS, ids=lambda remedy: remedy.told[:40])
def test_encoders(remedy):
    remedy.carry_out()


@pytest.mark.campaign
def test_speech_is_transcribed():
    """What the remedies of `ENCODERS` lead to, up to the tokens."""
    want = decoder("whisper").generate(input_features=SPEECH, max_new_tokens=TOKENS, do_sample=False)
    assert served({"input_features": SPEECH, "max_new_tokens": TOKENS}, "whisper")[0][: want.shape[1]] == [
        token for token in want[0].tolist() if token not in START
    ]
