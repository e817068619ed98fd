"""Stages share a frontier only if what they take while they compute is the same."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
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
    problems = StageProblems(JointPositions(layers()), Prices({}), "adam", False)
    frontiers = StageFrontiers(problems)
    taken = {}
    for start in (1, 2, 3):
        problem = frontiers.problem(start, start + 1)
        choice = problem.savings.choose(np.zeros(len(problem.ops), np.bool_))
        taken[start] = problems.temporary(problem, choice)
    assert taken[1] == taken[3] < taken[2]
    assert frontiers.of(1, 2) is frontiers.of(3, 4) is not frontiers.of(2, 3)


def test_what_passes_through_a_stage_is_held_and_makes_another_stage():
    frontiers = StageFrontiers(StageProblems(JointPositions(layers(skip=True)), Prices({}), "adam", False))
    one, three = frontiers.of(2, 3), frontiers.of(4, 5)  # layers 1 and 3
    assert [p.saved - 1024 for p in one.corners()] == [p.saved for p in three.corners()] and one is not three


def chain(ops, read):
    """Layers that send one value each; backward reads those of the numbers given."""
    h = Hand().inputs(x=1, w=1)
    for i in range(ops):
        h.op(f"f{i}", 1 + i % 3, f"f{i - 1}" if i else "x", "w")
    h.gradients(t=1)
    for i in reversed(range(ops)):
        h.back(f"g{i}", 1, f"g{i + 1}" if i + 1 < ops else "t", *([f"f{i}"] if i in read else []))
        h[f"f{i}"].meta["seq_nr"] = h[f"g{i}"].meta["seq_nr"] = i
    h.back("k", 1, "g0")["k"].meta["seq_nr"] = 0
    return h.flow(f"f{ops - 1}", "k")


@pytest.mark.parametrize(("start", "end", "small"), [(1, 10, True), (1, 7, True), (0, 11, False)])
def test_a_stage_with_few_values_has_all_choices_that_no_other_one_beats(start, end, small):
    seconds = {f"f{i}": i + 1.0 for i in range(11)}
    frontier = StageFrontiers(
        StageProblems(JointPositions(chain(11, {2, 5, 6, 8})), Prices(seconds), "adam", False)
    ).of(start, end)
    savings, held = frontier.problem.savings, frontier.problem.held
    choices = [savings.choose(np.array(runs)) for runs in product((False, True), repeat=len(savings.ops))]
    every = {(choice.seconds, choice.nbytes) for choice in choices}
    best = {a for a in every if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in every)}
    ladder = [(point.seconds, point.saved - held) for point in frontier.ladder]
    assert frontier.small is small and ladder == sorted(ladder) and len(best) > 5
    assert best <= {*ladder} <= every if small else {*ladder} < best
    numbers = [np.array(point.numbers) for point in frontier.ladder]  # with what is alive besides
    assert not any((a <= b).all() for a, b in permutations(numbers, 2))


def test_a_stage_that_computes_nothing_again_has_one_choice():
    seconds = {f"f{i}": i + 1.0 for i in range(11)}
    flow = chain(11, {2, 5, 6, 8})
    problems = StageProblems(JointPositions(flow), Prices(seconds), "adam", False, recompute=False)
    frontier = StageFrontiers(problems).of(0, 11)
    assert frontier.small and [point.seconds for point in frontier.every] == [0.0]
