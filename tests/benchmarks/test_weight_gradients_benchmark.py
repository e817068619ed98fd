"""The benchmark of what waits for weight gradients: two rows, on small sizes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from campaigns import these_first


@pytest.fixture(scope="module")
def weight_gradients():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("weight_gradients")
    sys.modules.pop("weight_gradients", None)


@pytest.mark.parametrize(("case", "units", "closure"), these_first([(3, 32, 40)], [(0, 34, 42)]))
def test_inputs_and_output_gradients_of_the_layers_wait(weight_gradients, case, units, closure):
    """17 units a Llama block and 16 a GPT block; gradients of norms are finished early."""
    row = weight_gradients.row(weight_gradients.CASES[case], weight_gradients.SMALL)
    assert row["cut"] == row["recompute"] == units and row["closure"] == closure
    assert row["torch"] > row["saved"] > row["cut"] and row["measured"] == 1
