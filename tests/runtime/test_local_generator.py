"""``generate`` on the parts of a split gives the tokens of the unsplit model, and caches stay with their part."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from decoders import FAMILIES, IMAGE, captured, decoder

import splitkit as sk
from splitkit._torch import FakeTensorMode
from splitkit.errors import NoPlanError, PipelineError
from splitkit.graph.caches import caches_of
from splitkit.runtime.devices import accelerators
from splitkit.runtime.devices.on_devices import PartOnDevice
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.encoder_caches import EncoderCaches, decoder_cache, decoder_memory, kept_caches
from splitkit.runtime.generation.local_generator import DecoderOnDevices
from splitkit.runtime.ranks.stage_chain import chain_of

transformers = pytest.importorskip("transformers")

CPUS = ["cpu:0", "cpu:1"]
TOKENS = 12


def prompts(sequences=3, length=9):
    """Prompts of several lengths, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (sequences, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, sequences):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(model, **options):
    return model.generate(**prompts(), **{"max_new_tokens": TOKENS, "do_sample": False, **options})


def split_of(family, parts=2):
    return sk.split(captured(family), sk.policies.Stages(parts))


@pytest.fixture(scope="module")
def llama():
    return decoder("llama"), sk.generator(decoder("llama"), split_of("llama"), CPUS)


FIRST = ("gemma2", "gpt2")
"""A sliding window with grouped heads, learned positions with a tied weight; others below are with Llama."""


@pytest.mark.parametrize("family", these_first(FIRST, [family for family in FAMILIES if family not in FIRST]))
def test_greedy_tokens_are_those_of_the_whole(family):
    model = decoder(family)
    whole = greedy(model)
    # some sequences end early: with a token that only one of them has in the middle
    ends = int(whole[1, 9 + TOKENS // 2])
    early = greedy(model, eos_token_id=ends, pad_token_id=0)
    generator = sk.generator(model, split_of(family), CPUS)
    assert torch.equal(greedy(generator), whole)
    assert torch.equal(greedy(generator, eos_token_id=ends, pad_token_id=0), early)
    assert not torch.equal(early, whole) and len({*whole[:, 9:].flatten().tolist()}) > 3


def inputs_of(family):
    """Inputs that are no tokens of a decoder, of two or three requests of different lengths."""
    generator = torch.Generator().manual_seed(5)
    if family == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=generator)}
    if family == "llava":
        ids = torch.randint(3, 90, (2, 12), generator=generator)
        mask = torch.ones_like(ids)
        ids[:, 4:8], mask[1, :3] = IMAGE, 0
        return {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        }
    ids, mask = prompts().values()
    # encoders read prompts that are padded on the right
    return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}


@pytest.mark.parametrize("family", these_first(["t5", "llava"], ["bart", "whisper"]))
def test_models_with_an_encoder_or_images(family):
    model, given = decoder(family), inputs_of(family)
    split = split_of(family)
    found = []
    for generates in (model, sk.generator(model, split, CPUS)):
        torch.manual_seed(3)
        ways = [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 20}]
        found.append([generates.generate(**given, max_new_tokens=10, **{"do_sample": False, **way}) for way in ways])
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got) and len({*got.flatten().tolist()}) > 3


def test_keys_and_values_of_an_encoder_are_computed_once(monkeypatch):
    computed = []
    compute = EncoderCaches.compute
    monkeypatch.setattr(EncoderCaches, "compute", lambda self, given: computed.append(1) or compute(self, given))
    generator = sk.generator(decoder("t5"), split_of("t5"), CPUS)
    out = generator.generate(**inputs_of("t5"), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert len(computed) == len(split_of("t5").parts)
    cache = out.past_key_values
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    assert [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers] == [9, 9]
    with pytest.raises(PipelineError, match="SK802: there are no encoder_outputs"):
        generator(decoder_input_ids=torch.ones(1, 1, dtype=torch.long))


WAYS = {
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
    "beam search": {"num_beams": 4, "num_return_sequences": 2},
    "beam search with sampling": {"num_beams": 2, "do_sample": True},
    "chunks": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
    "logits processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [8]]},
    "stopped by length": {"max_new_tokens": None, "max_length": 13},
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_generate(llama, way):
    found = []
    for model in llama:
        torch.manual_seed(3)
        found.append(greedy(model, **WAYS[way]))
    assert torch.equal(*found)


def test_scores_and_the_cache_are_returned(llama):
    want, got = (greedy(model, return_dict_in_generate=True, output_scores=True, output_logits=True) for model in llama)
    assert torch.equal(want.sequences, got.sequences)
    torch.testing.assert_close(got.scores, want.scores, atol=2e-5, rtol=1e-4)
    for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=1e-4)


def test_a_conversation_goes_on_from_its_cache(llama):
    model, generator = llama
    cache, given = transformers.DynamicCache(), prompts(1)
    first = generator.generate(**given, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.get_seq_length() == first.shape[1] - 1
    again = torch.cat([first, torch.tensor([[11, 12, 13]])], 1)
    options = {"attention_mask": torch.ones_like(again), "max_new_tokens": 5, "do_sample": False}
    got = generator.generate(again, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(again, **options))


def test_tokens_are_streamed(llama):
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value)

        def end(self):
            self.seen.append("end")

    streamer = Streamer()
    given = prompts(1)
    out = llama[1].generate(**given, streamer=streamer, max_new_tokens=3, do_sample=False)
    assert [int(token) for token in streamer.seen[1:-1]] == out[0, -3:].tolist() and streamer.seen[-1] == "end"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_no_byte_of_a_cache_crosses_a_border(family):
    split = split_of(family)
    # a cache, and what is computed from one alone, such as the keys repeated for each head
    forms = {node for cache in caches_of(captured(family)) for node in cache}
    for node in split.flow.nodes:
        read = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.op != "get_attr"]
        if read and forms.issuperset(read):
            forms.add(node)
    forms = {node for node in forms if isinstance(node.meta["val"], torch.Tensor)}
    crossing = [value for sub in split.subgraphs.values() for value in sub.inputs if value.op != "placeholder"]
    assert crossing and not forms.intersection(crossing)
    on_devices = DecoderOnDevices(split, CPUS)
    read = [value for sub in split.subgraphs.values() for value in sub.inputs if value not in forms]
    assert {move.name for move in on_devices.moves} == {v.name for v in read if isinstance(v.meta["val"], torch.Tensor)}


@pytest.mark.parametrize("parts", [3, 4, 6])
def test_stages_of_less_than_a_layer_keep_each_cache_in_one_part(parts):
    assert len(kept_caches(split_of("llama", parts))) == 4


def test_a_tied_weight_is_copied_once_and_not_in_every_step(monkeypatch):
    sent = []
    monkeypatch.setattr(accelerators.Send, "_moved", lambda self, tensor: sent.append(tensor.shape) or tensor.clone())
    generator = sk.generator(decoder("gpt2"), split_of("gpt2"), CPUS)
    greedy(generator)
    assert sent and decoder("gpt2").transformer.wte.weight.shape not in sent


def on_fake_gpus(family):
    model, gm = copy.deepcopy((decoder(family), captured(family)))
    mode, made = FakeTensorMode(), {}
    for module in (*model.modules(), *gm.modules()):
        for table in (module._parameters, module._buffers):
            for name, tensor in [(name, tensor) for name, tensor in table.items() if tensor is not None]:
                if id(tensor) not in made:
                    fake = mode.from_tensor(tensor.detach())
                    made[id(tensor)] = torch.nn.Parameter(fake) if table is module._parameters else fake
                table[name] = made[id(tensor)]
    with mode:
        split = sk.split(gm, sk.policies.Stages(2))
        return split, sk.generator(model, split, ["cuda:0", "cuda:1"]), mode


def test_what_runs_whole_is_on_the_device_of_the_first_part():
    _, generator, _ = on_fake_gpus("llava")
    whole = [generator.model.vision_tower, generator.model.multi_modal_projector, generator.get_input_embeddings()]
    held = [tensor for module in whole for tensor in (*module.parameters(), *module.buffers())]
    assert held and {str(tensor.device) for tensor in held} == {str(generator.device)} == {"cuda:0"}


def test_each_layer_keeps_its_cache_on_the_device_of_its_part():
    split, generator, mode = on_fake_gpus("llama")
    cache = transformers.DynamicCache()
    with mode, torch.no_grad():
        for query in (6, 1, 1):
            out = generator(torch.ones(2, query, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    assert [layer.keys.device.index for layer in cache.layers] == [0, 1] and out.logits.device.index == 1
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert list(decoder_cache(split, sequences=2, tokens=8).values()) == held


@pytest.mark.parametrize("family, query", these_first([("llama", 1), ("llama", 48), ("gpt2", 48)], [("mixtral", 16)]))
def test_the_memory_of_each_part_is_predicted(family, query, monkeypatch):
    """Measured in a real step; a part frees each tensor of its cache when it has made the longer one."""
    sequences, tokens = 4, 300 if query == 1 else 48
    gm, measured = captured(family), []
    split = sk.split(gm, sk.policies.Stages(2), costs=sk.costs.roofline(gm, "cpu"))  # its attention, as it is measured

    def measure(part, *given):
        outputs = []
        measured.append(sk.measure_memory(lambda: outputs.append(part.part(*given))).peak)
        return outputs[0]

    monkeypatch.setattr(PartOnDevice, "forward", measure)
    parts = DecoderOnDevices(split, CPUS)
    caches = [torch.randn(cache.sizes(sequences, tokens - query)) for cache in parts.caches]
    given = {
        "input_ids": torch.ones(sequences, query, dtype=torch.long),
        "attention_mask": torch.ones(sequences, tokens, dtype=torch.long),
        "position_ids": torch.zeros(sequences, query, dtype=torch.long),
    }
    _, updated = parts.step(given, caches)
    predicted = decoder_memory(split, sequences=sequences, tokens=tokens, query=query)
    for part, peak in zip(predicted.values(), measured, strict=True):
        assert peak <= part.peak <= 1.15 * peak
    assert sum(part.cache for part in predicted.values()) == sum(cache.nbytes for cache in updated)


@pytest.mark.parametrize("family, chunk", these_first([("llama", 8)], [("gpt2", 1), ("mixtral", 64), ("t5", 1)]))
def test_stages_have_room_for_the_tokens_that_they_claim_and_for_no_more(family, chunk):
    gm, memory = captured(family), [2**22, 3 * 2**22]
    plan = sk.plan(gm, sk.policies.Stages(2, objective="tokens", memory=memory, chunk=chunk))
    split, tokens = sk.split(gm, plan), int(plan.claim.value)

    def fits(each):
        held = decoder_memory(split, sequences=2, tokens=each, query=max(1, chunk // 2))
        return all(part.peak <= limit for part, limit in zip(held.values(), memory, strict=True))

    assert tokens % 2 == 0 and fits(tokens // 2) and not fits(tokens // 2 + 1)


@pytest.mark.parametrize("family", these_first(["llama"], ["gpt2", "gemma2"]))
def test_a_capture_on_meta_takes_what_one_of_real_weights_takes(family):
    """The CPU has a fused kernel of attention, as GPUs have; `meta` alone would make scores and copies of all keys."""
    bare = sk.split(sk.capture_decoder(copy.deepcopy(decoder(family)).to("meta")), sk.policies.Stages(2))
    real, predicted = (decoder_memory(one, sequences=1, tokens=9000) for one in (split_of(family), bare))
    for part, held in real.items():
        assert 0.99 * held.peak <= predicted[part].peak <= 1.01 * held.peak


def test_stages_are_refused_whose_step_does_not_fit_with_memory_that_does():
    gm, tokens = captured("llama"), 20_000
    alone = sum(sk.extend.cache_bytes(gm).values()) * tokens  # as much memory as the whole cache, on each device
    with pytest.raises(NoPlanError, match="SK303: .* a step with 20,000 tokens does not fit") as refused:
        sk.plan(gm, sk.policies.Stages(2, objective="throughput", tokens=tokens, memory=alone // 8))
    memory = int(re.search(r"Give (\d+) bytes", str(refused.value))[1])
    split = sk.split(gm, sk.policies.Stages(2, objective="throughput", tokens=tokens, memory=memory))
    peaks = [part.peak for part in decoder_memory(split, sequences=2, tokens=tokens // 2).values()]
    assert alone < max(peaks) <= memory


REFUSED = {
    "several logits": ({"input_ids": torch.ones(1, 4, dtype=torch.long)}, "logits of the last token, not all"),
    "embeddings": ({"inputs_embeds": torch.ones(1, 4, 32)}, "no input_ids"),
    "labels": ({"input_ids": torch.ones(1, 1, dtype=torch.long), "labels": torch.ones(1, 1)}, "no input labels"),
    "attentions": ({"input_ids": torch.ones(1, 1, dtype=torch.long), "output_attentions": True}, "output_attentions"),
    "a mask for others": (
        {"input_ids": torch.ones(1, 1, dtype=torch.long), "attention_mask": torch.ones(1, 3, dtype=torch.long)},
        "attention_mask is .1, 3., for 1 sequences of 0 cached and 1 new tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_the_graph_cannot_do_is_refused(llama, what):
    given, message = REFUSED[what]
    with pytest.raises(PipelineError, match=f"SK802: .*{message}"):
        llama[1](**given)


def test_caches_of_other_kinds_are_refused(llama):
    for kind, options in (("StaticCache", {"cache_implementation": "static"}), ("DynamicCache that offloads", {})):
        options = options or {"cache_implementation": "offloaded"}
        with pytest.raises(PipelineError, match=f"SK802: the cache is a {kind}"):
            greedy(llama[1], **options)
    cache = transformers.DynamicCache()
    llama[1](torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    with pytest.raises(PipelineError, match="SK802: there are 3 sequences, and the cache has 2"):
        llama[1](torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    # the refused call has left the cache as it was
    assert cache.get_seq_length() == 1


def test_a_cache_that_two_parts_read_is_refused():
    gm = captured("llama")
    given, updated = caches_of(gm)[0]
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    before = {node: int(node in [*nodes[nodes.index(updated) + 1 :]]) for node in nodes}
    split = sk.split(gm, {**before, updated: 0})
    with pytest.raises(PipelineError, match=f"SK801: the cache {given.name} would cross a border"):
        kept_caches(split)


@pytest.mark.parametrize("family", these_first(("t5",), ["bart", "llava"]))
def test_load_reads_what_runs_whole(family, tmp_path):
    whole = decoder(family)
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config)).eval()
    model.generation_config = whole.generation_config
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
    with pytest.raises(PipelineError, match=r"SK807: .* and \d+ more are on meta: an encoder"):
        sk.generator(model, split, CPUS)
    sk.load(split, tmp_path, CPUS)
    generator = sk.generator(model, split, CPUS)
    assert torch.equal(greedy(generator, max_new_tokens=4), greedy(whole, max_new_tokens=4))


def test_what_is_no_decoder_is_refused():
    split = sk.split(sk.capture(torch.nn.Linear(2, 2), torch.ones(2, 2)), sk.policies.Stages(1))
    with pytest.raises(PipelineError, match="SK801: the split is not that of a decoder"):
        kept_caches(split)
    with pytest.raises(PipelineError, match="SK801: the split is not that of a decoder"):
        DecoderChain.of(chain_of(split))
    with pytest.raises(PipelineError, match="SK801: Linear has no generate"):
        sk.generator(torch.nn.Linear(2, 2), split)
    with pytest.raises(PipelineError, match="SK802: tokens is -1"):
        decoder_cache(split_of("llama"), sequences=1, tokens=-1)
    with pytest.raises(PipelineError, match="SK802: tokens is 3"):
        decoder_memory(split_of("llama"), sequences=1, tokens=3, query=4)


def test_the_page_runs_as_shown(capsys):
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    scope = {"model": decoder("llama"), "inputs": prompts()}
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, scope)
    assert torch.equal(scope["tokens"], decoder("llama").generate(**prompts(), max_new_tokens=20, do_sample=False))
    printed = capsys.readouterr().out
    assert re.search(r"# (.*)", blocks[1])[1] == printed.splitlines()[0]
    assert all((Path(__file__).parents[2] / name).exists() for name in re.findall(r"`(tests/[\w./]+)`", page))


def test_the_model_is_of_the_same_class_and_shares_its_weights(llama):
    model, generator = llama
    assert isinstance(generator, type(model)) and generator.config is model.config
    assert dict(generator.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert generator.lm_head.weight is model.lm_head.weight and str(generator.device) == "cpu:0"
