"""The oracle, shipped: is a split the same as the whole, is a plan legal, and a zoo of models to try both on."""

from splitkit.testing.fuzz import Choose, random_graph, random_plan
from splitkit.testing.oracle import assert_legal, assert_same
from splitkit.testing.zoo import Specimen, zoo

__all__ = ["Choose", "Specimen", "assert_legal", "assert_same", "random_graph", "random_plan", "zoo"]
