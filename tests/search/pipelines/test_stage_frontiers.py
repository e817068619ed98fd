"""Stages share a frontier only if what they take while they compute is the same."""

from __future__ import annotations

import numpy as np
from jointgraphs import Hand
from pipelinegraphs import Prices

from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems

LAYERS = 5


def layers(skip=False):
    """Equal layers; only the backward of layer 2 returns the first value that it makes, and so keeps it to its end.

    With ``skip``, a value goes from the second position over layer 1 to layer 2.
    """
    h = Hand().inputs(**{f"w{i}": 1 for i in range(LAYERS)}, x=1)
    for i in range(LAYERS):
        h.op(f"f{i}", 2, f"f{i - 1}" if i else "x", f"w{i}", *(["skip"] if skip and i == 2 else []))
        if skip and not i:
            h.op("skip", 1, "f0")
    h.gradients(t=2)
    for i in reversed(range(LAYERS)):
        h.back(f"h{i}", 4, f"g{i + 1}" if i + 1 < LAYERS else "t", f"f{i}")
        h.back(f"g{i}", 2, f"h{i}").back(f"k{i}", 4, f"g{i}")
        for name in (f"f{i}", f"h{i}", f"g{i}", f"k{i}"):
            h[name].meta["seq_nr"] = i
    return h.flow(f"f{LAYERS - 1}", " ".join([*(f"k{i}" for i in range(LAYERS)), "h2"]))


def test_a_gradient_that_is_kept_makes_another_stage():
    problems = StageProblems(JointPositions.of(layers()), Prices({}), "adam", False)
    frontiers = StageFrontiers(problems)
    taken = {}
    for start in (1, 2, 3):
        problem = frontiers.problem(start, start + 1)
        choice = problem.savings.choose(np.zeros(len(problem.ops), np.bool_))
        taken[start] = problems.temporary(problem, choice)
    assert taken[1] == taken[3] < taken[2]
    assert frontiers.of(1, 2) is frontiers.of(3, 4) is not frontiers.of(2, 3)


def test_what_passes_through_a_stage_is_held_and_makes_another_stage():
    frontiers = StageFrontiers(StageProblems(JointPositions.of(layers(skip=True)), Prices({}), "adam", False))
    one, three = frontiers.of(2, 3), frontiers.of(4, 5)  # layers 1 and 3
    assert [p.saved - 1024 for p in one.corners()] == [p.saved for p in three.corners()] and one is not three
