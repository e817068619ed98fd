"""The frontier of a training step: the best trade-offs between memory and recompute time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from splitkit import checks
from splitkit.costs import Costs, default, unit_of
from splitkit.costs.links import HostLink, Offload, require_offload, room_of_host
from splitkit.costs.named import Price, priced, require_price
from splitkit.costs.recorded import record_of
from splitkit.display import Shown
from splitkit.engine.pair import Pair, divide
from splitkit.errors import NoPlanError, PolicyError
from splitkit.frontends.joint_capture import Joint
from splitkit.memory.profile import simulate_memory
from splitkit.plans.parts import PlanRequest
from splitkit.plans.record import Plan
from splitkit.prices import checked, require_costs
from splitkit.search.recompute.offload_planner import OffloadFrontier, OffloadPlanner, PeakFrontier
from splitkit.search.recompute.offload_search import OffloadPlan
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.short_repr import brief
from splitkit.training.choices import Choice, savings
from splitkit.training.flow import JointFlow, as_joint
from splitkit.units import duration, size
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.renderers import Picture, limit_of, pictured
from splitkit.view.svg.scatter import ScatterDrawing, ScatterPoint
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table

    from splitkit.files import PathLike


@dataclass(frozen=True, eq=False)
class Point:
    """One point of a frontier.

    Attributes:
        choice: the saved values and the recomputed nodes.
        costs: the prices by which it was found.
    """

    choice: Choice
    costs: Costs
    _peak: int | None = None
    _moved: OffloadPlan | None = None
    _planner: OffloadPlanner | None = None

    __repr__ = brief

    @cached_property
    def saved(self) -> int:
        """The bytes that forward saves for backward, beyond parameters and inputs."""
        return self.choice.nbytes

    @cached_property
    def seconds(self) -> float:
        """The recompute time, in the unit of the costs; with offload, that and the waiting for copies."""
        return self.choice.seconds + self.waits

    @property
    def waits(self) -> float:
        """The seconds that the step waits for copies to and from the host."""
        return 0.0 if self._moved is None else self._moved.run.exposed

    @property
    def host(self) -> int:
        """The bytes that are on the host when forward ends."""
        return 0 if self._moved is None else self._moved.run.host

    @cached_property
    def plan(self) -> Plan:
        """The plan, for `Joint.split` and the like."""
        peak = "" if self._peak is None else f"peak {size(self._peak)}, "
        again = duration(self.choice.seconds, self.choice.savings.time_unit)
        note = f"frontier: {peak}{size(self.saved)} saved, {again} computed again"
        if self._moved is None or self._planner is None:
            found = self.choice.plan(note)
        else:
            note += f", {size(self.host)} on the host, {duration(self.waits)} waited for copies"
            request = PlanRequest(offload=asdict(self._planner.model.link))
            found = replace(self._planner.described(self._moved, note), request=request)
        return replace(found, prices=record_of(self.costs, self.choice.savings.flow))

    @cached_property
    def pair(self) -> Pair:
        """Forward and backward of that plan."""
        return divide(self.choice.savings.flow, self.plan, self.costs)

    @cached_property
    def peak(self) -> int:
        """The simulated peak of forward and backward in bytes, including parameters and inputs."""
        if self._peak is not None:
            return self._peak
        pair = self.pair
        return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def to_dict(self, peak: bool = False) -> dict[str, Any]:
        """Return the numbers as plain data."""
        moved = {} if self._moved is None else {"waits": self.waits, "host": self.host}
        return {"saved": self.saved, "seconds": self.seconds, **moved, **({"peak": self.peak} if peak else {})}


@dataclass(frozen=True, eq=False)
class Frontier(Shown):
    """The best trade-offs between memory and recompute time of a joint graph.

    ::

        frontier = Frontier(joint, splitkit.costs.roofline(joint.graph_module, "a100"))
        frontier.less(0.1).seconds             # what 10 % less memory costs
        joint.split(frontier.within(2**30).plan)

    By default it limits the *saved* bytes, and is exact: the lower convex hull over all legal plans. The peak of a
    point is simulated when you ask for it; it may rise while the saved bytes fall.

    ``Frontier(joint, costs, of="peak")`` limits the true peak. Its points are the best of all plans that searches for
    several budgets find, from ``Budget("least")`` upwards; each has a higher peak and less recompute than the one
    before. Better plans may exist. It takes about as long as those searches.

    ``Frontier(joint, costs, of="peak", offload="pcie5")`` may also move saved values to the host and back over that
    link, as `splitkit.policies.Budget` does. The seconds of its points are recompute and waiting; no point is worse
    than the frontier without offload. Prices must be in seconds.

    A frontier renders itself in a notebook. `view` is a page on which a slider goes from one point to the next and
    shows what is saved and recomputed, and the memory of each step.

    Attributes:
        joint: a joint graph, or the facts about one.
        costs: the prices of nodes; by default FLOPs.
        price: ``"fused"`` for seconds under Inductor, on the device of the costs (`splitkit.costs.named`).
        of: ``"saved"`` or ``"peak"``, the memory that is bounded.
        budgets: the number of budgets for which peaks are searched.
        offload: the link to the host, as in `splitkit.policies.Budget`; ``None`` offloads nothing.
        host: with ``offload``: the most bytes on the host; ``None`` for no limit.
    """

    joint: Joint | JointFlow
    costs: Costs | None = None
    price: Price | None = None
    of: Literal["saved", "peak"] = "saved"
    budgets: int = 8
    offload: Offload = None
    host: int | str | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        require_price(self, self.price)
        if not checks.is_word(self.of, "peak", "saved"):
            raise PolicyError("SK302", f"Frontier has of={checks.shown(self.of)}", "Give 'peak' or 'saved'.")
        if self.costs is not None:
            require_costs(self.costs)
        checks.settle(self, "budgets", checks.count)
        require_offload(self, self.offload, self.host, "Frontier(joint, costs, of='peak', ")
        if self.offload is not None and self.of != "peak":
            remedy = "Offload trades time against the peak: add of='peak'."
            raise PolicyError("SK302", f"Frontier has offload={checks.shown(self.offload)} and of={self.of!r}", remedy)

    def view(
        self,
        *,
        height: int | None = None,
        marks: Mapping[str, Mark] | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> Any:
        """Return a page whose slider goes from one point to the next, for the last line of a cell.

        Args:
            height: pixels of the frame.
            marks: name -> a point, or (bytes, seconds) of another plan to compare with, such as torch's; they appear in
                the still picture.
            memory: the bytes of the device (``"80GiB"``), drawn as a line in the picture of the memory.
            title: the title of the page.

        Raises:
            ViewError: SK901 if it cannot be drawn.
        """
        return self._framed(height, marks=marks, memory=memory, title=title)

    def to_html(
        self,
        path: PathLike,
        *,
        marks: Mapping[str, Mark] | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> None:
        """Write the page, which needs only a browser; options as for `view`.

        Raises:
            ViewError: SK901 if it cannot be drawn.
            FileError: SK504 if the file cannot be written; an existing file stays as it was.
        """
        self._write_html(path, marks=marks, memory=memory, title=title)

    def to_svg(
        self,
        path: PathLike,
        *,
        marks: Mapping[str, Mark] | None = None,
        memory: float | str | None = None,
        title: str = "",
    ) -> None:
        """Write the still picture; options as for `view`. It raises the errors of `to_html`."""
        self._write_svg(path, marks=marks, memory=memory, title=title)

    @cached_property
    def flow(self) -> JointFlow:
        """The facts about the graph; SK302 if it is not a joint graph."""
        return self.joint.flow if isinstance(self.joint, Joint) else as_joint(self, self.joint)

    @cached_property
    def _costs(self) -> Costs:
        return checked(priced(self.flow, default(self.flow) if self.costs is None else self.costs, self.price))

    @cached_property
    def hull(self) -> Hull:
        """The parametric cuts from which the points are computed."""
        return Hull(savings(self.flow, self._costs))

    @cached_property
    def _front(self) -> PeakFrontier:
        return PeakFrontier(self.flow, self._costs, self.budgets)

    @cached_property
    def _offloading(self) -> OffloadFrontier:
        link, host = HostLink.of(self.offload), room_of_host(self, self.host)
        return OffloadFrontier(self._front, self._costs, link, host)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The corners of the hull, or the best plans for the peak, by increasing bytes.

        The last point recomputes nothing that costs time.
        """
        if self.offload is not None:
            planner, plans = self._offloading.planner, self._offloading.plans
            return tuple(Point(one.seen.choice, self._costs, one.run.peak, one, planner) for one in plans)
        if self.of == "peak":
            return tuple(Point(seen.choice, self._costs, seen.peak) for seen in self._front.plans)
        return tuple(Point(choice, self._costs) for choice in self.hull.choices)

    @property
    def _spent(self) -> str:
        return "computed again" if self.offload is None else "again and waiting"

    @property
    def unit(self) -> str:
        """The unit of the costs: ``"s"``, ``"TFLOP"``, or ``"nodes"`` for `splitkit.costs.unit`."""
        return unit_of(self._costs)

    @cached_property
    def step_seconds(self) -> float:
        """The time of the step without recompute, by the same prices."""
        return sum(self._costs.seconds(node) for node in self.flow.nodes)

    def taken(self, point: Point) -> int:
        """Return the peak or the saved bytes of a point, whichever the frontier bounds."""
        return point.peak if self.of == "peak" else point.saved

    def within(self, nbytes: float | str) -> Point:
        """Return the point with the least recompute among those that need at most ``nbytes``.

        Args:
            nbytes: a number of bytes, or a text such as ``"1.5GiB"``.

        Raises:
            PolicyError: SK302 if it is not a number of bytes.
            NoPlanError: SK303 if every plan needs more; it says how much the smallest needs.
        """
        limit, least = int(min(_nbytes("within", nbytes), sys.maxsize)), self.taken(self.points[0])
        if self.of == "peak":
            found = next((point for point in reversed(self.points) if point.peak <= limit), None)
            reason = f"no plan was found whose peak is within {size(limit)}: the lowest is {size(least)}"
        else:
            choice = self.hull.within(limit)
            found = None if choice is None else Point(choice, self._costs)
            reason = f"no plan saves only {size(limit)}: what may not be computed again takes {size(least)}"
        if found is None:
            raise NoPlanError("SK303", reason, f"Allow {least} bytes.")
        return found

    def less(self, fraction: float) -> Point:
        """Return the point that needs a given share less memory than the last point: ``less(0.1)`` for 10 % less.

        Raises:
            PolicyError: SK302 for a fraction that is not from 0 to 1.
            NoPlanError: SK303 if every plan needs more.
        """
        share = checks.fraction("Frontier.less", "fraction", fraction)
        return self.within(int(self.taken(self.points[-1]) * (1 - share)))

    def bound(self, nbytes: float | str) -> float:
        """Return a lower bound on the seconds of recompute of any plan that needs at most ``nbytes``.

        For saved bytes it is the hull itself; for the peak it is proven for plans in graph order. ``nbytes`` is as in
        `within`, and raises SK302 likewise. The bound is infinite if no plan needs so few bytes.
        """
        if self.of == "peak":
            front = self._front if self.offload is None else self._offloading
            return front.bound(int(min(_nbytes("bound", nbytes), sys.maxsize)))
        return self.hull.bound(_nbytes("bound", nbytes))

    def to_dict(self, peaks: bool = False) -> dict[str, Any]:
        """Return all points as plain data; with ``peaks`` also the simulated peaks, about 10 us per node and point."""
        return {
            "of": self.of,
            "points": [point.to_dict(peaks or self.of == "peak") for point in self.points],
            "step_seconds": self.step_seconds,
            "unit": self.unit,
            "costs": getattr(self._costs, "note", ""),
        }

    def table(self, peaks: bool = False) -> Table:
        """Return all points as a table for `rich`."""
        others = ["saved"] if self.of == "peak" else ["peak"] if peaks else []
        others += ["host"] if self.offload is not None else []
        titles, rows = (self.of, "of most", self._spent, "of step", *others), []
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
    """Return a number of bytes, perhaps infinite; SK302 if it is not one."""
    return value if checks.is_number(value) else checks.nbytes(f"Frontier.{method}", "nbytes", value)


_STEPS = 6
"""The number of points on the page of a frontier. Not tuned: each one adds a ladder to the page."""

Mark = Point | tuple[float, float]
"""A plan to compare with: a point, or (bytes, seconds of recompute)."""


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
        return f"{size(frontier.taken(point))} {what}, {duration(point.seconds, frontier.unit)} {frontier._spent}"

    def svg() -> str:
        line = [ScatterPoint(frontier.taken(point), point.seconds, tooltip=told(point)) for point in frontier.points]
        others = []
        for number, (name, mark) in enumerate((marks or {}).items(), 1):
            nbytes, seconds = (frontier.taken(mark), mark.seconds) if isinstance(mark, Point) else mark
            about = f"{name}: {size(nbytes)}, {duration(seconds, frontier.unit)}"
            others.append(ScatterPoint(nbytes, seconds, name, about, True, number))
        axes = f"{what} (bytes)", frontier._spent
        return ScatterDrawing(str(frontier), axes, line, others, frontier.unit).to_svg()

    limit = limit_of(memory)

    def ladder() -> HalvesView:
        pairs = [point.pair for point in _apart(frontier)]
        return HalvesView(frontier.flow, pairs, frontier._costs, title, len(pairs) - 1, limit)

    return Picture(title or "frontier", svg, lambda: [frontier.table()], ladder)


def _apart(frontier: Frontier) -> list[Point]:
    """Return both ends of a frontier and a few points between them, evenly spaced in memory."""
    points = frontier.points
    first, last = (frontier.taken(points[i]) for i in (0, -1))
    found = {0: points[0], len(points) - 1: points[-1]}
    for part in range(1, _STEPS - 1):
        wanted = first + (last - first) * part / (_STEPS - 1)
        number = min(range(len(points)), key=lambda i: (abs(frontier.taken(points[i]) - wanted), i))
        found[number] = points[number]
    return [found[number] for number in sorted(found)]
