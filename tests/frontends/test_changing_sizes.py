"""Budgets while sizes change: a smaller batch never stops training, a larger one is planned anew or warned about."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from campaigns import these_first
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import splitkit as sk
from splitkit.frontends.compile.changing_sizes import CompileHistory, _guard_above
from splitkit.policies import Budget

LIMIT = 700_000


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks on inputs of shape (batch, length, 24)."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(24), Block(24)), nn.Linear(24, 8)

    def forward(self, x):
        return self.head(self.blocks(x)).square().mean()


def prices(gm):
    return sk.costs.roofline(gm, "a100")


def peak(step, model, length, batch=4):
    """The measured peak of a step that is compiled already, and what was warned of budgets while it was compiled."""
    x = torch.randn(batch, length, 24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x).backward()
    model.zero_grad(set_to_none=True)
    measured = sk.measure_memory(lambda: step(x).backward()).peak
    model.zero_grad(set_to_none=True)
    return measured, [str(one.message) for one in caught if "budget" in str(one.message)]


@pytest.fixture
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Net()
    torch._dynamo.reset()


@pytest.mark.parametrize("budget", these_first([0.3, LIMIT], ["least", 0.8]), ids=str)
def test_a_smaller_last_batch_trains(model, budget):
    x = torch.randn(6, 64, 24)
    step = sk.apply(model, Budget(budget), x if budget != LIMIT else x[:4], costs=prices)
    for batch in (6, 6, 1) if budget != LIMIT else (4, 4, 1):
        step(torch.randn(batch, 64, 24)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_plan_for_other_sizes_keeps_to_the_bytes_and_is_made_anew_where_it_would_not(model):
    made = sk.backend(Budget(LIMIT), costs=prices)
    step = torch.compile(model, backend=made)
    graphs = []
    for length in (64, 66, 80, 48, 100, 66):
        measured, warned = peak(step, model, length)
        assert measured <= LIMIT and not warned, length
        graphs.append(len(made.pairs))
    assert graphs == sorted(graphs) and 2 <= graphs[-1] <= 4 and graphs[-1] == graphs[-2]


def test_sizes_that_no_plan_fits_are_told_once_with_the_bytes_over_the_budget(model):
    step = torch.compile(model, backend=sk.backend(Budget(LIMIT), costs=prices), dynamic=True)
    assert peak(step, model, 64)[0] <= LIMIT
    measured, warned = peak(step, model, 160)
    assert len(warned) == 1 and int(re.search(r"\((\d+) bytes\) over", warned[0])[1]) == measured - LIMIT > 0
    assert not peak(step, model, 200)[1]
    assert peak(step, model, 64)[0] <= LIMIT


def test_sizes_that_cannot_be_guarded_are_told_once_with_the_bytes_over_the_budget(model):
    """Bounds that users state must hold for the compiled code: no guard may narrow them."""
    step = torch.compile(model, backend=sk.backend(Budget(LIMIT), costs=prices))

    def marked(x):
        torch._dynamo.mark_dynamic(x, 1, min=2, max=512)
        return step(x)

    assert peak(marked, model, 64) == (pytest.approx(LIMIT, rel=0.1), [])
    measured, warned = peak(marked, model, 96)
    assert len(warned) == 1 and int(re.search(r"\((\d+) bytes\) over", warned[0])[1]) == measured - LIMIT > 0


def test_the_last_graph_that_dynamo_compiles_has_the_least_peak(model):
    with torch._dynamo.config.patch(recompile_limit=2):
        made = sk.backend(Budget(LIMIT), costs=prices)
        step = torch.compile(model, backend=made)
        for length in (64, 66):
            assert not peak(step, model, length)[1]
        assert not peak(step, model, 90)[1]
        measured, warned = peak(step, model, 120)
        assert len(made.pairs) == 2 and len(warned) == 1 and measured > LIMIT


def test_the_first_plan_is_refused_where_nothing_fits(model):
    with pytest.raises(sk.SplitError, match="SK303"):
        sk.apply(model, Budget(LIMIT), torch.randn(4, 200, 24), costs=prices)


def test_an_exceeded_budget_is_warned_of_once():
    history = CompileHistory()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history.warn("the budget is exceeded")
        history.warn("and again")
    assert [str(one.message) for one in told] == ["the budget is exceeded"]


@pytest.mark.parametrize(
    ("most", "served", "left"),
    [
        ({"s0": 5, "s1": 7}, [(6, 7), (5, 8), (6, 8)], [(5, 7), (4, 6)]),  # (8, 6) is above it in one size
        ({"s0": 5}, [(5, 7), (9, 9)], []),  # of other symbols
        ({"s0": 8, "s1": 6}, [(8, 6), (9, 9)], []),  # the earlier graph serves these sizes
    ],
)
def test_sizes_that_an_earlier_graph_serves_are_left_to_it(most, served, left):
    """The guards of a graph for sizes (8, 6), after one that serves sizes up to ``most``."""
    shapes = ShapeEnv()
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    sizes = FakeTensorMode(shape_env=shapes).from_tensor(torch.empty(8, 6), symbolic_context=dynamic).shape
    symbols = dict(zip(("s0", "s1"), sizes, strict=True))
    before = len(shapes.guards)
    _guard_above(symbols, {"s0": 8, "s1": 6}, most)
    guards = [guard.expr for guard in shapes.guards[before:]]
    names = [size.node.expr for size in sizes]

    def hold(values):
        return all(guard.subs(dict(zip(names, values, strict=True))) == True for guard in guards)  # noqa: E712

    assert all(map(hold, served)) and not any(map(hold, left))
