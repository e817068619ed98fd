"""The base class of explanations: paragraphs and tables, as text, on a terminal and in a notebook."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from splitkit.short_repr import brief
from splitkit.view.console import to_text
from splitkit.view.page.html import html_table
from splitkit.view.svg.drawing import escaped

if TYPE_CHECKING:
    from rich.table import Table

Section = Union[str, "Table"]
_WIDTH = 110  # letters of a line


class Told(ABC):
    """An object that is told in paragraphs and tables; ``print`` shows them, and a notebook shows HTML."""

    @abstractmethod
    def sections(self) -> Sequence[Section]:
        """Return the paragraphs and tables, in order."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""

    def lines(self) -> list[Section]:
        """Return paragraphs in lines of bounded length and tables, with empty lines between, for a terminal."""
        found: list[Section] = []
        for section in self.sections():
            is_item = isinstance(section, str) and section.startswith("- ")
            found += [] if is_item or not found else [""]
            found.append(wrapped(section) if isinstance(section, str) else section)
        return found

    def __str__(self) -> str:
        return "\n".join(line if isinstance(line, str) else to_text(line) for line in self.lines())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return text, and HTML in which everything that comes from the model is escaped."""
        inner = "".join(_html(section) for section in self.sections())
        return {"text/plain": str(self), "text/html": f'<div style="font:13px/1.5 sans-serif;margin:4px">{inner}</div>'}


@dataclass(frozen=True)
class Explanation(Told):
    """Why a plan, or the place of a node, is as it is.

    Attributes:
        data: the same as plain data.
        said: the paragraphs and tables.
    """

    data: Mapping[str, Any]
    said: tuple[Section, ...]

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; times are in ``unit``, sizes in bytes."""
        return dict(self.data)

    def sections(self) -> Sequence[Section]:
        """Return the paragraphs and tables."""
        return [section for section in self.said if section]


def wrapped(text: str) -> str:
    """Return a paragraph in lines of bounded length; words that are longer stay whole."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _html(section: Section) -> str:
    if isinstance(section, str):
        return f'<p style="margin:6px 0">{escaped(section)}</p>'
    return html_table(section)
