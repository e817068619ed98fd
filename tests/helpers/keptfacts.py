"""Facts that a test found about a graph, kept for the tests after it that ask for facts about the same graph.

A command or a policy analyses its graph anew; what autograd saves takes most of that time, and most tests of a file
look at one graph. `test_facts_once.py` checks what the package itself keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

import pytest

from splitkit.graph.dataflow import Dataflow

MOST = 12
"""Graphs whose facts are kept."""


class KeptFacts:
    """By graph: what it was when its facts were found, and the facts. A graph that differs since has none."""

    def __init__(self):
        self.known = OrderedDict()

    def of(self, flow):
        now = state(flow)
        before, facts = self.known.pop(flow.root, (None, {}))
        if before != now:
            facts = {}
        self.known[flow.root] = now, facts
        while len(self.known) > MOST:
            self.known.popitem(last=False)
        return facts


def state(flow):
    """All that facts are found from: nodes with their arguments and values, and the tensors and modules of the root."""
    root = flow.root
    nodes = [
        (n, n.name, n.op, n.target, n.args, n.kwargs, {key: Same(value) for key, value in n.meta.items()})
        for n in flow.graph.nodes
    ]
    tensors = [
        (name, Same(t), t._version) for held in (root.named_parameters, root.named_buffers) for name, t in held()
    ]
    return flow.graph, nodes, tensors, [*root.named_modules()]


class Same:
    """An object that equals only itself, and is kept so that no other gets its id."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value is other.value

    __hash__ = None


@pytest.fixture(scope="module", autouse=True)
def kept_facts():
    kept, own = KeptFacts(), Dataflow._facts
    shared = cached_property(kept.of)
    shared.__set_name__(Dataflow, "_facts")
    Dataflow._facts = shared
    yield kept
    Dataflow._facts = own
