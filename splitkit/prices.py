"""The protocol of costs, which price the nodes of a graph, and the check of every price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from torch.fx import Node

from splitkit.checks import is_number, is_whole, shown
from splitkit.errors import CostError, SplitError, ViewError
from splitkit.units import measure

Optimizer = Literal["adam", "adamw", "momentum", "sgd"] | None
"""The name of the optimizer whose state counts in training; ``None`` for inference."""


def unit_of(costs: object) -> str:
    """Return the unit of ``seconds`` of these costs: ``"s"`` for time, ``"TFLOP"``, or another word to print."""
    return str(getattr(costs, "unit", "s"))


def price_name(costs: object) -> str:
    """Return what people call these costs: their ``note``, or what they count, or their class."""
    given, unit = as_given(costs), unit_of(costs)
    return str(getattr(given, "note", "") or (type(given).__name__ if unit == "s" else measure(unit)))


def require_times(*priced: object) -> None:
    """Refuse to draw a schedule by prices that are not times: it would show times that nobody predicted.

    Args:
        priced: costs, or a simulated step.

    Raises:
        ViewError: SK903.
    """
    if unit := next((unit for unit in map(unit_of, priced) if unit != "s"), ""):
        raise untimed_error(measure(unit))


def untimed_error(what: str) -> ViewError:
    """Return the error for a schedule that is to be drawn by prices of ``what``."""
    return ViewError(
        "SK903",
        f"a schedule is drawn over time, but the prices are {what}",
        "Give prices in seconds: --costs roofline:h100 on the command line, or "
        "costs=splitkit.costs.roofline(gm, 'h100'), to the plan or to the picture and `stage_costs`.",
    )


def includes_backward(costs: object) -> bool:
    """Return whether ``seconds`` of these costs include the backward of a node, and ``backward`` says how much."""
    return hasattr(costs, "backward")


def asked_of_costs(costs: object, name: str) -> Any:
    """Return an attribute of costs, or of the costs that they wrap; ``None`` if none has it."""
    given = as_given(costs)
    while not hasattr(given, name) and (inner := getattr(given, "costs", None)) is not None:
        given = as_given(inner)
    return getattr(given, name, None)


def kernels_of(costs: object) -> str | None:
    """Return the kernels of the device that costs are for; ``None`` if they are for no known device."""
    kernels = getattr(asked_of_costs(costs, "device"), "kernels", None)
    return kernels if isinstance(kernels, str) else None


class Costs(Protocol):
    """Prices of the nodes of one graph."""

    def seconds(self, node: Node) -> float:
        """Return the time to run ``node``, comparable within one graph; real seconds only if the costs were measured.

        Costs that count something else have an attribute ``unit``: `splitkit.costs.unit` counts nodes. Costs whose
        seconds include a node's backward have a method ``backward(node)`` that returns backward as a multiple of
        forward.
        """
        ...

    def flops(self, node: Node) -> float:
        """Return the floating-point operations of ``node``."""
        ...

    def nbytes(self, node: Node) -> int:
        """Return the bytes of the value of ``node``.

        A view has its own size; a symbolic size counts as seen at capture.
        """
        ...

    def param_bytes(self, node: Node) -> int:
        """Return the bytes of the parameters and buffers that ``node`` reads.

        Every reader of a parameter counts it, so a caller that adds them up must count each attribute once.
        """
        ...


MOST_SECONDS, MOST_BYTES = 1e100, 2**50
"""The highest prices of one node. Sums and products of many prices stay finite as floats and exact as 64-bit ints."""


def require_costs(given: object) -> Costs:
    """Return the costs as they were given.

    Raises:
        CostError: SK323 if they lack one of the four methods.
    """
    if not isinstance(given, type) and all(callable(getattr(given, name, None)) for name in _METHODS):
        return cast(Costs, given)
    raise _no_costs(given)


def checked(given: object) -> Costs:
    """Return the costs with a check of every price; whoever compares prices uses these.

    Raises:
        CostError: SK323 if they do not price nodes. The methods of the result raise it for a price that is not a
            number in range, and name the node.
    """
    if isinstance(given, Checked):
        return given
    if isinstance(given, type) or not callable(getattr(given, "seconds", None)):
        raise _no_costs(given)
    return Checked(given)


def _no_costs(given: object) -> CostError:
    return CostError(
        "SK323",
        f"{shown(given):.100} does not price nodes",
        "Give costs of the graph, such as splitkit.costs.roofline(gm, 'h200').",
    )


def as_given(costs: object) -> Any:
    """Return the costs without the check, to ask of what kind they are."""
    return costs.costs if isinstance(costs, Checked) else costs


@dataclass(frozen=True)
class Checked:
    """Costs that check every price; all other attributes are those of the costs inside.

    Attributes:
        costs: the costs as they were given.
    """

    costs: Any

    def __getattr__(self, name: str) -> Any:
        if name == "costs":  # not set yet while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.costs, name)

    def seconds(self, node: Node) -> float:
        """Return the seconds of a node; SK323 if they are not a number in range."""
        value = self._asked("seconds", node)
        if type(value) is float and 0.0 <= value <= MOST_SECONDS:
            return value
        return self._number("seconds", node, value, MOST_SECONDS)

    def flops(self, node: Node) -> float:
        """Return the FLOPs of a node; SK323 if they are not a number in range."""
        return self._number("flops", node, self._asked("flops", node), MOST_SECONDS)

    def nbytes(self, node: Node) -> int:
        """Return the bytes of the value of a node; SK323 if they are not a number in range."""
        return self._bytes("nbytes", node, self._asked("nbytes", node))

    def param_bytes(self, node: Node) -> int:
        """Return the bytes of the parameters of a node; SK323 if they are not a number in range."""
        return self._bytes("param_bytes", node, self._asked("param_bytes", node))

    def backward_ratio(self, node: Node) -> float:
        """Return the backward of a node as a multiple of its forward; SK323 if it is not a number in range."""
        must = "a backward as a multiple of its forward"
        return self._number("backward", node, self._asked("backward", node), MOST_SECONDS, must)

    def _asked(self, what: str, node: Node) -> object:
        try:
            return getattr(self.costs, what)(node)
        except SplitError:
            raise
        except Exception as error:
            reason = f"{self._name}.{what}({node.name}) fails: {type(error).__name__}: {error}"
            raise CostError("SK323", reason, "Costs must price every node of their graph.", [node]) from error

    def _number(self, what: str, node: Node, value: object, most: float, must: str = "a number") -> float:
        if not is_number(value) or float(value) > most:
            raise self._wrong(what, node, value, f"{must}, 0 or more and {most:.0e} at most")
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
