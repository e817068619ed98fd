"""What every kind of costs answers about a node."""

from __future__ import annotations

from typing import Protocol, cast

from torch.fx import Node

from splitkit.errors import CostError


def unit_of(costs: object) -> str:
    """What ``seconds`` of these costs counts: ``"s"`` for time, measured or nominal; else what to print instead."""
    return str(getattr(costs, "unit", "s"))


def includes_backward(costs: object) -> bool:
    """Whether ``seconds`` of these costs include the backward of a node: they can say how much it is."""
    return hasattr(costs, "backward")


class Costs(Protocol):
    """Prices of the nodes of one graph."""

    def seconds(self, node: Node) -> float:
        """Time to run ``node``: comparable within one graph; real seconds only where the costs were measured.

        Costs that count something else, as `splitkit.costs.unit` counts nodes, say so in an attribute ``unit``. Costs
        whose seconds include a node's backward have a method ``backward(node)``: how many times its forward that takes.
        """
        ...

    def flops(self, node: Node) -> float:
        """Floating-point operations of ``node``."""
        ...

    def nbytes(self, node: Node) -> int:
        """Bytes of what ``node`` yields. A view counts its own size; a symbolic size counts as seen at capture."""
        ...

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that ``node`` reads.

        Each reader of a parameter counts it: callers that add up take each attribute once.
        """
        ...


def require_costs(given: object) -> Costs:
    """What was given, if it prices nodes.

    Raises:
        CostError: SK323 if it does not.
    """
    if not isinstance(given, type) and all(callable(getattr(given, name, None)) for name in _METHODS):
        return cast(Costs, given)
    raise CostError(
        "SK323",
        f"{given!r:.100} prices no nodes",
        "Give what splitkit.costs makes of the graph, such as splitkit.costs.roofline(gm, 'h200').",
    )


_METHODS = ("seconds", "flops", "nbytes", "param_bytes")
