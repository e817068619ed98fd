"""Fifty steps of a language model, divided by a policy: the loss curve of eager."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import these_first

import splitkit as sk
from splitkit.policies import Budget, MinCut, RecomputeAll
from splitkit.testing import models

STEPS = 50


def losses(run, model, inputs):
    torch.manual_seed(1)
    optimizer, curve = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = run(**inputs).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve)


@pytest.mark.parametrize(
    "policy", these_first([Budget(0.95)], [RecomputeAll(), Budget(0.5, of="saved"), MinCut(0.0)]), ids=str
)
def test_the_loss_curve_is_that_of_eager(policy):
    example = models.build("gpt2", layers=1, width=64, heads=2, vocab=97, batch=4, seq=32)
    eager, model = copy.deepcopy(example.model), example.model
    expected = losses(eager, eager, example.kwargs)
    assert expected[-1] < 0.5 * expected[0], "it learns its batch by heart"
    torch.compiler.reset()
    found = losses(torch.compile(model, backend=sk.backend(policy)), model, example.kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
