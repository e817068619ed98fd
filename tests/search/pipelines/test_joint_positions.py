"""Legal cuts of a joint graph: whatever is cut, values go on in forward and gradients go back."""

from __future__ import annotations

import pytest
from jointgraphs import Hand
from pipelinegraphs import random_joint

from splitkit.search.pipelines.joint_positions import JointPositions


def later(reads_late):
    """Three layers; the gradient of the first one reads the value of the last one, or not."""
    h = Hand().inputs(x=1).op("f0", 1, "x").op("f1", 1, "f0").op("f2", 1, "f1").gradients(t=1)
    h.back("g2", 1, "t", "f1").back("g1", 1, "g2", "f0").back("g0", 1, "g1", *(["f2"] if reads_late else []))
    for name in ("f0", "f1", "f2", "g0", "g1", "g2"):
        h[name].meta["seq_nr"] = int(name[1])
    return h, JointPositions(h.flow("f2", "g0"))


def require_directions(positions):
    flow, forward = positions.flow, set(positions.forward)
    for cut in positions.legal.tolist():
        stage = {node: at >= cut for node, at in positions.place.items()}
        for node in stage:
            for read in flow.inputs(node):
                if read in forward:
                    assert stage[read] <= stage[node], (cut, read, node)
                elif node not in positions.ties and read not in positions.late:
                    assert stage[read] >= stage[node], (cut, read, node)


def test_a_gradient_that_reads_a_later_value_forbids_the_cut_between():
    h, plain = later(reads_late=False)
    assert plain.legal.tolist() == [1, 2] and plain.place[h["g0"]] == 0
    h, positions = later(reads_late=True)
    assert positions.legal.tolist() == [1] and positions.place[h["g0"]] == 1
    require_directions(positions)


@pytest.mark.parametrize("seed", range(20))
def test_values_go_on_and_gradients_go_back_over_each_cut(seed):
    positions = JointPositions(random_joint(seed, ops=7)[0])
    assert len(positions.legal)
    require_directions(positions)
