"""Prices of nodes: what a policy weighs. Functions of a graph make them; anything with the four methods will do."""

from __future__ import annotations

from torch import fx

from splitkit.costs.counting import Flops, flops
from splitkit.costs.protocol import Costs
from splitkit.costs.sizes import missing
from splitkit.costs.uniform import Unit, unit

__all__ = ["Costs", "Flops", "Unit", "default", "flops", "unit"]


def default(gm: fx.GraphModule) -> Costs:
    """FLOPs where the graph has the ``meta["val"]`` that they need, else one second a node."""
    return unit(gm) if missing(gm.graph) else flops(gm)
