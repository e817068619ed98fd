"""With `keep_original_order=True`, each part of `split_module` runs in the ambient state of the whole graph."""

from __future__ import annotations

import pytest
import torch
from handgraphs import graph_of
from torch import nn

import splitkit as sk
from splitkit import _torch
from splitkit.testing import assert_same


def in_runs(gm, cuts):
    """`split_module` in the original order, cut before the named nodes."""
    part = iter(range(99))
    label = {}
    now = next(part)
    for node in gm.graph.nodes:
        now = next(part) if node.name in cuts else now
        label[node.name] = now
    return sk.split_module(gm, None, lambda node: label[node.name], keep_original_order=True)


def interleaved():
    def write(g):
        x = g.placeholder("x")
        a = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.call_function(torch.mm, (x, x))
        b = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, False, None))
        g.call_function(_torch.EXIT_AUTOCAST, (a,))
        inside = g.call_function(torch.mm, (x, x))
        g.call_function(_torch.EXIT_AUTOCAST, (b,))
        last = g.call_function(torch.mm, (x, x))
        g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.output((inside, last))

    return graph_of(write)


@pytest.mark.parametrize("cuts", [["_exit_autocast_1"], ["mm_1"], ["mm_2"], ["mm_1", "mm_2"]])
def test_regions_that_interleave_run_in_the_state_of_the_whole(cuts):
    """The regions that `scopes` calls open and those that the graph has not closed differ where regions interleave."""
    gm = interleaved()
    x = torch.randn(3, 3)
    try:
        wanted = gm(x)
        torch.set_autocast_enabled("cpu", False)
        made = in_runs(gm, cuts)(x)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert [v.dtype for v in made] == [v.dtype for v in wanted]


def test_a_setting_is_read_in_the_state_of_the_whole():
    """`get_autocast_dtype` is not copied into the run of its reader, which has closed the region."""

    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.float16, True, None))
        dtype = g.call_function(torch.get_autocast_dtype, ("cpu",))
        dtype.meta["val"] = torch.float16
        y = g.call_function(torch.sin, (x,))
        g.call_function(_torch.EXIT_AUTOCAST, (handle,))
        g.output(g.call_method("to", (y, dtype)))

    gm = graph_of(write)
    assert_same(gm, in_runs(gm, ["_exit_autocast"]), torch.ones(2))


def test_an_exit_may_take_its_handle_by_keyword():
    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        y = g.call_function(torch.sin, (x,))
        g.call_function(_torch.EXIT_AUTOCAST, (), {"mode": handle})
        g.output(g.call_function(torch.cos, (y,)))

    gm = graph_of(write)
    assert_same(gm, in_runs(gm, ["cos"]), torch.ones(2))


def test_a_number_is_not_computed_again_in_another_state():
    """A module that yields a float has inputs, and depends on autocast all the same, so that it is not copied."""
    root = nn.Module()

    def inner(g):
        x = g.placeholder("x")
        g.output(g.call_method("item", (g.call_method("sum", (g.call_function(torch.mm, (x, x)),)),)))

    root.inner = graph_of(inner)

    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        number = g.call_module("inner", (x,))
        number.meta["val"] = 1.0
        g.call_function(_torch.EXIT_AUTOCAST, (handle,))
        g.output(g.call_function(torch.mul, (x, number)))

    gm = graph_of(write, root)
    assert_same(gm, in_runs(gm, ["_exit_autocast"]), torch.randn(5, 5))
