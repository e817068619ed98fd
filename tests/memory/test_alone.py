"""What each node holds by itself, of all nodes in one pass."""

from __future__ import annotations

import pytest

import splitkit as sk
from splitkit.memory.autograd import activations
from splitkit.memory.lines import Units
from splitkit.testing import models


@pytest.mark.parametrize("training", [True, False])
def test_alone_is_the_least_of_each_node(training):
    example = models.build("gpt2", layers=1, width=32, heads=2, vocab=200)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    flow = sk.analyze(gm)
    line = Units(flow, activations(gm), training).line([flow.nodes])
    least = [line.least(i, i + 1) for i in range(line.length)]
    found = [[int(column[i]) for column in line.alone()] for i in range(line.length)]
    assert found == [[s.parameters, s.gradients, s.saved, s.temporary] for s in least]
