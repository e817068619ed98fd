"""Prices of nodes: what a policy weighs. Functions of a graph make them; anything with the four methods will do."""

from __future__ import annotations

from torch import fx

from splitkit.costs.counting import Flops, flops
from splitkit.costs.devices import Device, devices, load_devices
from splitkit.costs.fused import Fused, fused
from splitkit.costs.links import Link, Links
from splitkit.costs.measured import measured
from splitkit.costs.measuring import Measured
from splitkit.costs.roofline import Roofline, roofline
from splitkit.costs.steps import MeasuredSteps
from splitkit.costs.training import training
from splitkit.costs.uniform import Unit, unit
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.sizes import missing
from splitkit.prices import Costs, unit_of

__all__ = [
    "Costs",
    "Device",
    "Flops",
    "Fused",
    "Link",
    "Links",
    "Measured",
    "MeasuredSteps",
    "Roofline",
    "Unit",
    "default",
    "devices",
    "flops",
    "fused",
    "load_devices",
    "measured",
    "roofline",
    "training",
    "unit",
    "unit_of",
]


def default(gm: fx.GraphModule | Dataflow) -> Costs:
    """FLOPs where the graph, or that of facts, has the ``meta["val"]`` that they need, else one unit a node."""
    return unit(gm) if missing(root_of(gm).graph) else flops(gm)
