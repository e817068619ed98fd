"""Placements whose true peaks fit: what the time is spent on, and what a refusal names."""

from __future__ import annotations

import numpy as np
import pytest
from policygraphs import graph

import splitkit as sk
from splitkit.errors import NoPlanError
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.search.stages.memory_fit import MemoryFit
from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.packing import sets_fit
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.solution import Solution

LIMIT, UNITS = 100, 4
PROBLEM = Problem.of(np.ones((1, UNITS)), [], [], [Slot(capacity=LIMIT)] * 2, nbytes=np.full(UNITS, 25))


def fitting(monkeypatch, peaks, *, seconds, each):
    """A fit whose solver finds plans with these peaks, one after the other, in so many seconds of a clock."""
    gm, now = graph(*["sin"] * UNITS), [0.0]
    monkeypatch.setattr("time.thread_time", lambda: now[0])
    nodes, clock, truly_held = [*sk.analyze(gm).nodes], Clock(seconds), dict[int, list[int]]()
    left = iter(peaks)

    def solve(problem):
        assert clock.left > 0, "no time is left"
        device = np.array([0, 0, 1, 1])
        plan = sk.Plan.of(dict(zip(nodes, device.tolist(), strict=True)))
        truly_held[id(plan)] = kept.append(plan) or next(left)
        now[0] += each
        return Solution(device, (), 2.0, 0.0, "test", np.full(2, 2.0), 0.0), plan

    kept: list[sk.Plan] = []
    return MemoryFit(
        policy=sk.policies.Devices(["h100", "h100"]),
        units=nodes,
        solve=solve,
        held_by=lambda plan: [ByteBreakdown(weights=peak) for peak in truly_held[id(plan)]],
        held=lambda found: np.full(2, 50),
        memory_of=range(2),
        limits=(LIMIT, LIMIT),
        fit=sets_fit,
        clock=clock,
    )


def test_half_of_the_time_is_kept_for_the_placements_with_the_least_memory(monkeypatch):
    fit = fitting(monkeypatch, [[130, 90], [90, 120], [95, 110], [99, 98]], seconds=8, each=1.5)
    found, plan = fit.best(PROBLEM)
    assert [one.total for one in fit.held_by(plan)] == [99, 98] and found.bound == 0.0
    assert fit.clock.timed_out  # a faster machine would have gone on


def test_a_refusal_names_the_least_memory_of_all_plans_that_were_seen(monkeypatch):
    fit = fitting(monkeypatch, [[150, 90], [90, 104], [110, 60], [120, 60]], seconds=8, each=1.5)
    with pytest.raises(NoPlanError, match=r"SK303: Devices: .* holds 104 .*\n *Give 104 bytes .* to each of 2 devices"):
        fit.best(PROBLEM)


def test_a_plan_lacks_what_its_fullest_memory_lacks(monkeypatch):
    """Of two plans the one with the lower peak is named, though it exceeds more memories."""
    fit = fitting(monkeypatch, [[133, 130], [80, 180]], seconds=10, each=1)
    plans = [fit.solve(PROBLEM)[1] for _ in range(2)]
    assert [*map(fit.lacks, plans)] == [33, 80]
