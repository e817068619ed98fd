"""What the distinct calls of a graph save is, storage by storage, what one run of all of it saves."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from campaigns import these_first
from keptmodels import MODELS
from torch import fx, nn
from zoographs import specimens

import splitkit as sk
from splitkit._gc import paused_collector
from splitkit.memory.autograd.saved_by_call import IsolatedCall, NotIsolableError
from splitkit.memory.autograd.saved_storages import activations, record_by_calls, record_whole_run
from splitkit.testing.models import build

aten = torch.ops.aten


def check(gm):
    with paused_collector():
        found, run = record_by_calls(gm), record_whole_run(gm)
    assert found.nbytes == run.nbytes
    assert list(found.values.items()) == list(run.values.items())
    assert saved_in(found) == saved_in(run)
    assert found.requires == run.requires
    assert not run.estimated
    return found


def saved_in(kept):
    return {node: sorted(storages) for node, storages in kept.saved.items() if storages}


@pytest.mark.parametrize("name", these_first(["gpt2"], sorted({*MODELS} - {"gpt2"})))
def test_models(name):
    example = build(name, **MODELS[name])
    assert saved_in(check(sk.capture(example.model.train(), *example.args, **example.kwargs)))


def test_the_zoo():
    seen = 0
    for specimen in specimens().values():
        gm = specimen.graph
        if all("val" in n.meta for n in gm.graph.nodes if n.op != "output"):
            try:
                check(gm)
            except NotIsolableError:
                continue
            seen += 1
    assert seen  # most of it is not a plain graph


ONE = [
    (aten.relu.default, ()), (aten.exp.default, ()), (aten.t.default, ()), (aten.view.default, ([4, 4],)),
    (aten.detach.default, ()), (aten.contiguous.default, ()), (aten.softmax.int, (-1,)), (aten.clone.default, ()),
    (aten.mul.Scalar, (2.0,)), (aten.to.dtype, (torch.float32,)), (aten.dropout.default, (0.5, True)),
]  # fmt: skip
SEVERAL = [
    (aten.native_dropout.default, (0.5, True)), (aten.sort.default, ()), (aten.split.Tensor, (4,)),
    (aten.native_layer_norm.default, ([4], None, None, 1e-5)), (aten.var_mean.correction, ([],)),
]  # fmt: skip
TWO = [aten.mul.Tensor, aten.add.Tensor, aten.maximum.default, aten.div.Tensor]


def drawn(seed: int) -> fx.GraphModule:
    """Ops drawn at random, over few layouts: views, saved results, masks, aliases, results that nobody reads."""
    choose, graph, root = random.Random(seed), fx.Graph(), nn.Module()
    root.w, root.b = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    root.f = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    made = [graph.placeholder("x"), graph.placeholder("y"), *map(graph.get_attr, "wbf")]
    for _ in range(choose.randint(4, 24)):
        kind = choose.random()
        if kind < 0.1:
            graph.call_function(torch._C._set_grad_enabled, (kind < 0.07,))
        elif kind < 0.3:
            op, rest = choose.choice(SEVERAL)
            several = graph.call_function(op, (choose.choice(made[:9]), *rest))
            made.append(graph.call_function(operator.getitem, (several, 0)))
        elif kind < 0.6:
            made.append(graph.call_function(choose.choice(TWO), tuple(choose.choices(made, k=2))))
        else:
            op, rest = choose.choice(ONE)
            square = [n for n in made if op is not aten.view.default or n in made[:5]]
            made.append(graph.call_function(op, (choose.choice(square), *rest)))
    graph.output(tuple(choose.choices(made, k=2)))
    gm = fx.GraphModule(root, graph)
    sk.extend.propagate(gm, torch.ones(4, 4), torch.ones(4, 4))
    return gm


@pytest.mark.parametrize("seed", these_first([*range(20)], [*range(20, 200)]))
def test_graphs_drawn_at_random(seed):
    check(drawn(seed))


class Recurrent(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.lstm, self.which = nn.LSTM(4, 4), which

    def forward(self, x):
        made, (hidden, cell) = self.lstm(x)
        return (made, hidden, cell)[self.which].sum()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_results_that_autograd_tells_apart(which):
    check(sk.capture(Recurrent(which), torch.ones(3, 2, 4)))


def blocks(count, inplace=False):
    parts = [m for _ in range(count) for m in (nn.Linear(4, 4), nn.ReLU(inplace), nn.Dropout(0.5))]
    return sk.capture(nn.Sequential(*parts), torch.ones(2, 4))


def test_each_distinct_call_runs_once(monkeypatch):
    ran = []
    monkeypatch.setattr(IsolatedCall, "run", lambda self, run=IsolatedCall.run: ran.append(self) or run(self))
    check(blocks(8))
    assert len(ran) <= 6  # the first linear's input requires no grad


def test_constants_and_their_kinds_tell_calls_apart():
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = [1, 1.0, True, 2, [0, 1]]
    graph.output([graph.call_function(aten.mul.Scalar, (x, c)) for c in given[:4]])
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(2, 2, dtype=torch.int32))
    kept = check(gm)
    assert [kept.nbytes[s] for n in list(kept.values)[1:] for s in kept.values[n]] == [16, 16, 16, 16]


@pytest.mark.parametrize(
    "gm",
    [
        lambda: blocks(1, inplace=True),
        lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))),
        lambda: sk.capture(Autocast(), torch.ones(2, 4)),
    ],
    ids=["written", "modules", "autocast"],
)
def test_others_are_given_up_and_run_in_place(gm):
    gm = gm()
    sk.extend.propagate(gm, torch.ones(2, 4))
    with pytest.raises(NotIsolableError):
        record_by_calls(gm)
    with paused_collector():
        run = record_whole_run(gm)
    found = activations(gm)
    assert {n: sorted(s) for n, s in found.saved.items()} == saved_in(run)
    assert found.saved


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).exp()
