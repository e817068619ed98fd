"""What a plan was priced with: name, unit and parameters of its costs, so that others can price its graph alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from splitkit.short_repr import brief

Kind = Literal["flops", "unit", "roofline", "fused", "table"]
KINDS: tuple[Kind, ...] = ("flops", "unit", "roofline", "fused", "table")
MOST_LETTERS = 200
"""The longest name and unit of a record: they stand in titles and beside numbers."""


class LazyPrices(Mapping[str, float]):
    """Prices by the name of a node, found when somebody first reads them: most plans are never written to a file."""

    def __init__(self, find: Callable[[], dict[str, float]]) -> None:
        self._find = find

    @cached_property
    def _rows(self) -> dict[str, float]:
        return self._find()

    def __getitem__(self, name: str) -> float:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._rows,)


@dataclass(frozen=True)
class PriceRecord:
    """The prices that a plan was made with, as data; `splitkit.costs.recorded.costs_of` makes costs of it again.

    Attributes:
        name: what people read: ``"roofline of h100-80gb, backward op by op"``.
        kind: the function of `splitkit.costs` that prices the nodes; ``"table"`` for measured prices and for costs of
            a class of your own, whose prices stand in ``table``.
        unit: the unit of the prices: ``"s"``, ``"TFLOP"``, ``"nodes"``, or a word of your own.
        device: the fields of the `splitkit.costs.Device` of a roofline.
        tf32: whether products of float32 may be rounded.
        training: whether `splitkit.costs.training` adds the backward to these prices.
        table: name of a node -> its price.
        backward: name of a node -> its backward as a multiple of its forward, if the prices of the table include it.
        mesh: dimension of a mesh -> the fields of the `splitkit.costs.Link` of its collectives, for a roofline.
        live: the root of the graph and the costs themselves, in the process that made the plan: they need not be made
            again. They are not copied to files or other processes.
    """

    name: str
    kind: Kind = "table"
    unit: str = "s"
    device: Mapping[str, Any] | None = None
    tf32: bool = False
    training: bool = False
    table: Mapping[str, float] | None = field(default=None, repr=False)
    backward: Mapping[str, float] | None = field(default=None, repr=False)
    mesh: Mapping[str, Mapping[str, Any]] | None = field(default=None, repr=False)
    live: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)

    __repr__ = brief

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None}


def printable(text: object, most: int = MOST_LETTERS) -> str:
    """Return a text for people: without control characters, and not too long."""
    found = "".join(letter if letter.isprintable() else " " for letter in str(text)[: most + 1])
    return found if len(found) <= most else found[: most - 3] + "..."
