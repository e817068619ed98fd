"""Graphs for tests of policies, and the parts that a policy makes of them."""

from __future__ import annotations

from torch import fx, nn

import splitkit as sk


def graph(*ops):
    """A chain of unary ops; ``"name"`` is a method."""
    made = fx.Graph()
    value = made.placeholder("x")
    for op in ops:
        value = made.call_method(op, (value,)) if isinstance(op, str) else made.call_function(op, (value,))
    made.output(value)
    return fx.GraphModule(nn.Module(), made)


def labels(gm, policy):
    flow = sk.analyze(gm)
    plan = policy.assign(flow, sk.costs.unit(gm))
    return [plan.home(n) for n in flow.nodes]
