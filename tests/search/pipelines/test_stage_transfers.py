"""Which saved values of a stage can go to the host."""

from __future__ import annotations

import numpy as np
from jointgraphs import Hand
from pipelinegraphs import Prices

from splitkit.costs.links import HostLink
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.offload_cut_search import StageTransfers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.training.choices import Choice


def movable(saved, outputs="out"):
    """The names of what can go if these values are saved."""
    h = Hand().inputs(x=1, w=1).op("f", 4, "x", "w").view("v", "f").op("out", 1, "v").gradients(t=1)
    flow = h.back("g", 1, "t", "f", "v").back("gx", 1, "g").flow(outputs, "gx")
    problems = StageProblems(JointPositions(flow), Prices({}), "adam", False)
    problem = problems.problem(0, len(problems.positions.forward))
    savings = problem.savings
    kept = np.array([value.name in saved for value in savings.values])
    found = StageTransfers(problems, HostLink.of(1024.0)).movable(
        problem, Choice(savings, np.zeros(len(savings.ops), np.bool_), kept)
    )
    return {value.name for value in found.values()}


def test_a_storage_goes_if_one_value_alone_is_saved_of_it_and_nobody_else_holds_it():
    assert movable({"f"}) == {"f"}
    assert movable({"f", "v"}) == set()
    assert movable({"f"}, outputs="out f") == set()
