"""`splitkit.fit`, the planner and `decoder_memory` say one number of tokens."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first

import splitkit as sk
from splitkit.runtime import decoder_memory
from splitkit.studies.fit.layout import cards_of
from splitkit.testing.config_models import config_model

from small_configs import config_of  # isort: skip

REQUESTS = {"llama": 1, "gpt2": 2, "mistral": 1, "gemma3": 2, "mixtral": 3}
"""Grouped heads; learned positions and a tied weight; sliding windows; experts."""
CHUNK = 16


@pytest.mark.parametrize("family", these_first(["llama"], [name for name in REQUESTS if name != "llama"]))
def test_fit_the_planner_and_decoder_memory_agree(family):
    config, requests = config_of(family), REQUESTS[family]
    config.num_hidden_layers = 2 if family == "llama" else config.num_hidden_layers
    model = config_model(config, torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in model.parameters()) // 1024
    devices = [f"{weights * 2 // 3 + more}KiB" for more in (150 * requests, 100 * requests)]
    asked = 30
    found = sk.fit(model, devices, tokens=asked, requests=requests, chunk=CHUNK)
    limits = [card.limit for card in cards_of(devices)]
    gm = sk.capture_decoder(model, batch=requests)
    plan = sk.plan(gm, sk.policies.Stages(2, memory=limits, objective="tokens", chunk=CHUNK))
    split = sk.split(gm, plan)

    def held(tokens):
        query = min(tokens, CHUNK // requests)
        return [*decoder_memory(split, sequences=requests, tokens=tokens, query=query).values()]

    def fits(tokens):
        return all(part.peak <= limit for part, limit in zip(held(tokens), limits, strict=True))

    assert plan.claim is not None and plan.claim.value == found.tokens * requests
    assert found.fits and asked < found.tokens and fits(found.tokens) and not fits(found.tokens + 1)
    assert [device.held.total for device in found.devices] == [part.peak for part in held(asked)]
    assert [device.held.cache for device in found.devices] == [part.cache for part in held(asked)]
    assert [device.held.weights for device in found.devices] == [part.weights for part in held(asked)]
