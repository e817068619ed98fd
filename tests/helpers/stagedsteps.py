"""Small training steps in stages, of which pictures are drawn."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import splitkit as sk
from splitkit.policies import Pipeline, SplitBackward


def net():
    """Four equal blocks with a norm, a linear layer and an activation."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4))
    return nn.Sequential(*blocks, nn.Linear(16, 4))


@cache
def captured():
    """The joint graph and its prices; nobody may change them."""
    joint = sk.capture_joint(net(), torch.randn(8, 16, requires_grad=True), loss=torch.sum)
    return joint, sk.costs.roofline(joint.graph_module, "h100")


@cache
def divided():
    """Four stages for ZBV: backward in two graphs."""
    joint, costs = captured()
    return joint.split(SplitBackward(policy=Pipeline(4, "zbv", microbatches=4, links="nvlink4")), costs)


@cache
def recomputed():
    """Two stages for 1F1B in little memory."""
    joint, costs = captured()
    try:
        Pipeline(2, microbatches=4, memory=1).assign(joint.flow, costs)
    except sk.errors.NoPlanError as error:
        least = int(str(error.remedy).split("memory=")[1].split(")")[0])
    return joint.split(Pipeline(2, microbatches=4, memory=least), costs)
