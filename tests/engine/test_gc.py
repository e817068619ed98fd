"""Python's garbage collector is paused while a split is made, and works as before afterwards."""

from __future__ import annotations

import gc
import weakref

from torch import fx, nn

import splitkit as sk
from splitkit.policies import RoundRobin


def test_splits_that_nobody_holds_are_collected():
    """`gc.freeze` would reset all counts and make everything old: a loop would keep all its splits."""
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(10)]))
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        made = [weakref.ref(sk.split(gm, RoundRobin(2)).module) for _ in range(60)]
    finally:
        gc.set_threshold(*threshold)
    assert sum(ref() is not None for ref in made) < 45
