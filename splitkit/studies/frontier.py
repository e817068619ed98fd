"""The frontier of a training step: the best compromises between memory and recompute time, to look at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from splitkit import checks
from splitkit.brief import brief
from splitkit.costs import Costs, default, unit_of
from splitkit.costs.named import Price, priced, require_price
from splitkit.engine.pair import Pair, divide
from splitkit.errors import NoPlanError, PolicyError
from splitkit.frontends.joint import Joint
from splitkit.memory.profile import simulate_memory
from splitkit.plans.record import Plan
from splitkit.prices import checked, require_costs
from splitkit.search.recompute.hull import Hull
from splitkit.search.recompute.peakfront import PeakFront
from splitkit.search.recompute.pool import Seen
from splitkit.shown import Shown
from splitkit.training.choices import Choice, savings
from splitkit.training.flow import JointFlow, as_joint
from splitkit.units import duration, size
from splitkit.view.halves import HalvesView
from splitkit.view.pictures import Picture, limit_of, pictured
from splitkit.view.svgscatter import ScatterDrawing, Spot
from splitkit.view.tables import table

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
    _peak: int | None = None

    __repr__ = brief

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
        peak = "" if self._peak is None else f"peak {size(self._peak)}, "
        again = duration(self.seconds, self.choice.savings.unit)
        return self.choice.plan(f"frontier: {peak}{size(self.saved)} saved, {again} computed again")

    @cached_property
    def pair(self) -> Pair:
        """Forward and backward by that plan."""
        return divide(self.choice.savings.flow, self.plan, self.costs)

    @cached_property
    def peak(self) -> int:
        """Bytes alive at once in forward and backward, parameters and inputs included, as simulated."""
        if self._peak is not None:
            return self._peak
        pair = self.pair
        return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def to_dict(self, peak: bool = False) -> dict[str, Any]:
        """The numbers as plain data."""
        return {"saved": self.saved, "seconds": self.seconds, **({"peak": self.peak} if peak else {})}


@dataclass(frozen=True, eq=False)
class Frontier(Shown):
    """The best compromises between memory and recompute time of a joint graph.

    ::

        frontier = Frontier(joint, splitkit.costs.roofline(joint.graph_module, "a100"))
        frontier.less(0.1).seconds             # what 10 % less memory costs
        joint.split(frontier.within(2**30).plan)

    It bounds what is *saved*, and is exact: the lower convex hull over all legal plans. The peak of a plan is simulated
    where it is asked for, and need not fall with it.

    ``Frontier(joint, costs, of="peak")`` bounds the true peak. Its points are the best of all plans that searches for
    several budgets meet, from ``Budget("least")`` on: each with a higher peak than the last, and less to compute again;
    better ones may exist. It takes about as long as those searches.

    In a notebook a frontier draws itself; `view`, `to_html` and `to_svg` take ``marks``: name -> a point of it, or
    (bytes, seconds) of another plan to compare with, such as one of torch. The page goes from one point to the next:
    what is saved and computed again there, and the memory of each step; ``memory`` of the device is a line in it.

    Attributes:
        joint: a joint graph, or the facts about one.
        costs: prices of nodes; by default FLOPs at 1e12 a second, so that only ratios mean something.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.costs.named`).
        of: ``"saved"`` or ``"peak"``: the memory that is bounded.
        budgets: how many budgets of the peak are searched for.
    """

    joint: Joint | JointFlow
    costs: Costs | None = None
    price: Price | None = None
    of: Literal["saved", "peak"] = "saved"
    budgets: int = 8

    __repr__ = brief

    def __post_init__(self) -> None:
        require_price(self, self.price)
        if not checks.is_word(self.of, "peak", "saved"):
            raise PolicyError("SK302", f"Frontier has of={checks.shown(self.of)}", "Give 'peak' or 'saved'.")
        if self.costs is not None:
            require_costs(self.costs)
        checks.settle(self, "budgets", checks.count)

    @cached_property
    def flow(self) -> JointFlow:
        """The facts about the graph; SK302 if it is no joint graph."""
        return self.joint.flow if isinstance(self.joint, Joint) else as_joint(self, self.joint)

    @cached_property
    def _costs(self) -> Costs:
        return checked(priced(self.flow, default(self.flow) if self.costs is None else self.costs, self.price))

    @cached_property
    def hull(self) -> Hull:
        """The parametric cuts behind it."""
        return Hull.of(savings(self.flow, self._costs))

    @cached_property
    def _front(self) -> PeakFront:
        return PeakFront(self.flow, self._costs, self.budgets)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """By rising bytes: the corners of the hull, or the best plans for the peak.

        The last one computes nothing again that costs time.
        """
        if self.of == "peak":
            return tuple(self._seen(seen) for seen in self._front.plans)
        return tuple(Point(choice, self._costs) for choice in self.hull.choices)

    @property
    def unit(self) -> str:
        """What the costs count: ``"s"``, or ``"nodes"`` for `splitkit.costs.unit`."""
        return unit_of(self._costs)

    @cached_property
    def step_seconds(self) -> float:
        """Time of the step without any recompute, by the same prices."""
        return sum(self._costs.seconds(node) for node in self.flow.nodes)

    def _seen(self, seen: Seen) -> Point:
        return Point(seen.choice, self._costs, seen.peak)

    def taken(self, point: Point) -> int:
        """Bytes of the memory that is bounded."""
        return point.peak if self.of == "peak" else point.saved

    def within(self, nbytes: float | str) -> Point:
        """The point that takes at most so many bytes and, of those on the frontier, computes least again.

        Args:
            nbytes: a number of bytes, or a text such as ``"1.5GiB"``.

        Raises:
            PolicyError: SK302 for what is no number of bytes.
            NoPlanError: SK303 when every plan takes more; it says how much the least is.
        """
        limit = int(min(_nbytes("within", nbytes), sys.maxsize))
        if self.of == "peak":
            return self._within_peak(limit)
        choice = self.hull.within(limit)
        if choice is None:
            least = self.points[0].saved
            raise NoPlanError(
                "SK303",
                f"no plan saves only {size(limit)}: what may not be computed again takes {size(least)}",
                f"Allow {least} bytes.",
            )
        return Point(choice, self._costs)

    def _within_peak(self, limit: int) -> Point:
        seen = self._front.within(limit)
        if seen is None:
            least = self.points[0].peak
            raise NoPlanError(
                "SK303",
                f"no plan was found whose peak is within {size(limit)}: the lowest is {size(least)}",
                f"Allow {least} bytes.",
            )
        return self._seen(seen)

    def less(self, fraction: float) -> Point:
        """The point that takes that share less than the last point of all: ``less(0.1)`` for 10 %.

        Raises:
            PolicyError: SK302 for a fraction that is not from 0 to 1.
            NoPlanError: SK303 when every plan takes more.
        """
        share = checks.fraction("Frontier.less", "fraction", fraction)
        return self.within(int(self.taken(self.points[-1]) * (1 - share)))

    def bound(self, nbytes: float | str) -> float:
        """Seconds of recompute that no plan can do without which takes at most so many bytes.

        Of saved bytes the hull itself; of the peak what is proven for plans in the order of the graph. Bytes are given
        as to `within`; SK302 likewise. Infinite if no plan takes so few.
        """
        if self.of == "peak":
            return self._front.bound(int(min(_nbytes("bound", nbytes), sys.maxsize)))
        return self.hull.bound(_nbytes("bound", nbytes))

    def to_dict(self, peaks: bool = False) -> dict[str, Any]:
        """All points as plain data; with simulated peaks if asked, about 10 us a node each."""
        return {
            "of": self.of,
            "points": [point.to_dict(peaks or self.of == "peak") for point in self.points],
            "step_seconds": self.step_seconds,
            "unit": self.unit,
            "costs": getattr(self._costs, "note", ""),
        }

    def table(self, peaks: bool = False) -> Table:
        """All points as a table for `rich`, which shows it whole."""
        others = ["saved"] if self.of == "peak" else ["peak"] if peaks else []
        titles, rows = (self.of, "of most", "computed again", "of step", *others), []
        most, step = self.taken(self.points[-1]) or 1, self.step_seconds or 1.0
        for point in self.points:
            taken = self.taken(point)
            numbers = (size(taken), f"{taken / most:.1%}", duration(point.seconds, self.unit))
            rows.append((*numbers, f"{point.seconds / step:.1%}", *(size(getattr(point, other)) for other in others)))
        return table(titles, rows, titles, getattr(self._costs, "note", ""), spare=(*others, "of most", "of step"))

    def __str__(self) -> str:
        first, last = self.points[0], self.points[-1]
        what = "at the peak" if self.of == "peak" else "saved"
        ends = f"{size(self.taken(first))} {what} for {duration(first.seconds, self.unit)}, to {size(self.taken(last))}"
        return f"{len(self.points)} points: {ends} for {duration(last.seconds, self.unit)}"


def _nbytes(method: str, value: float | str) -> float:
    """A number of bytes as it was given, perhaps infinite; SK302 for what is none."""
    return value if checks.is_number(value) else checks.nbytes(f"Frontier.{method}", "nbytes", value)


_STEPS = 6
"""Points of a frontier that its page goes through."""

Mark = Point | tuple[float, float]
"""What is compared: a point, or (bytes, seconds of recompute)."""


@pictured.register
def _frontier(
    frontier: Frontier,
    *,
    marks: Mapping[str, Mark] | None = None,
    memory: float | str | None = None,
    title: str = "",
) -> Picture:
    what = "peak" if frontier.of == "peak" else "saved for backward"

    def told(point: Point) -> str:
        return f"{size(frontier.taken(point))} {what}, {duration(point.seconds, frontier.unit)} computed again"

    def svg() -> str:
        line = [Spot(frontier.taken(point), point.seconds, told=told(point)) for point in frontier.points]
        others = []
        for number, (name, mark) in enumerate((marks or {}).items(), 1):
            nbytes, seconds = (frontier.taken(mark), mark.seconds) if isinstance(mark, Point) else mark
            about = f"{name}: {size(nbytes)}, {duration(seconds, frontier.unit)}"
            others.append(Spot(nbytes, seconds, name, about, True, number))
        axes = f"{what} (bytes)", "computed again"
        return ScatterDrawing(str(frontier), axes, line, others, frontier.unit).to_svg()

    limit = limit_of(memory)

    def ladder() -> HalvesView:
        pairs = [point.pair for point in _apart(frontier)]
        return HalvesView(frontier.flow, pairs, frontier._costs, title, len(pairs) - 1, limit)

    return Picture(title or "frontier", svg, lambda: [frontier.table()], ladder)


def _apart(frontier: Frontier) -> list[Point]:
    """Both ends, and a few between them whose memory is far apart."""
    points = frontier.points
    first, last = (frontier.taken(points[i]) for i in (0, -1))
    found = {0: points[0], len(points) - 1: points[-1]}
    for part in range(1, _STEPS - 1):
        wanted = first + (last - first) * part / (_STEPS - 1)
        number = min(range(len(points)), key=lambda i: (abs(frontier.taken(points[i]) - wanted), i))
        found[number] = points[number]
    return [found[number] for number in sorted(found)]
