"""A key of a part may be any object that is equal to no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx

import splitkit as sk


def key_that(equals):
    return type("Key", (), {"__eq__": equals, "__hash__": lambda self: 1})


def _raise(*_):
    raise ValueError("no")


@pytest.mark.parametrize(
    "equals",
    [
        lambda *_: True,
        lambda _, o: o is None,
        lambda *_: np.array([True, False]),
        _raise,
        lambda _, o: isinstance(o, Exception),
    ],
)
@pytest.mark.parametrize("wrap", [lambda k: k, lambda k: (k, 0), lambda k: ("a", (k,))])
def test_keys_that_equal_other_objects_are_refused(equals, wrap):
    gm = fx.symbolic_trace(lambda x: torch.relu(torch.sin(x) + 1))
    kind = key_that(equals)
    single = wrap(kind())
    sane = equals(None, 0) is False and equals(None, None) is False if equals is not _raise else False
    for callback in (lambda n: wrap(kind()), lambda n: single if n.name == "add" else 0):
        for door in (lambda: sk.split(gm, callback), lambda: sk.split_module(gm, None, callback)):
            try:
                door()
            except sk.SplitError as error:
                assert error.code == ("SK203" if sane else "SK211")
            else:
                assert sane
