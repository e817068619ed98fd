"""The caches of targets keep no object alive."""

from __future__ import annotations

import gc
import weakref

from handgraphs import graph_of
from torch import nn

import splitkit as sk
from splitkit.policies import RoundRobin


def test_objects_behind_targets_are_not_kept_alive():
    """`torch_name`, `signature_facts` and `is_ambient` are cached by target, such as a bound method."""

    class Model(nn.Module):
        def double(self, x):
            return x * 2

    def splits():
        model = Model()
        sk.split(graph_of(lambda g: g.output(g.call_function(model.double, (g.placeholder("x"),)))), RoundRobin(1))
        return weakref.ref(model)

    kept = splits()
    gc.collect()
    assert kept() is None
