"""Writes and views are found when the tensor is passed by keyword."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from handgraphs import graph_of

import splitkit as sk
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same

_X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("target", "others"),
    [
        (torch.sin_, {}),
        (torch.clamp_, {"max": 0.5}),
        (torch.fill_, {"value": 2.0}),
        (F.relu_, {}),
        (F.hardtanh_, {}),
        (F.threshold_, {"threshold": 0.1, "value": 0.0}),
        (torch.nan_to_num_, {}),
    ],
)
@pytest.mark.parametrize("keyword", ["input", "x"])
def test_a_write_to_an_input_given_by_keyword_is_seen(target, others, keyword):
    """In Python the first tensor is `input` (in numpy's spelling `x`), in the schema `self`."""
    target(**{keyword: torch.ones(2, 3)}, **others)

    def write(g):
        y = g.call_function(torch.clone, (g.placeholder("x"),))
        g.call_function(target, (), {keyword: y, **others})
        g.output(g.call_function(torch.mul, (y, 3)))

    clone, written, read = sk.analyze(graph_of(write)).nodes
    assert sk.analyze(read.graph.owning_module).effects[written].writes == (clone,)
    assert written in sk.analyze(read.graph.owning_module).after[read]


@pytest.mark.parametrize(
    ("target", "others"),
    [
        (torch.transpose, {"input": _X, "dim0": 0, "dim1": 1}),
        (torch.transpose, {"a": _X, "dim0": 0, "dim1": 1}),
        (torch.split, {"tensor": _X, "split_size_or_sections": 1}),
        (torch.detach, {"input": _X}),
        (torch.squeeze, {"input": _X}),
        (torch.flatten, {"input": _X}),
        (torch.reshape, {"input": _X, "shape": (6,)}),
        (torch.unbind, {"input": _X}),
        (torch.chunk, {"input": _X, "chunks": 2}),
        (torch.select, {"input": _X, "dim": 0, "index": 0}),
        (torch.narrow, {"input": _X, "dim": 0, "start": 0, "length": 1}),
        (torch.permute, {"input": _X, "dims": (1, 0)}),
        (torch.unflatten, {"input": _X, "dim": 1, "sizes": (3, 1)}),
    ],
)
def test_a_view_of_an_input_given_by_keyword_is_seen(target, others):
    target(**others)

    def write(g):
        y = g.call_function(torch.clone, (g.placeholder("x"),))
        view = g.call_function(target, (), {k: y if v is _X else v for k, v in others.items()})
        g.output(view)

    clone, view = (flow := sk.analyze(graph_of(write))).nodes
    assert flow.effects[view].aliases == (clone,)


def test_einsum_may_be_given_all_by_keyword():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.ops.aten.einsum.default, (), {"equation": "ij->ji", "tensors": [x]}))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, RoundRobin(1)), torch.ones(2, 2))
