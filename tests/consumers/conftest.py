"""splitkit's `split_module` in the place of torch's, inside the code of those who use it."""

from __future__ import annotations

import importlib

import pytest
import torch

import splitkit as sk
from splitkit.testing import models

TORCH = importlib.import_module("torch.fx.passes.split_module").split_module
ENGINES = {"torch": TORCH, "splitkit": sk.split_module}

SMALL = {"layers": 3, "width": 32, "heads": 4, "vocab": 64, "batch": 2, "seq": 8}


class Spy:
    """An engine that remembers what it made, so that a test can see that it was used at all."""

    def __init__(self, engine):
        self.engine, self.made = engine, []

    def __call__(self, *args, **kwargs):
        self.made.append(self.engine(*args, **kwargs))
        return self.made[-1]


@pytest.fixture
def use(monkeypatch):
    """``use("torch" | "splitkit", module that looks the name up)``: put that engine in, and spy on it."""

    def put(engine, *modules):
        spy = Spy(ENGINES[engine])
        for module in modules or ("torch.fx.passes.split_module",):
            monkeypatch.setattr(importlib.import_module(module), "split_module", spy)
        return spy

    yield put
    torch.compiler.reset()


@pytest.fixture
def small():
    """A small model of `transformers` and its inputs without labels, so that it gives logits."""

    def build(name, **sizes):
        known = {size: value for size, value in SMALL.items() if size in models.SIZES[name]}
        example = models.build(name, **{**known, **sizes})
        example.kwargs.pop("labels", None)
        return example.model, example.kwargs

    return build
