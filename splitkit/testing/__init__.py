"""The oracle, shipped: is a split the same as the whole, is a plan legal, and models and random graphs to try on.

``python -m splitkit.testing --plans 20000`` runs the fuzzer.
"""

from splitkit.testing.fuzz import FuzzReport, fuzz
from splitkit.testing.oracle import assert_emitted_as_planned, assert_legal, assert_same
from splitkit.testing.randoms import random_graph, random_inputs, random_plan
from splitkit.testing.zoo import Specimen, zoo

__all__ = [
    "FuzzReport",
    "Specimen",
    "assert_emitted_as_planned",
    "assert_legal",
    "assert_same",
    "fuzz",
    "random_graph",
    "random_inputs",
    "random_plan",
    "zoo",
]
