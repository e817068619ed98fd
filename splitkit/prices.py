"""What every kind of costs answers about a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch.fx import Node

from splitkit.checks import is_number, is_whole, shown
from splitkit.errors import CostError, SplitError


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


MOST_SECONDS, MOST_BYTES = 1e100, 2**50
"""The highest prices of one node: sums and products of many of them are still finite, and whole in 64 bits."""


def require_costs(given: object) -> Costs:
    """What was given, if it prices nodes.

    Raises:
        CostError: SK323 if it has not the four methods.
    """
    if not isinstance(given, type) and all(callable(getattr(given, name, None)) for name in _METHODS):
        return cast(Costs, given)
    raise _no_costs(given)


def checked(given: object) -> Costs:
    """The costs, with a check of each price that is asked for: who weighs prices asks through it.

    Raises:
        CostError: SK323 for what prices no nodes; the methods of the result raise it for what is no price, and name
            the node.
    """
    if isinstance(given, Checked):
        return given
    if isinstance(given, type) or not callable(getattr(given, "seconds", None)):
        raise _no_costs(given)
    return Checked(given)


def _no_costs(given: object) -> CostError:
    return CostError(
        "SK323",
        f"{shown(given):.100} prices no nodes",
        "Give what splitkit.costs makes of the graph, such as splitkit.costs.roofline(gm, 'h200').",
    )


def as_given(costs: object) -> Any:
    """Costs as they were given, without the check: for questions of what kind they are."""
    return costs.costs if isinstance(costs, Checked) else costs


@dataclass(frozen=True)
class Checked:
    """Costs whose every price is checked when it is asked for; all else is that of the costs.

    Attributes:
        costs: as they were given.
    """

    costs: Any

    def __getattr__(self, name: str) -> Any:
        if name == "costs":  # not yet there while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.costs, name)

    def seconds(self, node: Node) -> float:
        """Of the node, SK323 for what are none."""
        value = self._asked("seconds", node)
        if type(value) is float and 0.0 <= value <= MOST_SECONDS:
            return value
        return self._number("seconds", node, value, MOST_SECONDS)

    def flops(self, node: Node) -> float:
        """Of the node, SK323 for what are none."""
        return self._number("flops", node, self._asked("flops", node), MOST_SECONDS)

    def nbytes(self, node: Node) -> int:
        """Of the node, SK323 for what are none."""
        return self._bytes("nbytes", node, self._asked("nbytes", node))

    def param_bytes(self, node: Node) -> int:
        """Of the node, SK323 for what are none."""
        return self._bytes("param_bytes", node, self._asked("param_bytes", node))

    def _asked(self, what: str, node: Node) -> object:
        try:
            return getattr(self.costs, what)(node)
        except SplitError:
            raise
        except Exception as error:
            reason = f"{self._name}.{what}({node.name}) fails: {type(error).__name__}: {error}"
            raise CostError("SK323", reason, "Costs answer for every node of their graph.", [node]) from error

    def _number(self, what: str, node: Node, value: object, most: float) -> float:
        if not is_number(value) or float(value) > most:
            raise self._wrong(what, node, value, f"a number, 0 or more and {most:.0e} at most")
        return float(value)

    def _bytes(self, what: str, node: Node, value: object) -> int:
        if is_whole(value) and value <= MOST_BYTES:
            return int(value)
        if is_number(value) and float(value) <= MOST_BYTES and float(value).is_integer():
            return int(value)
        raise self._wrong(what, node, value, "a whole number of bytes, 0 or more and 1 PiB at most")

    def _wrong(self, what: str, node: Node, value: object, must: str) -> CostError:
        reason = f"{self._name}.{what}({node.name}) is {shown(value)}"
        return CostError("SK323", reason, f"Give every node {must}.", [node])

    @property
    def _name(self) -> str:
        return type(self.costs).__name__


_METHODS = ("seconds", "flops", "nbytes", "param_bytes")
