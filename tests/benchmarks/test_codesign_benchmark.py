"""`Pipeline` is never slower than cutting first and choosing recompute afterwards."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from campaigns import these_first
from jointmodels import captured

import splitkit as sk
from splitkit.costs import Links, roofline
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.testing import models


@pytest.fixture(scope="module")
def codesign():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("codesign")


CASES = [(name, schedule) for name in ("gpt2", "llama") for schedule in ("1f1b", "zbv", "interleaved-1f1b")]


def in_four_layers(name):
    """A layer for each stage, as the rivals need."""
    made = models.build(name, layers=4)
    return sk.capture_joint(made.model, *made.args, **made.kwargs)


@pytest.mark.parametrize(("name", "schedule"), these_first(CASES[:1], CASES[1:]))
def test_it_is_never_slower(codesign, name, schedule):
    joint = captured(name).joint if (name, schedule) == CASES[0] else in_four_layers(name)
    costs, links = roofline(joint.graph_module, "h100"), Links.preset("nvlink4")
    kind = schedule_named(schedule)
    order = pipeline_order(schedule, 2 if kind.is_single else 4, 4)
    problems = StageProblems(JointPositions(joint.flow), costs, "adam", kind.divided)
    frontiers = StageFrontiers(problems)
    whole, _ = CutSearch(frontiers, order, links, [None] * 2).run()
    compared = 0
    for share in (1.2, 0.95, 0.85):
        memory = int(share * max(whole.run.peaks))
        search = CutSearch(frontiers, order, links, [memory] * 2)
        best, _ = search.run()
        rivals = codesign.Rivals(frontiers, order, links)
        cuts = [int(search.cuts[e]) for e in next(search._balanced())]
        each = search.scoring.of(cuts)
        ways = [rivals.block(memory), rivals.once(cuts, memory)]
        others = [*(way and way.run.seconds for way in ways), each and each.seconds]
        for other in others:
            compared += other is not None
            assert other is None or best.seconds <= other * (1 + 1e-9)
        assert best is None or max(best.run.peaks) <= memory
    assert compared
