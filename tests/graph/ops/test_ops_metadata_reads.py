"""An op that reads only the size of a tensor is not ordered by writes to its memory."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import splitkit as sk


@pytest.mark.parametrize(
    "make",
    [
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.ops.aten.zeros_like.default,
        torch.ops.aten.empty_like, "new_zeros", "new_empty", torch.ops.aten.new_empty.default, "size", "dim", "numel",
        getattr,
    ],
)  # fmt: skip
def test_what_reads_a_size_waits_for_changes_of_size_only(make):
    def graph_with(write):
        graph = fx.Graph()
        value = graph.call_function(torch.neg, (graph.placeholder("x"),))
        written = graph.call_method(
            write, (value, *((1,) if write == "add_" else (0,) if write == "unsqueeze_" else ()))
        )
        more = ([2],) if "new" in str(make) else ("shape",) if make is getattr else ()
        asked = (graph.call_method if isinstance(make, str) else graph.call_function)(make, (value, *more))
        asked.name = "asked"
        graph.output((written, asked))
        return fx.GraphModule(nn.Module(), graph), {"neg": 0, write: 1, "asked": 0}

    gm, where = graph_with("add_")
    assert len(sk.split(gm, where).parts) == 2
    assert sk.split_module(gm, None, lambda n: where[n.name])(torch.ones(2))[0].tolist() == [0.0, 0.0]
    if make is not getattr:  # a shape that nobody else reads is asked again where it is wanted
        gm, where = graph_with("unsqueeze_")  # which changes the size
        with pytest.raises(sk.SplitError, match="SK203"):
            sk.split(gm, where)
