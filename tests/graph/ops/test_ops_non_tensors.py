"""Methods of objects that are not tensors are not taken for methods of tensors."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from torch import fx, nn

import splitkit as sk


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("fill", (5,)), ("put", ([0], [9.0])), ("sort", (0,)), ("partition", (0, 0)), ("setfield", (7.0, "f4")),
        ("itemset", (0, 1.0)), ("cumsum", (0, None, "itself")), ("clip", (0, 1, "itself")), ("round", (0, "itself")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["numpy", "asarray", "__array__"])
@pytest.mark.parametrize("between", ["nothing", "item", "reshape"])
def test_methods_of_numpy_are_not_taken_for_those_of_tensors(method, args, way, between):
    graph = fx.Graph()
    copied = graph.call_function(torch.clone, (graph.placeholder("x"),))
    array = graph.call_function(np.asarray, (copied,)) if way == "asarray" else graph.call_method(way, (copied,))
    if between == "item":
        array = graph.call_function(operator.getitem, (array, slice(None)))
    elif between == "reshape":
        array = graph.call_method("reshape", (array, (2, 2)))
    args = tuple(array if a == "itself" else a for a in args)
    graph.call_method(method, (array, *args))
    graph.output((graph.call_function(torch.mul, (copied, 1)),))
    gm = fx.GraphModule(nn.Module(), graph)
    where = {"clone": "A", "mul": "A"}
    with pytest.raises(sk.SplitError, match="SK203"):
        sk.split(gm, lambda n: where.get(n.name, "B"))
