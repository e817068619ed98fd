"""Remedies of errors about plans and their parts (SK2xx)."""

from __future__ import annotations

import pytest
import torch
from carried import Remedy
from torch import fx, nn

import splitkit as sk
from splitkit.extend import Part


class Chain(nn.Module):
    def forward(self, x):
        return (x + 1) * 2 - 3


def chain():
    return fx.symbolic_trace(Chain())


def same(split, *inputs):
    return torch.equal(split(*inputs), Chain()(*inputs))


REMEDIES = [
    Remedy(
        "SK206",
        "Use 'plain' or 'checkpoint'.",
        lambda: Part(0, call="twice"),
        (lambda: Part(0, call="plain"), lambda: Part(0, call="checkpoint")),
    ),
    Remedy(
        "SK203",
        "Give these nodes one part, or say on_cycle='refine' to visit a part several times, 'merge' to join the parts.",
        lambda: sk.split(chain(), {"add": 0, "mul": 1, "sub": 0}),
        (
            lambda: same(sk.split(chain(), {"add": 0, "mul": 0, "sub": 0}), torch.ones(3)),
            lambda: same(sk.split(chain(), {"add": 0, "mul": 1, "sub": 0}, on_cycle="refine"), torch.ones(3)),
            lambda: same(sk.split(chain(), {"add": 0, "mul": 1, "sub": 0}, on_cycle="merge"), torch.ones(3)),
        ),
    ),
]


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()
