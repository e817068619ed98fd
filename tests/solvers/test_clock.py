"""One clock for all searches of a plan: what shares it ends with it, and a plan is there all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from capturedmodels import captured_example
from keptfacts import kept_facts  # noqa: F401

import splitkit as sk
from splitkit.policies import Devices, Stages
from splitkit.solvers import clock as clocks
from splitkit.solvers.clock import Clock, endless_clock

CUT = "cut short by time"


@pytest.fixture(scope="module")
def gm() -> Any:
    return captured_example("gpt2", layers=1, width=32, heads=2, vocab=200).graph


class Ticks:
    """Time that passes only when somebody looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
        self.looks = 0
        self._tick = tick
        monkeypatch.setattr(clocks.time, "thread_time", self._look)

    def _look(self) -> float:
        self.looks += 1
        return self.looks * self._tick


def test_a_part_ends_with_the_whole_and_not_after_its_own_time(monkeypatch):
    Ticks(monkeypatch, 1.0)
    whole = Clock(6.0)
    long, short = Clock(100.0, whole), Clock(1.5, whole)
    assert not long.is_over() and short.is_over()
    assert next(n for n in itertools.count() if long.is_over()) < 6 and long.timed_out and whole.is_over()
    assert not endless_clock().is_over()


@pytest.mark.parametrize(
    "policy",
    [
        Stages(3, schedule="1f1b", links="nvlink4", seconds=1),
        Stages(3, links="nvlink4", memory="1GiB", seconds=1),
        Stages(3, schedule="1f1b", memory="least", seconds=1),
        Devices(["h100"] * 3, links="nvlink4", seconds=1),
        Devices(["h100"] * 3, links="nvlink4", pieces=None, seconds=1),
        Devices(["h100"] * 3, links="nvlink4", objective="latency", seconds=1),
    ],
    ids=str,
)
def test_all_searches_of_a_plan_stop_soon_after_one_clock(gm, policy, monkeypatch):
    costs = sk.costs.flops(gm)
    short = Ticks(monkeypatch, 0.25)  # the end comes after a few looks, wherever they are
    plan = sk.plan(gm, policy, costs)
    assert set(plan.places) == set(sk.analyze(gm).nodes)
    assert short.looks <= 100
    assert CUT in plan.note


def test_a_search_that_counts_ended_says_nothing_of_time(gm):
    assert CUT not in sk.plan(gm, Stages(3, schedule="1f1b", links="nvlink4"), sk.costs.flops(gm)).note
