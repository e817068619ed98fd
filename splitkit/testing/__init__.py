"""The oracle, shipped: is a split the same as the whole, is a plan legal, and models and random graphs to try on.

``python -m splitkit.testing --plans 20000`` runs the fuzzer. Names load on first use: the command line asks this room
for the names of models before it needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitkit.testing.fuzzing import FuzzReport as FuzzReport
    from splitkit.testing.fuzzing import fuzz as fuzz
    from splitkit.testing.graphzoo import Specimen as Specimen
    from splitkit.testing.graphzoo import zoo as zoo
    from splitkit.testing.oracle import assert_emitted_as_planned as assert_emitted_as_planned
    from splitkit.testing.oracle import assert_legal as assert_legal
    from splitkit.testing.oracle import assert_same as assert_same
    from splitkit.testing.randoms import random_graph as random_graph
    from splitkit.testing.randoms import random_inputs as random_inputs
    from splitkit.testing.randoms import random_plan as random_plan

_HOME = {
    "FuzzReport": "fuzzing",
    "Specimen": "graphzoo",
    "assert_emitted_as_planned": "oracle",
    "assert_legal": "oracle",
    "assert_same": "oracle",
    "fuzz": "fuzzing",
    "random_graph": "randoms",
    "random_inputs": "randoms",
    "random_plan": "randoms",
    "zoo": "graphzoo",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
