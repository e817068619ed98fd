"""Resolve cost models that a policy names (``price="fused"``), whatever costs it is given."""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import fx

from splitkit.checks import is_word, shown
from splitkit.costs import Costs, Device, Fused, default, fused
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import nodes_without_values
from splitkit.graph.storages import tensors, value_of
from splitkit.hardware.device_specs import devices
from splitkit.prices import as_given

Price = Literal["fused"]
"""Name of a cost model. ``"fused"`` is `splitkit.costs.fused`, for Inductor, where a chain of pointwise ops costs one
read and one write; prices of single ops are too high for such a chain."""

_A_GPU = "a100"


def require_price(policy: object, price: object) -> None:
    """Raise unless ``price`` is ``None`` or the name of a cost model.

    Raises:
        PolicyError: SK302.
    """
    if price is not None and not is_word(price, "fused"):
        name = type(policy).__name__
        raise PolicyError(
            "SK302", f"{name} has price={shown(price)}", "Give 'fused', or nothing for the costs as they are."
        )


def priced(flow: Dataflow, costs: Costs, price: Price | None) -> Costs:
    """Return the costs unchanged, or the named cost model of the graph, on the device of the costs if they have one.

    Raises:
        GraphError: SK102 for a graph without ``meta["val"]``.
    """
    if price is None or isinstance(as_given(costs), Fused):
        return costs
    device, tf32 = getattr(costs, "device", None), getattr(costs, "tf32", None)
    on = device if isinstance(device, Device) else device_of(flow.root)
    return fused(flow, on, tf32=_rounds() if tf32 is None else tf32)


def by_inductor(gm: fx.GraphModule) -> Costs:
    """Return fused costs on the device of the graph's values, or one second for each node if sizes are unknown."""
    return default(gm) if nodes_without_values(gm.graph) else fused(gm, device_of(gm), tf32=_rounds())


def device_of(gm: fx.GraphModule) -> str:
    """Return the device where most values of a graph lie: the CPU, this machine's GPU if known, or an A100."""
    on = [t.device.type for node in gm.graph.nodes for t in tensors(value_of(node))]
    if 2 * on.count("cpu") >= len(on):
        return "cpu"
    return known_device(torch.cuda.get_device_name()) or _A_GPU if torch.cuda.is_available() else _A_GPU


def known_device(name: str) -> str | None:
    """Return the known device for a driver's name of a GPU: ``"NVIDIA GeForce RTX 4090"`` -> ``"rtx-4090"``.

    Returns ``None`` for any other GPU, including faster or slower variants such as ``"RTX 3060 Ti"``.
    """
    text = re.sub(r"[\s_]", "-", name.lower())
    variant = r"(?!-(ti|super|laptop|mobile|d)\b)"
    return next((known for known in devices() if re.search(rf"\b{known}\b{variant}", text)), None)


def _rounds() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
