"""Requests for text: what their fields mean, what is refused, and which rules of transformers they ask for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.before_stages import ModelTokens, _always, _if_drawn
from splitkit.runtime.generation.generation_request import Request


def test_tokens_and_places_of_a_request():
    request = Request(((1, 2, 3), (4,)), max_new_tokens=5)
    assert (request.decoded, request.longest, request.positions, request.cache_tokens) == (request.prompts, 3, 8, 14)
    encoded = Request(((1, 2, 3),), max_new_tokens=2, decoder_input_ids=((7,),))
    assert (encoded.decoded, encoded.longest, encoded.positions, encoded.cache_tokens) == (((7,),), 1, 3, 2)


@pytest.mark.parametrize(
    "data",
    [
        [1, 2],
        [[1, 2]],
        np.array([1, 2]),
        torch.tensor([[1, 2]]),
        {"prompts": [1, 2]},
        {"input_ids": [[1, 2]]},
        {"input_ids": torch.tensor([1, 2]), "num_beams": 1, "penalty_alpha": None},
    ],
)
def test_prompts_come_in_many_forms(data):
    assert Request.from_data(data) == Request(((1, 2),))


def test_a_request_as_data():
    pixels = np.zeros((1, 3))
    request = Request.from_data(
        {"prompts": [[1], [2, 3]], "eos_token_id": 5, "top_k": 3, "seed": 7, "pixel_values": pixels}
    )
    assert request.eos_token_id == (5,) and request.inputs == {"pixel_values": pixels}
    told = json.loads(request.to_json())
    assert told["prompts"] == [[1], [2, 3]] and told["eos_token_id"] == [5] and "decoder_input_ids" not in told
    assert "inputs" not in told and Request.from_data(told) == request


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "a request has no prompt\n  Give input_ids, or a prompt and a tokenizer."),
        ({"prompts": [1], "top_m": 3}, "a request has no field 'top_m'\n  Did you mean top_p?"),
        (
            {"prompts": [1], "num_beams": 2},
            "num_beams is 2: beam search needs a cache that is reordered after each token\n"
            "  Generate in one process: splitkit.generator.",
        ),
        (
            {"prompts": [1], "penalty_alpha": 0.5},
            "penalty_alpha is 0.5: contrastive search runs the model several times for each token\n"
            "  Leave it out, or generate with the unsplit model.",
        ),
    ],
)
def test_a_request_that_cannot_be_answered(data, text):
    with pytest.raises(PipelineError) as caught:
        Request.from_data(data)
    assert str(caught.value).startswith(f"SK802: {text}")


def test_which_rules_always_hold():
    request = Request(((1, 2),), 3, repetition_penalty=1.5, no_repeat_ngram_size=2)
    known = ModelTokens(
        forced_bos_token_id=0, forced_eos_token_id=(9,), suppress_tokens=(4,), begin_suppress_tokens=(5, 6)
    )
    assert [*_always(request, known)] == [
        ("RepetitionPenaltyLogitsProcessor", 1.5),
        ("NoRepeatNGramLogitsProcessor", 2),
        ("ForcedBOSTokenLogitsProcessor", 0),
        ("ForcedEOSTokenLogitsProcessor", 5, [9]),
        ("SuppressTokensLogitsProcessor", [4]),
        ("SuppressTokensAtBeginLogitsProcessor", [5, 6], 2),
    ]
    assert [*_always(Request(((1,),), 3), known)][-1] == ("SuppressTokensAtBeginLogitsProcessor", [5, 6], 2)
    free = ModelTokens(begin_suppress_tokens=(5,))
    assert [*_always(Request(((1,),)), free)] == [("SuppressTokensAtBeginLogitsProcessor", [5], 1)]
    assert [*_always(Request(((1,),)), ModelTokens())] == []


def test_which_rules_hold_for_tokens_that_are_drawn():
    request = Request(((1,),), temperature=2, top_k=5, top_p=0.5, min_p=0.1)
    assert [*_if_drawn(request)] == [
        ("TemperatureLogitsWarper", 2.0), ("TopKLogitsWarper", 5), ("TopPLogitsWarper", 0.5), ("MinPLogitsWarper", 0.1),
    ]  # fmt: skip
    assert [*_if_drawn(Request(((1,),)))] == []
