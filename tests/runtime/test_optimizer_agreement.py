"""Optimizers of ranks that differ by mistake are refused, and those that differ for a reason are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from splitkit.errors import PipelineError
from splitkit.runtime.ranks import stage_weights
from splitkit.runtime.ranks.stage_weights import ComparedOptimizer, require_same_optimizers

NAMES = (("embedding", "a", "tied"), ("b", "tied"))
"""The parameters of two ranks."""


def group(parameters: dict[str, nn.Parameter], *names: str, **options: Any) -> dict[str, Any]:
    return {"params": [p for n, p in parameters.items() if n in names], **options}


def by_rank(*made: Callable[[dict[str, nn.Parameter]], Optimizer]) -> Callable[[dict[str, nn.Parameter]], Optimizer]:
    return lambda named: made["b" in named](named)


def changed(optimizer: Optimizer, **options: Any) -> Optimizer:
    """An optimizer with options that are changed after it was compared first."""
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(options))
    return optimizer


def scheduled(optimizer: Optimizer, *factors: float) -> Optimizer:
    LambdaLR(optimizer, [lambda step, factor=factor: factor for factor in factors])
    return optimizer


def warmed(optimizer: Optimizer) -> Optimizer:
    LinearLR(optimizer, 0.5)
    return optimizer


def steps(named: dict[str, nn.Parameter], lr: float = 0.1) -> AdamW:
    return AdamW(named.values(), lr=lr)


SAME = {
    "one group": steps,
    "no parameter of some groups": lambda named: AdamW(
        [group(named, "embedding", lr=1e-4), group(named, "a", "b", weight_decay=0.1), group(named, "tied")], lr=0.1
    ),
    "a group for each stage": by_rank(
        lambda named: AdamW([group(named, "embedding", "a", lr=0.2), group(named, "tied")], lr=0.1),
        lambda named: AdamW([group(named, "b", lr=0.3), group(named, "tied")], lr=0.1),
    ),
    "rates by layer": by_rank(
        lambda named: SGD([group(named, "embedding", lr=1e-3), group(named, "a", lr=1e-2), group(named, "tied", lr=1)]),
        lambda named: SGD([group(named, "b", lr=1e-1), group(named, "tied", lr=1)]),
    ),
    "rates by name": by_rank(
        lambda named: SGD(
            [group(named, "embedding", "a", lr=0.1, name="first"), group(named, "tied", name="tied")], 0.5
        ),
        lambda named: SGD([group(named, "b", lr=0.2, name="last"), group(named, "tied", name="tied")], 0.5),
    ),
    "a schedule for each group": by_rank(
        lambda named: scheduled(SGD([group(named, "embedding"), group(named, "tied", "a")], 0.1), 0.5, 1.0),
        lambda named: SGD(named.values(), 0.1),
    ),
    "a rate that a tensor holds": by_rank(
        lambda named: AdamW(named.values(), lr=torch.tensor(0.5)), lambda named: AdamW(named.values(), lr=0.5)
    ),
    "warm-up": lambda named: warmed(steps(named)),
}
DIFFERENT = {
    "the rate of one group": (
        by_rank(steps, lambda named: steps(named, 0.2)),
        "lr is 0.2 on rank 1, and 0.1 on rank 0",
    ),
    "warm-up on one rank": (
        by_rank(lambda named: warmed(steps(named)), steps),
        "lr is 0.1 on rank 1, and 0.05 on rank 0",
    ),
    "the rate later": (
        by_rank(steps, lambda named: changed(steps(named), lr=0.3)),
        "lr is 0.3 on rank 1, and 0.1 on rank 0",
    ),
    "another default": (
        by_rank(steps, lambda named: AdamW(named.values(), lr=0.1, betas=(0.8, 0.999))),
        "betas is (0.8, 0.999) on rank 1, and (0.9, 0.999) on rank 0",
    ),
    "a tied parameter": (
        by_rank(
            lambda named: SGD([group(named, "embedding", "a"), group(named, "tied", lr=0.2)], 0.1),
            lambda named: SGD([group(named, "b"), group(named, "tied", lr=0.3)], 0.1),
        ),
        "lr for tied is 0.3 on rank 1, and 0.2 on rank 0",
    ),
    "groups of one name": (
        by_rank(
            lambda named: SGD(
                [group(named, "a", "embedding", name="body", lr=0.2), group(named, "tied", name="t")], 0.1
            ),
            lambda named: SGD([group(named, "b", name="body", lr=0.3), group(named, "tied", name="t")], 0.1),
        ),
        "lr for the group 'body' is 0.3 on rank 1, and 0.2 on rank 0",
    ),
}


def compare(
    make: Callable[[dict[str, nn.Parameter]], Optimizer], monkeypatch: Any, steps_of: tuple[int, int] = (1, 1)
) -> None:
    held = []
    for names, count in zip(NAMES, steps_of, strict=True):
        named = {name: nn.Parameter(torch.ones(2)) for name in names}
        compared = ComparedOptimizer(make(named))
        for _ in range(count):
            compared.optimizer.step()
        held.append(compared.facts(named))
    monkeypatch.setattr(stage_weights, "from_every", lambda own, group: held)
    require_same_optimizers(held[0], None)


@pytest.mark.parametrize("case", SAME)
def test_what_differs_for_a_reason_is_not_refused(case, monkeypatch):
    compare(SAME[case], monkeypatch)


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_by_mistake_is_refused_by_option_and_rank(case, monkeypatch):
    make, says = DIFFERENT[case]
    with pytest.raises(PipelineError) as error:
        compare(make, monkeypatch)
    assert error.value.code == "SK804" and error.value.reason == f"the optimizer's {says}"


def test_a_step_that_was_forgotten_is_refused(monkeypatch):
    with pytest.raises(PipelineError, match="SK804: the optimizer has made 2 steps on rank 1, and 3 on rank 0"):
        compare(steps, monkeypatch, (3, 2))


def test_a_name_for_the_group_is_the_remedy(monkeypatch):
    make, _ = DIFFERENT["the rate of one group"]
    with pytest.raises(PipelineError, match='a name of its own: {"params": .*"name": "last stage"}'):
        compare(make, monkeypatch)
    named = by_rank(
        lambda held: SGD([group(held, "embedding", "a"), group(held, "tied", name="tied")], 0.1),
        lambda held: SGD([group(held, "b", lr=0.01, name="last stage"), group(held, "tied", name="tied")], 0.1),
    )
    compare(named, monkeypatch)
