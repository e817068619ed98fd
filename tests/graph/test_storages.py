"""Which memory the values of nodes lie in, and which parameters nodes read."""

from __future__ import annotations

import memorygraphs
import pytest
import torch
from handgraphs import graph_of
from torch import fx, nn

import splitkit as sk
from splitkit.errors import GraphError
from splitkit.graph.storages import (
    hides_memory,
    owned_tensors,
    shared_keys,
    shares_memory,
    storage_key,
    storages_shown,
)


def test_values_that_share_memory_show_one_storage():
    graph = fx.Graph()
    base, view, other, both, unknown = (graph.placeholder(name) for name in "abcde")
    memory, apart = torch.ones(4), torch.ones(4)
    base.meta["val"], view.meta["val"], other.meta["val"], both.meta["val"] = memory, memory[1:], apart, [memory, apart]
    assert storages_shown([base, view]) == {storage_key(memory)} and storages_shown([unknown]) == set()
    assert storages_shown([both]) == storages_shown([base, other]) == {storage_key(memory), storage_key(apart)}


def test_values_show_who_shares_memory_unless_a_view_has_a_storage_of_its_own():
    def of(target, apart, kind="placeholder"):
        def write(g):
            first = g.get_attr("held") if kind == "get_attr" else g.placeholder("x")
            node = g.call_function(target, (first, 1))
            first.meta["val"], node.meta["val"] = base, torch.ones(4) if apart else base.view(2, 2)
            g.output(node)

        base, root = torch.ones(4), nn.Module()
        root.register_buffer("held", base)
        return shares_memory(graph_of(write, root))

    view, written, sum_ = torch.ops.aten.view.default, torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor
    assert [of(target, apart=False) for target in (view, written, sum_)] == [True, True, True]
    assert [of(target, apart=True) for target in (view, written, sum_)] == [False, False, True]
    assert of(view, apart=True, kind="get_attr")


def test_keys_of_any_two_kinds_can_be_compared():
    real, meta, sparse = torch.ones(4), torch.empty(4, device="meta"), torch.eye(2).to_sparse()
    keys = [storage_key(t) for t in (real, meta, sparse)] + ["a token", graph_of(lambda g: g.output(None))]
    assert [[one == other for other in keys] for one in keys] == [[i == j for j in range(5)] for i in range(5)]
    assert storage_key(meta) == storage_key(meta[1:]) != storage_key(torch.empty(4, device="meta"))


@fx.wrap
def same(x):
    return x


class Wrapped(nn.Module):
    def forward(self, x):
        y = same(x)
        return y.unsqueeze(0) * 2, y.view(-1).add_(1)


class Vmapped(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row[0] * 2)(x) + x.sum()


@pytest.mark.parametrize("make", [lambda x: fx.symbolic_trace(Wrapped()), lambda x: sk.capture(Vmapped(), x)])
def test_views_of_what_unknown_code_returns_of_an_input_are_split(make):
    x = torch.randn(3, 4)
    gm = make(x)
    sk.extend.propagate(gm, x)
    split = sk.split(gm, {n.name: i % 2 for i, n in enumerate(sk.analyze(gm).nodes)}, on_cycle="refine")
    assert sk.compare(gm, split, x).same and len(split.parts) > 1


def reads(root, *names):
    def write(g):
        g.output(tuple(g.call_function(torch.sin, (g.get_attr(name),)) for name in names))

    gm = graph_of(write, root)
    return owned_tensors(gm, [node for node in gm.graph.nodes if node.op == "call_function"])


def test_of_tensors_that_begin_at_one_place_the_parameter_is_owned_then_the_largest():
    root = nn.Module()
    root.register_buffer("whole", torch.ones(4))
    root.register_buffer("head", root.whole[:2])
    root.register_buffer("tail", root.whole[2:])
    assert [id(t) for t in reads(root, "head", "whole")] == [id(root.whole)]
    assert {id(t) for t in reads(root, "head", "tail")} == {id(root.head), id(root.tail)}
    root.weight = nn.Parameter(root.whole[:2])
    assert [id(t) for t in reads(root, "whole", "weight", "head")] == [id(root.weight)]


def test_a_lazy_parameter_is_refused_by_the_node_that_reads_it():
    root = nn.Module()
    root.weight = nn.UninitializedParameter()
    with pytest.raises(GraphError, match="SK112: a tensor of sin has no size yet"):
        reads(root, "weight")


@pytest.mark.parametrize("kind", [memorygraphs.Plain, memorygraphs.Weight])
def test_a_tensor_of_a_subclass_has_the_key_of_its_memory(kind):
    memory = torch.ones(3)
    assert storage_key(memory.as_subclass(kind)) == storage_key(memory) == storage_key(memory[1:])


@pytest.mark.parametrize("wrap", [memorygraphs.Wrapped, memorygraphs.Unnamed])
def test_a_wrapper_shares_the_memory_that_it_shows(wrap):
    memory = torch.ones(3)
    wrapper = wrap(memory)
    assert set(shared_keys([wrapper])) == {(storage_key(wrapper), storage_key(memory))} and not hides_memory(wrapper)


def test_only_a_wrapper_that_shows_no_tensor_hides_memory():
    memory = torch.ones(3)
    itself = memorygraphs.Unnamed(memory)
    itself.box["held"].append(itself)
    assert hides_memory(memorygraphs.Elsewhere(memory)) and hides_memory(itself)
    assert not any(map(hides_memory, (memory, memory.as_subclass(memorygraphs.Plain), memory.to("meta"))))


def test_storages_that_overlap_share_memory_and_neighbours_do_not():
    array = torch.zeros(8).numpy()
    whole, end, start, middle = map(torch.from_numpy, (array, array[4:], array[:4], array[2:6]))
    assert set(shared_keys([start, end])) == set()
    assert set(shared_keys([end, middle, start])) == {
        (storage_key(start), storage_key(middle)),
        (storage_key(middle), storage_key(end)),
    }
    assert len(set(shared_keys([end, middle, whole]))) == 2
