"""Where eager autograd has each node of a joint graph, on graphs written by hand."""

from __future__ import annotations

import torch
from jointgraphs import Hand
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import splitkit as sk
from splitkit.training.flow import BACKWARD, FORWARD, SavedValue, save_all_plan, unrepeatable, with_inputs


def placed(flow):
    return {node.name: keys[0] for node, keys in save_all_plan(flow).places.items()}


def test_backward_is_what_depends_on_a_gradient_or_was_traced_there():
    g = Hand()
    g.inputs(x=1)
    g.gradients(dy=1)
    g.op("a", 1, "x")
    g.op("y", 1, "a")
    g.op("mask", 1, "a", tag="is_backward")  # what backward alone computes, of forward's values
    g.op("early", 1, "a", tag="is_backward")
    g.op("z", 1, "early")  # forward needs it, so it is forward's whatever its tag
    g.back("dx", 1, "dy", "mask")
    found = placed(g.flow("y z", "dx"))
    assert found == {
        "a": FORWARD, "y": FORWARD, "mask": BACKWARD, "early": FORWARD, "z": FORWARD, "dx": BACKWARD
    }  # fmt: skip


def test_members_of_a_tuple_are_where_the_tuple_is():
    g = Hand()
    g.inputs(x=1)
    g.gradients(dy=1)
    g.pair("made", 1, 1, "x", tag=None)
    g.op("y", 1, "made_0")
    g.back("dx", 1, "dy", "made_1")
    flow = g.flow("y", "dx")
    assert placed(flow) == {"made": FORWARD, "y": FORWARD, "dx": BACKWARD}


def test_a_size_is_forwards_although_backward_alone_reads_it():
    """It is saved more cheaply than the tensor whose size it is."""
    g = Hand()
    g.inputs(x=1)
    g.gradients(dy=1)
    g.op("size", 1, "x", tag="is_backward")
    g["size"].meta["val"] = ShapeEnv().create_unbacked_symint()
    g.op("y", 1, "x")
    g.back("dx", 1, "dy", "size")
    flow = g.flow("y", "dx")
    assert placed(flow) == {"size": FORWARD, "y": FORWARD, "dx": BACKWARD}
    assert unrepeatable(flow) == {g["size"]: "it is a size"}


def test_forward_computes_what_it_needs_for_nodes_that_were_left_to_backward():
    g = Hand()
    g.inputs(x=1)
    g.gradients(dy=1)
    g.op("a", 1, "x", tag="is_backward")
    g.op("b", 1, "a", tag="is_backward")
    g.op("y", 1, "x")
    g.back("dx", 1, "dy", "b")
    flow = g.flow("y", "dx")
    plan = with_inputs(flow, save_all_plan(flow), [g["b"]])
    assert plan[g["a"]] == (FORWARD, BACKWARD) and plan[g["b"]] == (BACKWARD,) and plan[g["y"]] == (FORWARD,)


def test_a_saved_value_by_name():
    assert str(SavedValue("softmax", "h.0.attn", "softmax", 2048)) == "h.0.attn: softmax (2.00 KiB)"
    assert SavedValue("add", "", "add", 4).label == "the model: add"


def test_inputs_that_a_step_updates_without_a_write_are_known():
    """A batch norm in training returns new statistics; torch's joint graph writes nothing."""
    joint = sk.capture_joint(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), torch.randn(4, 2), loss=torch.sum)
    updated = [node.name for node in joint.flow.updated]
    assert sorted(updated) == sorted(joint.signature.updates.values()) and len(updated) == 3
