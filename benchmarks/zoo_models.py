"""What `zoo.py` takes through the library: an architecture a row, made with random weights and tiny sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Row:
    """An architecture.

    Attributes:
        name: what it is called in the table.
        family: what it is grouped by.
        package: what must be installed.
        make: whether it is to be trained -> the module as its constructor leaves it, and the keyword inputs that its
            documentation calls it with: with labels to train, without otherwise.
        modes: what it makes sense in.
    """

    name: str
    family: str
    package: str
    make: Callable[[bool], tuple[nn.Module, Mapping[str, Any]]]
    modes: tuple[str, ...] = ("eval", "train")

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def rows() -> Iterator[Row]:
    """All of them, in the order of the table."""
    import zoo_nets
    import zoo_packages
    import zoo_senses
    import zoo_transformers

    for module in (zoo_transformers, zoo_senses, zoo_packages, zoo_nets):
        yield from module.ROWS
