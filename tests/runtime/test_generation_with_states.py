"""Models with states of constant size generate on the parts of a split; the states stay with their part."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from decoders import STATES, captured, decoder

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.graph.caches import cache_forms, caches_of
from splitkit.runtime.devices.on_devices import PartOnDevice
from splitkit.runtime.generation.encoder_caches import decoder_cache, decoder_memory, kept_caches
from splitkit.runtime.generation.local_generator import DecoderOnDevices
from splitkit.testing.models import build

transformers = pytest.importorskip("transformers")

CPUS = ["cpu:0", "cpu:1"]
FIRST = ("mamba", "falcon_h1")
TOKENS = 10
WAYS = {
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 30},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
}


def prompts(sequences=3, length=9):
    """Prompts of several lengths, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (sequences, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, sequences):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model, **options):
    torch.manual_seed(3)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(**prompts(), **settings)


def split_of(family, parts=2):
    return sk.split(captured(family), sk.policies.Stages(parts))


@pytest.fixture(scope="module")
def mamba():
    return decoder("mamba"), sk.generator(decoder("mamba"), split_of("mamba"), CPUS)


@pytest.mark.parametrize("family", these_first(FIRST, sorted({*STATES} - {*FIRST})))
def test_tokens_are_those_of_the_whole(family):
    model = decoder(family)
    whole = generated(model)
    ends = int(whole[1, 9 + TOKENS // 2])
    ways = [{"eos_token_id": ends}, *WAYS.values()]
    want = [whole, *(generated(model, **way) for way in ways)]
    generator = sk.generator(model, split_of(family), CPUS)
    for way, tokens in zip([{}, *ways], want, strict=True):
        assert torch.equal(generated(generator, **way), tokens), way
    assert not torch.equal(want[0], want[1]) and len({*whole[:, 9:].flatten().tolist()}) > 3


def test_a_conversation_goes_on_from_its_states(mamba):
    model, generator = mamba
    ids = prompts(1)["input_ids"]
    first = generator(ids[:, :5], use_cache=True, logits_to_keep=1)
    states = [layer.recurrent_states[0] for layer in first.cache_params.layers]
    kept = [state.clone() for state in states]
    # transformers would begin anew with several tokens
    again = generator(ids[:, 5:], cache_params=first.cache_params, logits_to_keep=1)
    torch.testing.assert_close(again.logits, model(ids).logits[:, -1:], atol=2e-5, rtol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(states, kept, strict=True)), "a step writes no old state"
    assert [type(layer).__name__ for layer in again.cache_params.layers] == ["LinearAttentionLayer"] * 2


def test_a_cache_of_another_model_is_refused(mamba):
    cache = transformers.DynamicCache()
    decoder("llama")(torch.ones(1, 2, dtype=torch.long), past_key_values=cache)
    with pytest.raises(PipelineError, match="SK802: the cache has 2 layers of DynamicLayer"):
        mamba[1](torch.ones(1, 1, dtype=torch.long), cache_params=cache)
    cache = mamba[1](torch.ones(2, 3, dtype=torch.long), use_cache=True, logits_to_keep=1).cache_params
    with pytest.raises(PipelineError, match="SK802: there are 3 sequences, and the cache has 2"):
        mamba[1](torch.ones(3, 1, dtype=torch.long), cache_params=cache)


@pytest.mark.parametrize("parts", [3, 5])
@pytest.mark.parametrize("family", FIRST)
def test_each_state_stays_in_one_part(family, parts):
    split = split_of(family, parts)
    assert len(kept_caches(split)) == len(caches_of(captured(family)))
    forms = {node for cache in caches_of(captured(family)) for node in cache}
    crossing = {value for sub in split.subgraphs.values() for value in sub.inputs if value.op != "placeholder"}
    assert crossing and forms.isdisjoint(crossing)
    # a state is written where it is read
    for cache in caches_of(captured(family)):
        makers = cache.updated.all_input_nodes if "getitem" in cache.updated.name else [cache.updated]
        readers = {key for node in (*cache.given.users, *makers) for key in split.plan.places[node]}
        assert len(readers) == 1


def test_what_writes_a_state_reads_it_too():
    """A cut to the size of the state is between them, so that a plan could put it into another part."""
    graph = captured("mamba").graph
    for cache in caches_of(captured("mamba")):
        writer = cache.updated.args[0] if "getitem" in cache.updated.name else cache.updated
        assert writer in cache_forms(graph, cache)[1]


def test_states_are_counted_once_a_request_and_not_for_each_token():
    split = split_of("mamba")
    held = decoder_cache(split, sequences=3, tokens=10)
    assert held == decoder_cache(split, sequences=3, tokens=10_000) and sum(held.values()) == 2 * 3 * 48 * (4 + 4) * 4
    both = [sum(decoder_cache(split_of("falcon_h1"), sequences=1, tokens=n).values()) for n in (0, 1, 2)]
    assert both[0] > 0 and both[2] - both[1] == both[1] - both[0] == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("family, query", [("mamba", 1), ("mamba", 24), ("falcon_h1", 24)])
def test_the_memory_of_each_part_is_predicted(family, query, monkeypatch):
    sequences, tokens = 4, 48
    split, measured = split_of(family), []

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


def test_no_tokens_are_maximised_where_nothing_grows():
    with pytest.raises(sk.errors.PolicyError, match="SK302: Stages: the model keeps states of a constant size"):
        sk.plan(captured("mamba"), sk.policies.Stages(2, memory="1MiB", objective="tokens"))
    eager = build("llama", layers=1, width=16, heads=2, vocab=20).model.eval()
    eager.set_attn_implementation("eager")
    with pytest.raises(sk.errors.PolicyError, match="SK302: Stages: no node calls scaled_dot_product_attention"):
        sk.plan(sk.capture_decoder(eager), sk.policies.Stages(1, memory="1MiB", objective="tokens"))
    plan = sk.plan(captured("falcon_h1"), sk.policies.Stages(2, memory="1MiB", objective="tokens"))
    assert plan.claim.value > 100
