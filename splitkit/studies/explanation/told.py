"""The base class of explanations: paragraphs and tables, as text, on a terminal and in a notebook."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Union

from splitkit.search.plan_figures import StageFigures
from splitkit.search.recompute.plan_pool import Seen
from splitkit.short_repr import brief
from splitkit.training.offload_timeline import OffloadRun
from splitkit.units import duration, size
from splitkit.view.console import to_text
from splitkit.view.page.html import html_table
from splitkit.view.svg.drawing import escaped
from splitkit.view.tables import table

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
            if isinstance(section, str):  # words that are longer stay whole
                section = textwrap.fill(section, _WIDTH, break_long_words=False, break_on_hyphens=False)
            found.append(section)
        return found

    def __str__(self) -> str:
        return "\n".join(line if isinstance(line, str) else to_text(line) for line in self.lines())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return text, and HTML in which everything that comes from the model is escaped."""
        paragraph = '<p style="margin:6px 0">{}</p>'
        sections = (paragraph.format(escaped(s)) if isinstance(s, str) else html_table(s) for s in self.sections())
        inner = "".join(sections)
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


# What one plan costs beside another: the figures that a comparison and an explanation show.


_SAME = 1e-9  # relative: times that differ by rounding
_MOST_LETTERS = 100  # of a reason in a table


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of two plans; less is better.

    Attributes:
        name: such as ``"slowest stage"``.
        first: of the first plan; ``None`` if it has none.
        second: of the second plan; ``None`` likewise.
        unit: ``"bytes"``, the unit of times, or ``""`` for a number.
    """

    name: str
    first: float | None
    second: float | None
    unit: str

    @property
    def better(self) -> str:
        """``"first"``, ``"second"``, or ``""`` where neither is better."""
        if self.first is None or self.second is None:
            return ""
        if abs(self.first - self.second) <= _SAME * max(abs(self.first), abs(self.second)):
            return ""
        return "first" if self.first < self.second else "second"

    @property
    def change(self) -> str:
        """What the second plan has more, such as ``"+2.0 %"``; empty if one of them has no such figure."""
        if self.first is None or self.second is None:
            return ""
        if not self.better:
            return "none"
        if not self.first:
            return f"+{figure_text(self.second, self.unit)}"
        return f"{(self.second / self.first - 1) * 100:+.1f} %"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "better": self.better or None}


@dataclass(frozen=True)
class ChangedPlan:
    """A plan in which one thing is changed, beside the plan that is explained.

    Attributes:
        change: what is changed, such as ``"one more device"``.
        figures: what both plans cost, the one that is explained first; empty if there is no such plan.
        refusal: why there is none.
    """

    change: str
    figures: tuple[ComparedFigure, ...]
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        figures = [figure.to_dict() for figure in self.figures]
        return {"change": self.change, "figures": figures, "refusal": self.refusal or None}


def figure_text(value: float | None, unit: str) -> str:
    """Return a figure with its unit, ``-`` for none."""
    if value is None:
        return "-"
    if not unit:
        return f"{value:,.0f}"
    return size(value) if unit == "bytes" else duration(value, unit)


def changes_table(title: str, changes: Sequence[ChangedPlan]) -> Table:
    """Return a row for each changed plan: its figures, and how the first of them changes.

    Args:
        title: the title of the first column.
        changes: the changed plans.
    """
    names = [*dict.fromkeys(figure.name for one in changes for figure in one.figures)]
    rows = []
    for one in changes:
        own = {figure.name: figure for figure in one.figures}
        cells = [figure_text(own[name].second, own[name].unit) if name in own else "-" for name in names]
        effect = next((f"{figure.name} {figure.change}" for figure in one.figures if figure.better), "none")
        why = one.refusal  # the data have all of it
        short = why if len(why) <= _MOST_LETTERS else f"{why[: _MOST_LETTERS - 3].rstrip()}..."
        rows.append([one.change, *cells, f"no plan: {short}" if why else effect])
    return table((title, *names, "change"), rows, tuple(names))


def compared_stages(one: StageFigures, two: StageFigures, unit: str) -> list[ComparedFigure]:
    """Return the figures of two plans of a forward graph.

    Args:
        one: those of the first plan.
        two: those of the second.
        unit: the unit of the times.
    """
    found = [
        ComparedFigure("slowest stage", one.value, two.value, unit),
        ComparedFigure("bytes that cross", one.traffic, two.traffic, "bytes"),
    ]
    if one.step is not None or two.step is not None:
        found.insert(1, ComparedFigure("step", one.step, two.step, unit))
    if one.held and two.held:
        found.append(ComparedFigure("fullest device", max(one.peaks), max(two.peaks), "bytes"))
    return found


def compared_steps(
    one: Seen, two: Seen, unit: str, has_peak: bool, moved: Sequence[OffloadRun | None] = (None, None)
) -> list[ComparedFigure]:
    """Return the figures of two plans of a training step on one device.

    Args:
        one: the first plan, simulated.
        two: the second.
        unit: the unit of the times.
        has_peak: whether the peaks of the simulation are those of the plans.
        moved: the run of each plan whose values wait on the host.
    """
    peak, later = (seen.peak if run is None else run.peak for seen, run in zip((one, two), moved, strict=True))
    waits, longer = (0.0 if run is None else run.exposed for run in moved)
    return [
        *([ComparedFigure("peak", peak, later, "bytes")] if has_peak else []),
        ComparedFigure("saved for backward", one.saved, two.saved, "bytes"),
        ComparedFigure("recompute", one.seconds, two.seconds, unit),
        *([ComparedFigure("waiting for copies", waits, longer, unit)] if any(moved) else []),
    ]
