"""Random plans on random graphs: legal ones give the same, illegal ones are refused, and planted bugs are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import splitkit.cut
import splitkit.order
import splitkit.split
from splitkit.dataflow import analyze
from splitkit.errors import CheckError
from splitkit.plan import HOST, Plan
from splitkit.testing.fuzz import FuzzReport, fuzz, try_plan, usable_inputs
from splitkit.testing.randoms import random_graph

SEEN = FuzzReport()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hypothesis_finds_no_plan_that_runs_wrongly(data):
    def choose(n):
        return data.draw(st.integers(0, n - 1))

    gm = random_graph(choose, length=choose(14), seed=0)
    inputs = usable_inputs(gm)
    if inputs is not None:
        for _ in range(2):
            try_plan(gm, inputs, choose, SEEN)


def test_a_loop_finds_no_plan_that_runs_wrongly(capsys):
    report = fuzz(500, seed=0)
    with capsys.disabled():
        print(f"\nhypothesis: {SEEN}\nloop: {report}")
    assert report.plans >= 500
    assert report.legal > report.refused.total() > 0, "the plans are too tame or too wild to show anything"
    assert set(report.refused) <= {"SK202", "SK203"}


def without(kind):
    """analyze, but blind to one kind of order edge."""

    def blind(gm):
        flow = analyze(gm)

        def keeps(node, before):
            return kind != _kind(flow, node, before)

        return replace(flow, after={n: tuple(b for b in bs if keeps(n, b)) for n, bs in flow.after.items()})

    return blind


def _kind(flow, node, before):
    def writes(n):
        return bool(flow.effects[n].writes or flow.effects[n].writes_state)

    if flow.effects[node].random and flow.effects[before].random:
        return "random"
    return {(True, True): "write-write", (True, False): "read-write"}.get((writes(node), writes(before)), "write-read")


def forgetful(gm):
    """analyze, but every node may be copied."""
    return replace(analyze(gm), once={})


class HomePlan(Plan):
    """A plan that waits only for the home of what has copies."""


PLANTED = {
    "forget read-after-write": lambda patch: patch.setattr(splitkit.split, "analyze", without("write-read")),
    "forget write-after-read": lambda patch: patch.setattr(splitkit.split, "analyze", without("read-write")),
    "forget write-after-write": lambda patch: patch.setattr(splitkit.split, "analyze", without("write-write")),
    "forget the order of random ops": lambda patch: patch.setattr(splitkit.split, "analyze", without("random")),
    "copy what may run once": lambda patch: patch.setattr(splitkit.split, "analyze", forgetful),
    "lose the scope": lambda patch: patch.setattr(
        splitkit.split, "analyze", lambda gm: replace(f := analyze(gm), scope=dict.fromkeys(f.scope, f.final))
    ),
    "read the home though there is a copy": lambda patch: patch.setattr(
        Plan, "source", lambda plan, node, reader: plan.places.get(node, (HOST,))[-1]
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_fuzzer_finds_a_planted_bug(bug, monkeypatch):
    PLANTED[bug](monkeypatch)
    with pytest.raises((CheckError, RuntimeError, KeyError)) as caught:
        fuzz(3000, seed=0)
    assert "graph seed" in "".join(caught.value.__notes__)
