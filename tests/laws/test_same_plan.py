"""The same plan everywhere, whatever the process did before; and no graph is kept once its plans are made."""

from __future__ import annotations

import gc
import json
import linecache
import os
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path

import pytest
import torch
from jointmodels import captured, step_of
from lawtables import JOINT_LAWS, LAWS, LIKE_ANOTHER, STAGED_LAWS, asked, sized, written
from smallnets import loss_or_sum
from torch import fx, nn

import splitkit as sk
from splitkit.costs import roofline, unit
from splitkit.errors import NoPlanError
from splitkit.policies import Budget, MinCut, Precompute, RoundRobin, SaveAll, Stages

FORWARD_GRAPH, JOINT_GRAPHS = "tied language model, exported", ("branches",)
CUT = "cut short by time: another machine may find another plan"
BUDGETS = ((0.5, "saved"), ("least", "peak"), (0.95, "peak"))


def questions():
    """What is planned: name -> a function without arguments that gives the plan as a text."""
    graph = sized(FORWARD_GRAPH)
    asks = {name: (policy, sk.analyze(graph), unit(graph)) for name, policy in LAWS.items() if name not in LIKE_ANOTHER}
    for name in JOINT_GRAPHS:
        joint = captured(name).joint
        costs = roofline(joint.graph_module, "a100")
        laws = JOINT_LAWS | STAGED_LAWS
        asks |= {f"{policy} of {name}": (laws[policy], joint.flow, costs) for policy in laws}
    joint, costs = step_of(1)
    asks |= {f"Budget({share!r}, {of!r})": (Budget(share, of=of), joint.flow, costs) for share, of in BUDGETS}
    found = {name: lambda ask=ask: _text(asked(*ask)) for name, ask in asks.items()}
    for of in ("saved", "peak"):
        found[f"Frontier of {of}"] = lambda of=of: json.dumps(sk.Frontier(joint, costs, of=of, budgets=2).to_dict())
    return found


def _text(plan):
    return None if plan is None else written(plan)


def answers(first=0):
    """The answer to every question, beginning with the one of that number."""
    todo = list(questions().items())
    return {name: ask() for name, ask in (*todo[first:], *todo[:first])}


_FRESH = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
from test_same_plan import answers
print(json.dumps(answers(int(sys.argv[2]))))
"""


def _begun(seed, first):
    """A process of its own that answers every question."""
    command = [sys.executable, "-W", "ignore", "-c", _FRESH, json.dumps(sys.path), str(first)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_plan_depends_on_nothing_but_graph_prices_and_policy():
    """Not on the plans before it, in any order, nor on the process or its seed of hashes. (`Budget` once did.)"""
    other = _begun("7", 29)
    asks = questions()
    for before in ("Random(seed=1)", "Budget(0.95, 'peak')", "Stages(3)"):
        asks[before]()
    here = {name: asks[name]() for name in reversed(asks)}
    assert sum(answer is not None for answer in here.values()) >= len(here) - len(JOINT_GRAPHS)
    output, errors = other.communicate(timeout=600)
    assert other.returncode == 0, errors[-2000:]
    there = json.loads(output.splitlines()[-1])
    assert there.keys() == here.keys()
    differ = [name for name in here if here[name] != there[name]]
    assert [name for name in differ if CUT not in f"{here[name]}{there[name]}"] == []


class Net(nn.Module):
    """The ``number``-th of many small nets, no two alike."""

    def __init__(self, number):
        super().__init__()
        self.number, self.width = number, 4 + number % 7
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(2 + number % 3))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = (torch.relu, torch.tanh, torch.sin)[(self.number + i) % 3](layer(x)) + self.number
        return x.sum()


def _planned_and_dropped(number):
    """Plan a new graph by several policies; yields what must not outlive it."""
    net = Net(number)
    x = torch.randn(3, net.width)
    if number % 45 == 7:
        joint = sk.capture_joint(net, x, loss=loss_or_sum)
        for policy in (SaveAll(), MinCut(), Precompute(), Budget("least")):
            joint.split(policy)
        with pytest.raises(NoPlanError):
            joint.split(Budget(1))
        return joint.graph_module.graph, joint.flow, joint.graph_module
    gm = fx.symbolic_trace(net)
    if number % 15 == 3:
        sk.extend.propagate(gm, x)
        for policy in (Stages(2, links="pcie4"), Stages(3)):
            sk.split(gm, policy)
        sk.simulate_memory(gm)
    split = sk.split(gm, Stages(2))
    split(x)
    sk.plan(gm, RoundRobin(2))
    return gm.graph, split.flow, gm, split.module


SOURCE = "*/codegen/source_code.py"
"""Where the text is made that torch keeps."""


@pytest.mark.parametrize("graphs", [24, pytest.param(300, marks=pytest.mark.campaign)])
def test_memory_does_not_grow_over_graphs_that_are_planned_and_dropped(graphs):
    """Of all graphs none is kept, no object of splitkit is added after the first third, and of the last quarter less
    is kept than two of them take.

    What torch keeps of each graph (its source, for tracebacks) and of each capture (sizes, guards) is not counted.
    """
    alive, counts = [], {}
    for number in range(graphs):
        if number == graphs * 3 // 4:
            tracemalloc.start()
        alive += map(weakref.ref, _planned_and_dropped(number))
        if number in (graphs // 3, graphs - 1):
            counts[number] = _own_objects()
    ours, source = (tracemalloc.Filter(*of) for of in ((True, str(Path(sk.__file__).parent / "*")), (False, SOURCE)))
    kept = tracemalloc.take_snapshot().filter_traces([ours, source])
    tracemalloc.stop()
    assert [ref() for ref in alive if ref() is not None] == []
    assert counts[graphs - 1] <= counts[graphs // 3]
    assert sum(trace.size for trace in kept.statistics("filename")) < 32 * 1024


def _own_objects():
    """How many objects of splitkit's classes, graphs and nodes there are."""
    linecache.clearcache()
    gc.collect()
    own = (fx.Graph, fx.Node, fx.GraphModule)
    return sum(isinstance(o, own) or str(type(o).__module__).startswith("splitkit.") for o in gc.get_objects())
