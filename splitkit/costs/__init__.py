"""Cost models, which price the nodes of a graph for policies; any object with the methods of `Costs` is one."""

from __future__ import annotations

from torch import fx

from splitkit.costs.base import Unit, unit
from splitkit.costs.flop_formulas import Flops, flops
from splitkit.costs.fused import Fused, fused
from splitkit.costs.links import Links
from splitkit.costs.measuring_run import Measured, MeasuredSteps, measured
from splitkit.costs.roofline import Roofline, roofline
from splitkit.costs.training import training
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.node_values import nodes_without_values
from splitkit.hardware.device_specs import Device, devices, load_devices
from splitkit.hardware.link_specs import Link
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
    """Return costs by FLOPs if the graph has the ``meta["val"]`` that they need, else price 1 for each node."""
    return unit(gm) if nodes_without_values(root_of(gm).graph) else flops(gm)
