"""Joint graphs of example models, captured once for all tests of a process that leave them as they are."""

from __future__ import annotations

from functools import cache

import torch

import splitkit as sk
from splitkit.frontends.joint.joint_capture import Joint
from splitkit.testing import models


@cache
def joint_graph(name: str, **sizes: int) -> Joint:
    """The training step of a built-in example; a capture takes 2 to 4 s of CPU. Nobody may change it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        example = models.build(name, **sizes)
        joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
    AS_CAPTURED.append((joint, picture(joint)))
    return joint


AS_CAPTURED: list[tuple[Joint, tuple[object, ...]]] = []
"""The graphs that were captured, and what they were then."""


def picture(joint: Joint) -> tuple[object, ...]:
    """The graph as text, the keys of each node's meta, and how often each parameter and buffer was written."""
    model, graph = joint.model, joint.graph_module.graph
    written = [(name, t._version) for held in (model.named_parameters, model.named_buffers) for name, t in held()]
    return str(graph), [sorted(node.meta) for node in graph.nodes], written, [m.training for m in model.modules()]


def changed() -> list[str]:
    """Graphs that are no longer what was captured."""
    return [str(joint) for joint, before in AS_CAPTURED if picture(joint) != before]
