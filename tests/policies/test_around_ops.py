"""Parts around listed ops; see also tests/consumers/test_piecewise.py."""

from __future__ import annotations

import torch
from policygraphs import graph, labels
from torch import fx, nn

import splitkit as sk
from splitkit.policies import AroundOps
from splitkit.testing import assert_same


def test_runs_are_merged_and_odd_parts_are_listed():
    s, c = torch.sin, torch.cos
    assert labels(graph(c, c, s, s, c, s, c, c), AroundOps([s])) == [0, 0, 1, 1, 2, 3, 4, 4]
    assert labels(graph(s, c, s), AroundOps([s])) == [1, 2, 3], "there is no part 0 if a listed op comes first"
    assert labels(graph(s, s), AroundOps([s])) == [1, 1]
    assert labels(graph(c, c), AroundOps([s])) == [0, 0]
    assert labels(graph(), AroundOps([s])) == []
    assert [AroundOps.is_listed(k) for k in (0, 1, 2, None, "1")] == [False, True, False, False, False]


class Allocating(nn.Module):
    """Two attentions, each with a buffer; between the two there is only the allocation."""

    def forward(self, x):
        y = x.sin()
        first = torch.empty_like(y)
        first.copy_(y)
        second = x.new_empty(4).copy_(y)
        third = torch.empty_like(second)
        third.copy_(second)
        fourth = torch.empty_like(first)
        fourth.copy_(third)
        return (first + second + third + fourth).cos()


def test_what_only_allocates_joins_the_part_before_or_the_listed_ops():
    gm = fx.symbolic_trace(Allocating())
    flow = sk.analyze(gm)
    plan = AroundOps("copy_").assign(flow, sk.costs.unit(gm))
    homes = {n.name: plan.home(n) for n in flow.nodes}
    assert homes["new_empty"] == 0, "ready before the listed ops: it keeps its address for the CUDA graph of part 0"
    assert homes["empty_like_1"] == 1, "needs what is made among the listed ops"
    assert homes["empty_like_2"] == 0, "of the size of what is written there, which was made before"
    assert [homes[n] for n in ("copy_", "copy__1", "copy__2", "copy__3")] == [1, 1, 1, 1], "nothing runs between them"
    assert set(homes.values()) == {0, 1, 2}
    made = sk.split(gm, plan)
    x = torch.randn(4)
    assert torch.equal(made(x), gm(x))


def test_allocations_at_the_ends():
    class Model(nn.Module):
        def forward(self, x):
            first = torch.empty_like(x)
            first.copy_(x)
            return first, torch.empty_like(x), x.new_empty(2)

    gm = fx.symbolic_trace(Model())
    assert set(labels(gm, AroundOps("copy_"))) == {1}
    only = graph(torch.empty_like, torch.empty_like)
    assert labels(only, AroundOps("copy_")) == [0, 0], "no listed op to join"


def test_members_of_a_tuple_stay_with_their_producer():
    class Model(nn.Module):
        def forward(self, x):
            a, b = x.sin().chunk(2)
            return a.exp() + b.cos()

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, AroundOps("exp"))
    assert [n.name for n in made.subgraphs[0].nodes] == ["sin", "chunk", "getitem", "getitem_1"]
    assert {n.name for n in made.subgraphs[0].outputs} == {"getitem", "getitem_1"}
    assert_same(gm, made, torch.randn(4, requires_grad=True))


class Sizes(nn.Module):
    """The whole size of ``x`` is read after the listed op; ``y`` is resized before its size is read again."""

    def forward(self, x):
        size = x.size()
        shape = x.shape
        rows = x.size(0)
        y = x.sin().reshape(-1).exp()
        return y.view(size) + y.reshape(shape) * rows


def test_a_size_is_asked_again_where_it_is_read():
    gm = fx.symbolic_trace(Sizes())
    made = sk.split(gm, AroundOps("exp"))
    place = {n.name: keys for n, keys in made.plan.items()}
    assert place["size"] == place["getattr_1"] == (2,), "nobody reads them in part 0"
    assert place["size_1"] == (0,), "an int may cross"
    assert_same(gm, made, torch.randn(3, 4))


def test_a_size_that_changes_later_crosses():
    class Model(nn.Module):
        def forward(self, x):
            y = x.sin()
            size = y.size()
            y = y.exp()
            z = x.clone()
            early = z.size()
            z.resize_(2, 2)
            return y.view(size) + z.cos().sum() + torch.zeros(early).sum()

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, AroundOps("resize_"))
    place = {n.name: keys for n, keys in made.plan.items()}
    assert place["size_1"] == (0,)
    x = torch.randn(4, 4)
    assert torch.equal(made(x), gm(x))
