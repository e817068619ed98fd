"""The frontier of a training step: every best compromise between saved bytes and recompute time, to look at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from splitkit.costs import Costs, default, unit_of
from splitkit.errors import NoPlanError, PolicyError
from splitkit.frontierplot import FrontierPlot, Spot
from splitkit.halves import JointFlow, as_joint
from splitkit.joint import Joint
from splitkit.memory import simulate_memory
from splitkit.pair import Pair, divide
from splitkit.plan import Plan
from splitkit.policies.hull import Hull
from splitkit.policies.pricing import Price, priced, require_price
from splitkit.savings import Choice, savings
from splitkit.units import duration, read_size, size

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, eq=False)
class Point:
    """One compromise.

    Attributes:
        choice: what is saved and what is computed again.
        costs: the prices that it was found by.
    """

    choice: Choice
    costs: Costs

    @cached_property
    def saved(self) -> int:
        """Bytes that forward saves for backward, beyond parameters and inputs."""
        return self.choice.nbytes

    @cached_property
    def seconds(self) -> float:
        """Time spent on computing again, in the unit of the costs."""
        return self.choice.seconds

    @cached_property
    def plan(self) -> Plan:
        """The plan, for `Joint.split` and the like."""
        again = duration(self.seconds, self.choice.savings.unit)
        return self.choice.plan(f"frontier: {size(self.saved)} saved, {again} computed again")

    @cached_property
    def pair(self) -> Pair:
        """Forward and backward by that plan."""
        return divide(self.choice.savings.flow, self.plan, self.costs)

    @cached_property
    def peak(self) -> int:
        """Bytes alive at once in forward and backward, parameters and inputs included, as simulated."""
        pair = self.pair
        return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def to_dict(self, peak: bool = False) -> dict[str, Any]:
        """The numbers as plain data."""
        return {"saved": self.saved, "seconds": self.seconds, **({"peak": self.peak} if peak else {})}


@dataclass(frozen=True, eq=False)
class Frontier:
    """The lower convex hull of (saved bytes, recompute seconds) over all legal plans of a joint graph.

    ::

        frontier = Frontier(joint, splitkit.costs.roofline(joint.graph_module, "a100"))
        frontier.less(0.1).seconds             # what 10 % less memory costs
        joint.split(frontier.within(2**30).plan)

    It bounds what is *saved*; the peak of a plan is simulated where it is asked for, and need not fall with it. In a
    notebook it draws itself.

    Attributes:
        joint: a joint graph, or the facts about one.
        costs: prices of nodes; by default FLOPs at 1e12 a second, so that only ratios mean something.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.policies.pricing`).
    """

    joint: Joint | JointFlow
    costs: Costs | None = None
    price: Price | None = None

    def __post_init__(self) -> None:
        require_price(self, self.price)

    @cached_property
    def flow(self) -> JointFlow:
        """The facts about the graph; SK302 if it is no joint graph."""
        return self.joint.flow if isinstance(self.joint, Joint) else as_joint(self, self.joint)

    @cached_property
    def _costs(self) -> Costs:
        return priced(self.flow, self.costs or default(self.flow.root), self.price)

    @cached_property
    def hull(self) -> Hull:
        """The parametric cuts behind it."""
        return Hull.of(savings(self.flow, self._costs))

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The corners of the hull, by rising saved bytes; the last one computes nothing again that costs time."""
        return tuple(Point(choice, self._costs) for choice in self.hull.choices)

    @property
    def unit(self) -> str:
        """What the costs count: ``"s"``, or ``"nodes"`` for `splitkit.costs.unit`."""
        return unit_of(self._costs)

    @cached_property
    def step_seconds(self) -> float:
        """Time of the step without any recompute, by the same prices."""
        return sum(self._costs.seconds(node) for node in self.flow.nodes)

    def within(self, nbytes: float | str) -> Point:
        """The point that saves at most so many bytes and, of those on the hull, computes least again.

        Args:
            nbytes: a number of bytes, or a text such as ``"1.5GiB"``.

        Raises:
            PolicyError: SK302 for what is no number of bytes.
            NoPlanError: SK303 when every plan saves more; it says how much the least is.
        """
        limit = int(min(_nbytes("within", nbytes), sys.maxsize))
        choice = self.hull.within(limit)
        if choice is None:
            least = self.points[0].saved
            raise NoPlanError(
                "SK303",
                f"no plan saves only {size(limit)}: what may not be computed again takes {size(least)}",
                f"Allow {least} bytes.",
            )
        return Point(choice, self._costs)

    def less(self, fraction: float) -> Point:
        """The point that saves that share less than the last point of all: ``less(0.1)`` for 10 %.

        Raises:
            PolicyError: SK302 for a fraction that is not from 0 to 1.
            NoPlanError: SK303 when every plan saves more.
        """
        if not _is_number(fraction) or not 0 <= fraction <= 1:
            raise PolicyError("SK302", f"less({fraction!r}) is no share", "Give a number from 0 to 1: 0.1 for 10 %.")
        return self.within(int(self.points[-1].saved * (1 - fraction)))

    def bound(self, nbytes: float | str) -> float:
        """Seconds of recompute that no plan can do without which saves at most so many bytes; the hull itself.

        Bytes are given as to `within`; SK302 likewise. Infinite if no plan saves so few.
        """
        return self.hull.bound(_nbytes("bound", nbytes))

    def to_dict(self, peaks: bool = False) -> dict[str, Any]:
        """All points as plain data; with simulated peaks if asked, about 10 us a node each."""
        points = [point.to_dict(peaks) for point in self.points]
        return {
            "points": points,
            "step_seconds": self.step_seconds,
            "unit": self.unit,
            "costs": getattr(self._costs, "note", ""),
        }

    def table(self, peaks: bool = False) -> Table:
        """All points as a table for `rich`, which shows it whole."""
        from rich.table import Table

        table = Table(title=getattr(self._costs, "note", "") or None, title_justify="left")
        for title in ("saved", "of most", "computed again", "of step", *(["peak"] if peaks else [])):
            table.add_column(title, justify="right", no_wrap=True)
        most, step = self.points[-1].saved or 1, self.step_seconds or 1.0
        for point in self.points:
            numbers = (size(point.saved), f"{point.saved / most:.1%}", duration(point.seconds, self.unit))
            table.add_row(*numbers, f"{point.seconds / step:.1%}", *([size(point.peak)] if peaks else []))
        return table

    def to_svg(self, marks: Mapping[str, Spot] | None = None) -> str:
        """A picture that stands alone.

        Args:
            marks: name -> (saved bytes, seconds) of other plans to compare with, such as those of torch.
        """
        return FrontierPlot([(point.saved, point.seconds) for point in self.points], marks or {}, self.unit).to_svg()

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __str__(self) -> str:
        first, last = self.points[0], self.points[-1]
        ends = f"{size(first.saved)} saved for {duration(first.seconds, self.unit)}, to {size(last.saved)}"
        return f"{len(self.points)} points: {ends} for {duration(last.seconds, self.unit)}"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _nbytes(method: str, value: float | str) -> float:
    """A number of bytes as it was given, perhaps infinite; SK302 for what is none."""
    found = read_size(value) if isinstance(value, str) else value
    if found is None or not _is_number(found) or not found >= 0:
        raise PolicyError(
            "SK302", f"{method}({value!r}) is no number of bytes", "Give bytes, not negative: 2**30, or '1GiB'."
        )
    return found
