"""Ranks with a stage each give the tokens of ``generate``; a bad request fails alone, and a rank that ends is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import FAMILIES, STATES
from launch import launch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.before_stages import ModelTokens, Sampler
from splitkit.runtime.generation.generation_request import Request, RequestLimits

RANKS = 2


@pytest.fixture(scope="module")
def said() -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each run said; one process captures for all."""
    runs = ("tokens", "family", "kill", "raise", "nan", "messages")
    found: dict[str, list[dict[str, Any]]] = {}
    for line in launch("runtime/generating.py", RANKS, *" -- ".join(runs).split(), check=False, at_once=True):
        if "next" in line:
            said = found[line["next"][0]] = []
        elif "said" in line:
            said.append(line)
        else:
            assert "Traceback" not in line["error"], line["error"]
    return found


def test_tokens_are_those_of_generate(said):
    """Of prompts of different lengths, batches, requests that end early, and sampling; whole, and in chunks."""
    (first,) = [line for line in said["tokens"] if not line["rank"]]
    assert first["said"] == ""
    lengths = [len(row) for tokens in first["expected"] for row in tokens]
    assert len(set(lengths)) > 4, "all sequences end alike"
    for made in first["made"]:
        good = [result for result in made if result["error"] is None]
        assert [result["tokens"] for result in good] == first["expected"]


def test_families_give_the_tokens_of_generate(said):
    (first,) = [line for line in said["family"] if not line["rank"]]
    assert len(first["families"]) == 2
    for family, (made, expected) in first["families"].items():
        assert made == expected, family
        assert len({token for rows in made for row in rows for token in row}) > 5, f"{family} repeats itself"


def test_bad_requests_fail_alone_with_a_reason(said):
    (first,) = [line for line in said["tokens"] if not line["rank"]]
    reasons = [result["error"]["reason"] for result in first["made"][0] if result["error"]]
    assert reasons == [
        "prompt 0 has the token 96, and the model knows tokens from 0 to 95",
        "the prompt is empty",
        "2 tokens and 99 new ones are 101 positions, and the model has 64",
        "the cache would come to 620 tokens, and there is memory for 200",
        "num_beams is 4: beam search needs a cache that is reordered after each token",
        "a request has no field 'temprature'",
        "the request cannot be read: RuntimeError: not a request",
        "choosing a token failed: KeyError: 'no such processor'",
    ]
    codes = [result["error"]["code"] for result in first["made"][0] if result["error"]]
    assert codes == ["SK802"] * 7 + ["SK805"]


def test_caches_are_there_for_those_underway_only(said):
    for line in said["tokens"]:
        assert line["left"] == [0, 0]
        assert line["most"] == [2 * RANKS, 2]


def test_a_killed_rank_is_named_and_the_other_ends(said):
    (line,) = said["kill"]
    assert line["said"].startswith("SK805: rank 1 is gone; rank 0 waited for the next token from stage 1 (rank 1)")


def test_a_stage_that_fails_is_named_on_every_rank(said):
    for line in said["raise"]:
        assert line["said"].startswith("SK805: rank 1 failed in request "), line["said"]
        assert "in stage 1: ValueError: no such thing" in line["said"]


def test_a_request_whose_logits_are_no_numbers_fails_alone(said):
    (first,) = [line for line in said["nan"] if not line["rank"]]
    errors = [result["error"] for result in first["results"]]
    assert [error and error["reason"] for error in errors] == [None, "a logit is nan", None, None]
    assert [r["tokens"] for i, r in enumerate(first["results"]) if i != 1] == [
        tokens for i, tokens in enumerate(first["expected"]) if i != 1
    ]


def test_messages_arrive_as_they_were_sent(said):
    (first,) = [line for line in said["messages"] if not line["rank"]]
    assert first["same"] == [True] * 4


@pytest.mark.campaign
def test_all_families_give_the_tokens_of_generate():
    lines = launch("runtime/generating.py", 2, "every")
    (first,) = [line for line in lines if line.get("rank") == 0 and "families" in line]
    assert len(first["families"]) == len(FAMILIES + STATES)
    for family, (made, expected) in first["families"].items():
        assert made == expected, family


@pytest.mark.campaign
def test_four_ranks_give_the_tokens_of_generate():
    """Stages(4) of two layers also cuts within a layer."""
    lines = launch("runtime/generating.py", 4, "tokens", "--", "family")
    (first,) = [line for line in lines if line.get("rank") == 0 and "made" in line]
    for made in first["made"]:
        assert [result["tokens"] for result in made if result["error"] is None] == first["expected"]
    (first,) = [line for line in lines if line.get("rank") == 0 and "families" in line]
    for family, (made, expected) in first["families"].items():
        assert made == expected, family


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"prompts": [5], "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompts": [5], "temperature": 0.0}, "temperature is 0.0"),
        ({"prompts": [5], "top_p": 1.5}, "top_p is 1.5"),
        ({"prompts": [5], "min_p": -1}, "min_p is -1"),
        ({"prompts": [5], "do_sample": 1}, "do_sample is 1"),
        ({"prompts": [[5], []]}, "the prompt is empty"),
        ({"prompts": [5, 0.5]}, "0.5 is not a token id"),
        ({"prompts": "five"}, "the prompts are 'five'"),
        ({"max_new_tokens": 5}, "a request has no prompt"),
        ({"prompts": [5], "seed": 2**63}, "seed is 9223372036854775808"),
        ({"prompts": [5], "eos_token_id": 1.5}, "1.5 is not a list of token ids"),
        ({"prompts": [5], "eos_token_id": [2**63]}, "9223372036854775808 is not a token id"),
    ],
)
def test_requests_that_make_no_sense_are_refused(data, says):
    with pytest.raises(PipelineError, match=r"SK802") as caught:
        Request.from_data(data)
    assert says in caught.value.reason


def test_a_request_is_the_same_after_it_was_sent():
    import json

    request = Request.from_data({"input_ids": torch.tensor([[5, 6], [7, 8]]), "eos_token_id": 3, "num_beams": 1})
    assert request.prompts == ((5, 6), (7, 8)) and request.eos_token_id == (3,)
    assert Request.from_data(json.loads(request.to_json())) == request


def test_the_last_position_of_the_model_can_be_reached():
    limits = RequestLimits(vocabulary=10, positions=5, cache_tokens=4)
    limits.require(Request(((1, 2, 3),), max_new_tokens=2))
    with pytest.raises(PipelineError, match="3 tokens and 3 new ones are 6 positions"):
        limits.require(Request(((1, 2, 3),), max_new_tokens=3))
    with pytest.raises(PipelineError, match="come to 8 tokens"):
        limits.require(Request(((1, 2, 3), (1,)), max_new_tokens=2))


def test_a_sequence_that_has_ended_gets_padding():
    sampler = Sampler(Request(((1,), (2,)), max_new_tokens=3), ModelTokens((4,), 0), torch.device("cpu"))
    logits = torch.eye(6)[[4, 5]]
    assert sampler.next(logits).tolist() == [4, 5] and not sampler.done
    assert sampler.next(logits).tolist() == [0, 5] and not sampler.done
    assert sampler.next(logits).tolist() == [0, 5] and sampler.done
