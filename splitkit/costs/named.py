"""Prices that a policy asks for by name, whatever costs it is given: those under a compiler that fuses."""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import fx

from splitkit.checks import is_word, shown
from splitkit.costs import Costs, Device, Fused, default, fused
from splitkit.costs.devices import devices
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.sizes import missing
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.prices import as_given

Price = Literal["fused"]
"""Prices by name. ``"fused"``: `splitkit.costs.fused`, for Inductor, under which a chain of pointwise ops costs one
read and one write; costs of single ops overprice such a chain."""

_A_GPU = "a100"


def require_price(policy: object, price: object) -> None:
    """Refuse what is neither ``None`` nor the name of prices.

    Raises:
        PolicyError: SK302.
    """
    if price is not None and not is_word(price, "fused"):
        name = type(policy).__name__
        raise PolicyError(
            "SK302", f"{name} has price={shown(price)}", "Give 'fused', or nothing for the costs as they are."
        )


def priced(flow: Dataflow, costs: Costs, price: Price | None) -> Costs:
    """The costs as they are, or the prices of that name for the graph, on the device of the costs if they have one.

    Raises:
        GraphError: SK102 for a graph without ``meta["val"]``.
    """
    if price is None or isinstance(as_given(costs), Fused):
        return costs
    device, tf32 = getattr(costs, "device", None), getattr(costs, "tf32", None)
    on = device if isinstance(device, Device) else device_of(flow.root)
    return fused(flow, on, tf32=_rounds() if tf32 is None else tf32)


def by_inductor(gm: fx.GraphModule) -> Costs:
    """Fused prices on the device where the values of a graph live; one second a node where sizes are unknown."""
    return default(gm) if missing(gm.graph) else fused(gm, device_of(gm), tf32=_rounds())


def device_of(gm: fx.GraphModule) -> str:
    """The known device where most values of a graph live: the CPU, the GPU of this machine, or else an A100."""
    on = [t.device.type for node in gm.graph.nodes for t in tensors(value_of(node))]
    if 2 * on.count("cpu") >= len(on):
        return "cpu"
    return known_device(torch.cuda.get_device_name()) or _A_GPU if torch.cuda.is_available() else _A_GPU


def known_device(name: str) -> str | None:
    """The known device that a driver calls so: ``"NVIDIA GeForce RTX 4090"`` -> ``"rtx-4090"``.

    ``None`` for every other one, also for a faster or slower variant such as ``"RTX 3060 Ti"``.
    """
    text = re.sub(r"[\s_]", "-", name.lower())
    variant = r"(?!-(ti|super|laptop|mobile|d)\b)"
    return next((known for known in devices() if re.search(rf"\b{known}\b{variant}", text)), None)


def _rounds() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
