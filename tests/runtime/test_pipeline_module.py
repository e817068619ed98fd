"""Loops of transformers' Trainer, of accelerate and of one's own train a pipeline as they train the model."""

from __future__ import annotations

import pytest
from launch import launch
from module_loops import LOOPS, model


@pytest.fixture(scope="module")
def found():
    return launch("runtime/module_loops.py", 2, *LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_losses_and_weights_are_those_of_the_unsplit_model(found, name):
    net = model()
    losses = LOOPS[name](net)
    weights = {n: p.double().abs().sum().item() for n, p in net.named_parameters(remove_duplicate=False)}
    ranks = [line for line in found if line.get("loop") == name]
    assert [line["losses"] for line in ranks] == [pytest.approx(losses, rel=1e-5)] * 2
    assert len({round(loss, 4) for loss in losses}) > 2
    assert set().union(*(line["weights"] for line in ranks)) >= weights.keys() - {"transformer.wte.weight"}
    for line in ranks:
        assert line["weights"] == pytest.approx({n: weights[n] for n in line["weights"]}, rel=1e-4)


def test_what_would_be_wrong_is_refused(found):
    assert [line["misused"] for line in found if "misused" in line] == [["SK802", "SK802"]] * 2
