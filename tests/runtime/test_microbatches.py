"""Sizes of a batch: cut into microbatches, or refused before anything runs with those that work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.microbatches import BatchSplitter
from splitkit.runtime.ranks.stage_chain import chain_of


def inputs(dynamic: bool = False) -> BatchSplitter:
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), dynamic=dynamic)
    return BatchSplitter(chain_of(sk.split(gm, {"linear": 0, "tanh": 1})), 3, torch.device("cpu"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_is_as_many_microbatches_as_captured(dynamic):
    x = torch.randn(6, 4)
    found = [made["input"] for made in inputs(dynamic).split([x], {})]
    assert torch.equal(torch.cat(found), x) and [len(t) for t in found] == [2, 2, 2]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_last_microbatch_of_another_size_is_refused_with_the_sizes_that_work(rows, dynamic):
    """Also where the graph would take it: what goes over a border has the size that was captured."""
    with pytest.raises(PipelineError, match=rf"SK802: input is float32\[{rows}, 4\]") as error:
        inputs(dynamic).split([torch.randn(rows, 4)], {})
    assert error.value.remedy == "Give float32[6, 4]: 3 microbatches of [2, 4], as captured."


def test_what_has_the_shape_of_a_microbatch_goes_to_each():
    x = torch.randn(2, 4)
    assert all(torch.equal(made["input"], x) for made in inputs().split([x], {}))


def test_a_target_that_does_not_divide_is_refused():
    assert inputs().targets(torch.arange(6))[1].tolist() == [2, 3]
    with pytest.raises(PipelineError, match="SK802: the target has 5 rows for 3 microbatches") as error:
        inputs().targets(torch.arange(5))
    assert "multiple of 3" in error.value.remedy
