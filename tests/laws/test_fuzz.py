"""Random plans on random graphs: legal ones give the same, illegal ones are refused, and planted bugs are found."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from campaigns import every_third, these_first
from fuzzing import FuzzReport, fuzz, try_plan, usable_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memorygraphs import fuzz_memory
from randomgraphs import random_graph

from splitkit.errors import CheckError

SEEN = FuzzReport()


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hypothesis_finds_no_plan_that_runs_wrongly(data):
    def choose(n):
        return data.draw(st.integers(0, n - 1))

    gm = random_graph(choose, length=choose(14), seed=0)
    inputs = usable_inputs(gm)
    if inputs is not None:
        for _ in range(2):
            try_plan(gm, inputs, choose, SEEN)


@pytest.mark.parametrize(("plans", "seed"), [(45, 0), pytest.param(5000, 150, marks=pytest.mark.campaign)])
def test_a_loop_finds_no_plan_that_runs_wrongly(capsys, plans, seed):
    report = fuzz(plans, seed=seed)
    with capsys.disabled():
        print(f"\nhypothesis: {SEEN}\nloop: {report}")
    assert report.plans >= plans
    assert report.legal > report.refused.total() > 0, "the plans are too tame or too wild to show anything"
    assert set(report.refused) <= {"SK202", "SK203", "SK217", "SK219"}


@pytest.mark.parametrize("kind", ["alias", "autocast", "wrapper"])
@pytest.mark.parametrize("plans", [40, pytest.param(1000, marks=pytest.mark.campaign)])
def test_a_loop_finds_no_plan_that_reads_a_weight_at_the_wrong_time(kind, plans):
    report = fuzz_memory(kind, plans)
    assert report.legal > report.refused.total() > 0, report


@pytest.mark.parametrize(
    ("kind", "user", "fact", "seed"),
    [
        ("alias", "splitkit.graph.shared_memory", "shared_keys", 6),
        ("wrapper", "splitkit.graph.shared_memory", "shared_keys", 0),
        ("autocast", "splitkit.engine.complete", "kept_casts", 0),
    ],
)
def test_a_loop_finds_plans_that_read_a_weight_at_the_wrong_time_without_a_fact(kind, user, fact, seed, monkeypatch):
    monkeypatch.setattr(f"{user}.{fact}", lambda *given: ())
    with pytest.raises(CheckError, match="SK701"):
        fuzz_memory(kind, 1000, seed)


@dataclass(frozen=True)
class Bug:
    """A mutation of one function of the engine, and a seed near which the fuzzer finds it soon."""

    name: str
    module: str
    function: str
    right: str
    wrong: str
    seed: int = 0

    def plant(self, monkeypatch):
        module = import_module(self.module)
        *owner, name = self.function.split(".")
        holder = getattr(module, owner[0]) if owner else module
        source = textwrap.dedent(inspect.getsource(getattr(holder, name)))
        assert self.right in source, f"{self.function} no longer says {self.right!r}: mend this test"
        scope = {}
        exec(source.replace(self.right, self.wrong), module.__dict__, scope)
        original = getattr(holder, name)
        monkeypatch.setattr(holder, name, scope[name])
        for user in [m for n, m in sys.modules.items() if n.startswith("splitkit.")]:
            if user.__dict__.get(name) is original:  # imported by name
                monkeypatch.setattr(user, name, scope[name])


ORDER, EMIT = "splitkit.plans.part_order", "splitkit.engine.codegen.emit"
EDGES, MEMORY = "splitkit.graph.shared_memory", "splitkit.graph.shared_memory"
SCOPE, SCOPED = "splitkit.graph.scope", "splitkit.engine.codegen.emit"
BUGS = [
    Bug(
        "a read does not wait for the write before it",
        EDGES, "order_edges", "if c in last_write:", "if c in last_write and c in writes:",
    ),
    Bug(
        "a write does not wait for the reads before it",
        EDGES, "order_edges", "before |= readers.pop(c, {})", "pass",
    ),
    Bug("random ops do not keep their order", MEMORY, "_written", "if effect.random:", "if False:", 13),
    Bug("a view is not its base", MEMORY, "_alias_classes", "for other in effect.aliases:", "for other in ():"),
    Bug("tied names are two storages", MEMORY, "_alias_classes", "storage_key(held)", "object()", 10),
    Bug(
        "a storage cannot be compared with other kinds of memory",
        "splitkit.graph.storages", "storage_key", '(_STORAGE, StorageWeakRef(storage))', "StorageWeakRef(storage)", 112,
    ),
    Bug(
        "an effect waits for the home alone",
        ORDER, "_needs", "for other in places[earlier]:", "for other in places[earlier][:1]:", 12,
    ),
    Bug("opaque code reaches nothing", MEMORY, "Memory.use", "if self.reached or not effect.known:", "if False:", 59),
    Bug("opaque code only reads", MEMORY, "Memory._reach", "writes[REACHED] = None", "pass", 59),
    Bug("effects are not edges", ORDER, "_needs", "in after[node]:", "in ():"),
    Bug(
        "what may run once is copied",
        "splitkit.engine.complete", "check_plan", "if len(keys) > 1:", "if len(keys) > 9:", 15,
    ),
    Bug("parts run in the parent's region", EMIT, "_Parent._call", "self._scoped.move_to(NEUTRAL)", "pass"),
    Bug("a part leaves its region open", EMIT, "_write_scoped", "scoped.move_to(NEUTRAL)", "pass", 8),
    Bug(
        "settings are not set back",
        SCOPED, "ScopedGraph._write", "self._settings[name] != value:", "self._settings[name] != value is not CALLERS:",
        9,
    ),
    Bug(
        "the caller's setting is asked for too late",
        SCOPED, "ScopedGraph._asked", "with self.graph.inserting_before(self._first):", "if True:", 9,
    ),
    Bug(
        "what leaving inference mode restores is forgotten",
        SCOPED, "ScopedGraph._close", "{name: before[name] for name in kind.sets(enter)}", "{}", 172,
    ),
    Bug(
        "hooks are pushed before they are allowed",
        SCOPED, "ScopedGraph.move_to",
        "self._write(want, {name for enter in opening for name in region_kind(enter).sets(enter)})", "pass", 690,
    ),
    Bug("regions close in the order in which they opened", SCOPED, "ScopedGraph._close", ".pop()", ".pop(0)", 7),
    Bug(
        "an exit closes the innermost region",
        SCOPE, "_Reader._exit", "self.saved.pop(enter)", "self.saved[self.now.regions[-1]]", 110,
    ),
    Bug(
        "an exit restores no region",
        SCOPE, "_Reader._exit", "[*others, *restored]", "others", 222,
    ),
    Bug(
        "an exit without a handle closes the outermost",
        SCOPE, "_Reader._closed", "reversed(self.now.regions)", "self.now.regions", 108,
    ),
]  # fmt: skip


SLOW_TO_FIND = ("an exit closes the innermost region", "an exit restores no region")
SOON = [bug for bug in BUGS if bug.name not in SLOW_TO_FIND]
LATE = [bug for bug in BUGS if bug.name in SLOW_TO_FIND]


@pytest.mark.parametrize("bug", [*every_third(SOON, 0), *these_first([], LATE)], ids=lambda bug: bug.name)
def test_the_fuzzer_finds_a_planted_bug(bug, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises((CheckError, RuntimeError, LookupError, AttributeError)) as caught:
        fuzz(2000, seed=bug.seed)
    assert "graph seed" in "".join(caught.value.__notes__)


def test_a_graph_that_differs_from_itself_is_left_out():
    assert usable_inputs(random_graph(lambda n: 0, 3, 0)) is not None

    class Counting(torch.nn.Module):
        calls = 0

        def forward(self, x, meter, array):
            Counting.calls += 1  # a trace keeps the number, an opaque module does not
            return x * Counting.calls

    root = torch.nn.Module()
    root.leaf = Counting()
    gm = random_graph(lambda n: 0, 3, 0)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in names]
    graph.output(graph.call_module("leaf", (inputs[0], None, None)))
    assert usable_inputs(torch.fx.GraphModule(root, graph)) is None
