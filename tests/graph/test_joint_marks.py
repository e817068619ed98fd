"""What AOTAutograd notes on the nodes of a joint graph."""

from __future__ import annotations

import pytest
import torch
from smallnets import loss_or_sum
from torch import fx, nn

from splitkit.frontends.joint_capture import capture_joint
from splitkit.graph.joint_marks import backward_nodes, is_joint, is_marked_backward, mark_of


@pytest.mark.parametrize(
    ("mark", "late"),
    [("is_forward", False), ("must_be_in_forward", False), ("is_backward", True), ("must_be_in_backward", True)],
)
def test_the_mark_of_a_node(mark, late):
    graph = fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    assert mark_of(node) is None and not is_marked_backward(node) and not is_joint(graph)
    node.meta["partitioner_tag"] = mark
    assert mark_of(node) == mark and is_marked_backward(node) == is_joint(graph) == late
    assert list(backward_nodes(graph)) == [node] * late


def test_a_joint_graph_is_known_by_its_tangents():
    graph = fx.Graph()
    assert graph.placeholder("tangents") and not is_joint(graph)
    assert graph.placeholder("tangents_1") and is_joint(graph)


def test_aot_autograd_marks_what_it_traced():
    joint = capture_joint(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), loss=loss_or_sum)
    marks = {mark_of(node) for node in joint.graph_module.graph.nodes if node.op == "call_function"}
    assert is_joint(joint.graph_module.graph) and {"is_forward", "is_backward"} <= marks
