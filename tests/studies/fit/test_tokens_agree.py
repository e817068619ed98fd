"""`splitkit.fit`, the planner and `decoder_memory` say one number of tokens."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first

import splitkit as sk
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.runtime import decoder_memory
from splitkit.search.plan_figures import StagePricing
from splitkit.studies.fit.fit_model import cards_of
from splitkit.testing.config_models import config_model

from small_configs import config_of  # isort: skip

REQUESTS = {"llama": 1, "gpt2": 2, "mistral": 1, "gemma3": 2, "mixtral": 3}
"""Grouped heads; learned positions and a tied weight; sliding windows; experts."""
CHUNK = 16


UNEQUAL, EQUAL = (150, 100), (125, 125)
"""KiB that two devices have for the cache and activations of a request."""
CASES = [(family, more) for family in REQUESTS for more in (UNEQUAL, EQUAL)]


@pytest.mark.parametrize(("family", "more"), these_first(CASES[:1], CASES[1:]))
def test_fit_the_planner_and_decoder_memory_agree(family, more):
    config, requests = config_of(family), REQUESTS[family]
    config.num_hidden_layers = 2 if family == "llama" else config.num_hidden_layers
    model = config_model(config, torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in model.parameters()) // 1024
    devices = [f"{weights * 2 // 3 + each * requests}KiB" for each in more]
    asked = 30
    found = sk.fit(model, devices, tokens=asked, requests=requests, chunk=CHUNK)
    limits = [card.limit for card in cards_of(devices)]
    gm = sk.capture_decoder(model, batch=requests)
    plan = sk.plan(gm, sk.policies.Stages(2, memory=limits, objective="tokens", chunk=CHUNK))
    split = sk.split(gm, plan)
    here = sk.capture_decoder(config_model(config, torch.bfloat16).to_empty(device="cpu"), batch=requests)
    again = sk.plan(here, sk.policies.Stages(2, memory=limits, objective="tokens", chunk=CHUNK))
    assert again.claim is not None and plan.claim is not None
    assert again.claim.value == plan.claim.value, "the device of the capture does not matter"

    def held(tokens):
        query = min(tokens, CHUNK // requests)
        return [*decoder_memory(split, sequences=requests, tokens=tokens, query=query).values()]

    def fits(tokens):
        return all(part.peak <= limit for part, limit in zip(held(tokens), limits, strict=True))

    figures = StagePricing.of(sk.analyze(gm), plan, costs_of_plan(plan, gm)).figures(plan)
    assert list(figures.peaks) == [part.peak for part in held(found.tokens)]
    assert plan.claim is not None and plan.claim.value == found.tokens * requests
    assert found.fits and asked < found.tokens and fits(found.tokens) and not fits(found.tokens + 1)
    assert [device.held.total for device in found.devices] == [part.peak for part in held(asked)]
    assert [device.held.cache for device in found.devices] == [part.cache for part in held(asked)]
    assert [device.held.weights for device in found.devices] == [part.weights for part in held(asked)]
