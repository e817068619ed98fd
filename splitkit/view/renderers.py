"""Decides how each kind of object is drawn, and makes its still picture, its page and what a notebook shows.

`splitkit.display.Shown` calls `bundle`, `svg`, `html` and `view`. Packages above this one register the pictures of
their own classes with ``pictured.register``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, singledispatch
from typing import TYPE_CHECKING, Any

from torch import fx

from splitkit._torch import target_name
from splitkit.checks import is_word, items_of, nbytes
from splitkit.costs import Costs, flops, unit_of
from splitkit.engine.pair import Pair, divide
from splitkit.engine.split import Split, plan
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import CaptureError, SplitError, ViewError
from splitkit.graph.dataflow import Dataflow, analyze, module_path
from splitkit.graph.joint_marks import forward_outputs, is_joint
from splitkit.memory.profile import MemoryProfile
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import purpose
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_prices import stage_costs
from splitkit.pipeline.trace import MeasuredStep
from splitkit.plans.parts import UNSAID, PlannedOptimizer
from splitkit.plans.record import Plan, module_of_plan, plan_of
from splitkit.prices import require_times
from splitkit.training.flow import BACKWARD, FORWARD, SavedValue
from splitkit.training.stage_parts import is_staged, stage_part
from splitkit.units import duration, measure, size
from splitkit.view.data.joint_ladder import HalvesView, source_line
from splitkit.view.data.ladder import LadderView, planned_run
from splitkit.view.data.report import Report, rank_table, report
from splitkit.view.data.staged_ladder import StagedView
from splitkit.view.page import page
from splitkit.view.page.html import FramedPage, fragment, still_page
from splitkit.view.svg.drawing import Bar, bars_svg, escaped
from splitkit.view.svg.ladder_svg import halves_svg, ladder_svg, staged_svg
from splitkit.view.svg.memory_chart import MemoryDrawing
from splitkit.view.svg.timeline import TimelineDrawing
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


_TOP = 12
"""The number of values that a picture or table names; the rest is summed up."""

_MOST_NODES = 6000
"""A notebook neither prices nor draws a larger plan by itself: it would make the reader of a cell wait."""

_MOST_PARTS = 120
"""A notebook does not draw a plan of more parts by itself: the picture has a band for each and would be too tall."""


@dataclass(frozen=True)
class Picture:
    """How an object is drawn.

    Attributes:
        title: the title of its page.
        svg: makes the still picture.
        tables: makes the tables below the picture.
        ladder: makes the data of the interactive page, for a plan or for forward and backward; ``None`` for all else.
        nodes: the number of nodes that the picture of a plan draws.
        parts: the number of parts that the picture of a plan draws.
        fallback: makes another still picture where `svg` refuses the object.
        notes: sentences below the picture.
        page: makes the picture and what follows the notes, as HTML, where a still page has more than `svg`.
    """

    title: str
    svg: Callable[[], str]
    tables: Callable[[], Iterable[Table]]
    ladder: Callable[[], LadderView | HalvesView | StagedView] | None = None
    nodes: int = 0
    parts: int = 0
    fallback: Callable[[], str] | None = None
    notes: tuple[str, ...] = ()
    page: Callable[[], tuple[str, str]] | None = None

    def inside(self, heading: str = "") -> str:
        """Return the picture, tables and notes of a still page as HTML."""
        svg, more = (self.svg(), "") if self.page is None else self.page()
        return fragment(svg, self.tables(), self.notes, heading) + more


@singledispatch
def pictured(shown: object) -> Picture:
    """Return how an object is drawn; the options are those of ``view`` in the object's class.

    Raises:
        ViewError: SK901 if the object has no picture.
    """
    raise ViewError(
        "SK901", f"a {type(shown).__name__} cannot be drawn", "Draw a plan, a split, a frontier, a profile or a run."
    )


@pictured.register
def _plan(
    plan: Plan, *, costs: Costs | None = None, memory: float | str | None = None, title: str = "", **more: Any
) -> Picture:
    gm = _module_of(plan)
    if is_joint(gm.graph) and is_staged(plan.parts):
        if unused := [name for name in ("measured", "beside") if more.pop(name, None) is not None]:
            reason = f"a plan of the stages of a training step cannot be drawn with {unused[0]}"
            raise ViewError("SK901", reason, "Draw it with costs, optimizer, memory, run and title.")
        return _stages(gm, plan, costs=costs, memory=memory, title=title, **more)
    if not plan.parts.keys() <= {FORWARD, BACKWARD} or not is_joint(gm.graph):
        return _ladder(analyze(gm), plan, costs=costs, memory=memory, title=title, **more)
    if unused := [name for name in ("run", "measured", "beside") if more.get(name) is not None]:
        reason = f"a plan of forward and backward has no stages, but {unused[0]} was given"
        raise ViewError("SK901", reason, "Draw it with costs, memory and title.")
    return _halves(gm, plan, costs=costs, memory=memory, title=title)


def _halves(
    gm: fx.GraphModule,
    plan: Plan,
    *,
    costs: Costs | None = None,
    memory: float | str | None = None,
    title: str = "",
) -> Picture:
    """Draw a plan of forward and backward as the pair of graphs that it gives."""
    prices = costs_of_plan(plan, gm) if costs is None else costs

    @cache
    def pair_picture() -> Picture:
        from splitkit.frontends.aot import joint_flow

        pair = divide(joint_flow(gm, forward_outputs(gm.graph)), plan, prices)
        return _pair(pair, costs=costs, memory=memory, title=title)

    def ladder() -> LadderView | HalvesView | StagedView:
        found = pair_picture().ladder
        assert found is not None  # `_pair` leaves it out only where the pair has no plan
        return found()

    def fallback() -> str:
        return _bars(report(gm, plan, prices))

    limit_of(memory)  # refuses a bad limit now rather than when the picture is drawn
    name = title or plan.note or "plan"
    nodes = len(gm.graph.nodes)
    return Picture(name, lambda: pair_picture().svg(), lambda: pair_picture().tables(), ladder, nodes, 2, fallback)


@pictured.register
def _staged_step(step: StagedStep, **options: Any) -> Picture:
    return _stages(_module_of(step.plan), step.plan, step, **options)


def _stages(
    gm: fx.GraphModule,
    plan: Plan,
    made: StagedStep | None = None,
    *,
    costs: Costs | None = None,
    optimizer: PlannedOptimizer = "planned",
    memory: float | str | None = None,
    run: object = None,
    title: str = "",
) -> Picture:
    """Draw a training step in stages, which is made of the plan if it is not given."""
    from splitkit.engine.divide_stages import divide_stages
    from splitkit.frontends.aot import joint_flow

    limit, held = limit_of(memory, plan), plan.request.counting(optimizer)
    prices = costs_of_plan(plan, gm) if costs is None else costs
    stages = 1 + max((part.stage for key in plan.parts if (part := stage_part(key)) is not None), default=0)
    given = checked_run(run, stages, "stages")
    if given is not None:
        require_times(given, prices)

    @cache
    def ladder() -> StagedView:
        flow = joint_flow(gm, forward_outputs(gm.graph))
        step = divide_stages(flow, plan) if made is None else made
        drawn = StagedView(flow, step, prices, title, held, limit)
        timed = given is None and drawn.stages[0].unit == "s"
        return replace(drawn, run=planned_run(plan, drawn.stages) if timed else given)

    def tables() -> list[Table]:
        view = ladder()
        return [table_of_stages(view), *([] if view.run is None else [rank_table(view.run, memory=limit)])]

    name = title or plan.note or "plan"
    return Picture(name, lambda: staged_svg(ladder()), tables, ladder, len(gm.graph.nodes), stages)


@pictured.register
def _split(split: Split, **options: Any) -> Picture:
    return _ladder(split.flow, split.plan, **options)


def _module_of(plan: Plan) -> fx.GraphModule:
    """Return the graph module whose nodes the plan places.

    Raises:
        ViewError: SK901 if the plan is empty or its graph has no module.
    """
    if (found := module_of_plan(plan)) is not None:
        return found
    what = "does not know the module of its graph" if plan else "places no node"
    raise ViewError(
        "SK901", f"the plan {what}, so it cannot be drawn alone", "splitkit.split(gm, plan).view() draws it."
    )


def _ladder(
    flow: Dataflow,
    plan: Plan,
    *,
    costs: Costs | None = None,
    optimizer: PlannedOptimizer = "planned",
    memory: float | str | None = None,
    run: object = None,
    measured: object = None,
    beside: object = None,
    title: str = "",
) -> Picture:
    run = checked_run(run, len(plan.parts), "parts")
    prices = costs_of_plan(plan, flow) if costs is None else costs
    if run is not None:
        require_times(run, prices)
    ran = None if measured is None else checked_measurement(measured, run)
    limit = limit_of(memory, plan)
    several = None if isinstance(beside, Mapping) else items_of(beside)
    others = () if beside is None else tuple(map(plan_of, [beside] if several is None else several))
    if any(node not in flow.index for other in others for node in other):
        raise ViewError("SK901", "the plan passed as beside is for another graph", "Compare plans of one graph module.")
    held = plan.request.counting(optimizer)
    if is_word(optimizer, "planned") and not plan.request.purpose:
        title = f"{title or plan.note or 'plan'}; {purpose(held)} ({UNSAID})"

    @cache
    def step() -> ScheduleRun | None:
        """Return the step that is given, or a step of the schedule that the plan was made for."""
        if run is not None or plan.request.schedule is None or unit_of(prices) != "s":
            return run
        return planned_run(plan, stage_costs(flow, plan, prices, optimizer=held))

    @cache
    def ladder() -> LadderView:
        return LadderView(flow, plan, prices, title, held, limit, step(), ran, others)

    def tables() -> list[Table]:
        ranks = [] if (made := step()) is None else [rank_table(made, memory=limit)]
        return [report(flow.root, plan, prices).table(), *ranks]

    def fallback() -> str:
        return _bars(report(flow.root, plan, prices))

    name = title or plan.note or "plan"
    return Picture(name, lambda: ladder_svg(ladder()), tables, ladder, len(flow.nodes), len(plan.parts), fallback)


def limit_of(memory: float | str | None, plan: Plan | None = None) -> int | None:
    """Return the memory limit that a picture marks, in bytes; by default the one of all ranks of the plan.

    Raises:
        PolicyError: SK302 if ``memory`` is not a number of bytes.
    """
    if memory is None and plan is not None and isinstance(plan.request.memory, int):
        return plan.request.memory
    return None if memory is None else nbytes("view", "memory", memory)


@pictured.register
def _report(found: Report) -> Picture:
    return Picture(found.note or "report", lambda: _bars(found), lambda: [found.table()])


def _bars(found: Report) -> str:
    def name(number: int) -> str:
        part = found.parts[number]
        device = f" on {part.device}" if part.device else ""
        return f"{part.part}{device}: {part.modules}"

    def bars(values: Iterable[float], text: Callable[[float], str]) -> list[Bar]:
        return [Bar(name(number), value, text(value), number) for number, value in enumerate(values)]

    groups = [
        (f"share of the {measure(found.unit)}", bars([part.share for part in found.parts], "{:.1%}".format)),
        ("bytes of parameters and buffers", bars([part.parameter_bytes for part in found.parts], size)),
    ]
    if found.sizes_known:
        groups.append(("bytes of outputs", bars([part.bytes_out for part in found.parts], size)))
    return bars_svg(f"{len(found.parts)} parts{f': {found.note}' if found.note else ''}", groups)


@pictured.register
def _run(run: ScheduleRun, *, memory: float | str | None = None) -> Picture:
    limit = limit_of(memory)
    return Picture(
        run.order.name, lambda: TimelineDrawing(run, limit).to_svg(), lambda: [rank_table(run, memory=limit)]
    )


@pictured.register
def _profile(profile: MemoryProfile, *, memory: float | str | None = None) -> Picture:
    limit = limit_of(memory)

    def tables() -> list[Table]:
        rows = [
            (buffer.name, "" if buffer.node is None else module_path(buffer.node), buffer.kind, size(buffer.nbytes))
            for buffer in profile.live_at_peak[:_TOP]
        ]
        more = len(profile.live_at_peak) - len(rows)
        title = "alive at the peak, the largest first" + (f" ({more} more)" if more else "")
        parts = [(str(key), size(part.peak), size(part.baseline)) for key, part in profile.parts.items()]
        alone = [table(("part alone", "peak", "before"), parts, ("peak", "before"))] if parts else []
        return [table(("made by", "module", "kind", "bytes"), rows, ("bytes",), title), *alone]

    return Picture("memory", MemoryDrawing(profile, limit).to_svg, tables)


@pictured.register
def _pair(pair: Pair, *, costs: Costs | None = None, memory: float | str | None = None, title: str = "") -> Picture:
    forward, backward = len(pair.forward.graph.nodes), len(pair.backward.graph.nodes)
    values = [value for value in pair.saved_values if value.nbytes]
    total = sum(value.nbytes for value in values)

    def bars() -> str:
        halves = [Bar("forward", forward, f"{forward} nodes", 0), Bar("backward", backward, f"{backward} nodes", 1)]
        groups: dict[str, list[SavedValue]] = {}
        for value in values:
            groups.setdefault(value.label, []).append(value)
        shown = sorted((_bar(label, group) for label, group in groups.items()), key=lambda bar: -bar.value)
        if left := shown[_TOP:]:
            rest = sum(bar.value for bar in left)
            shown = [*shown[:_TOP], Bar(f"{len(left)} smaller ones", rest, size(rest), 0)]
        twice = sum(len(keys) > 1 for keys in pair.plan.places.values()) if pair.plan else 0
        again = f", {twice} nodes computed again" if twice else ""
        heading = f"{size(total)} in {len(values)} values saved for backward{again}"
        return bars_svg(heading, [("graphs", halves), ("saved for backward, in bytes", shown)])

    def tables() -> list[Table]:
        rows = [(value.module or "(top level)", value.op, value.name, size(value.nbytes)) for value in values[:_TOP]]
        more = f" ({len(values) - len(rows)} more)" if len(values) > len(rows) else ""
        return [table(("module", "op", "node", "bytes"), rows, ("bytes",), f"saved, the largest first{more}")]

    title, plan, limit = title or "forward and backward", pair.plan, limit_of(memory)
    if plan is None:  # one of torch's partitioners made the pair, and does not tell from which joint graph
        return Picture(title, bars, tables)

    @cache
    def ladder() -> HalvesView:
        flow = analyze(_module_of(plan))
        prices = costs_of_plan(plan, flow) if costs is None else costs
        return HalvesView(flow, [pair], prices, title, memory=limit)

    return Picture(title, lambda: halves_svg(ladder()), tables, ladder, fallback=bars)


def _bar(label: str, values: Sequence[SavedValue]) -> Bar:
    """Return the bar of the saved values that one op of one module makes."""
    total = sum(value.nbytes for value in values)
    several = f" ×{len(values)}" if len(values) > 1 else ""
    return Bar(f"{label}{several}", total, size(total), 0, ", ".join(value.name for value in values[:_TOP]))


def bundle(shown: object) -> dict[str, str]:
    """Return an object's MIME bundle: its text, a still picture with tables as HTML, and the picture alone as SVG.

    Notebooks show the HTML; GitHub and e-mail, which drop the SVG inside it, have the picture to show. An object that
    cannot be drawn is shown as text with a note that says why: showing a value never fails.
    """
    text = str(shown)
    try:
        picture = pictured(shown)
    except SplitError as error:
        return {"text/plain": text, "text/html": fragment(_lines(text), [], [_why(error)])}
    notes = [*picture.notes]
    svg = _still(picture, notes)
    try:
        tables = list(picture.tables()) if picture.nodes <= _MOST_NODES else []
    except SplitError as error:
        tables = []
        notes.append(_why(error))
    told = {"text/plain": text, "text/html": fragment(svg if svg or tables else _lines(text), tables, notes)}
    return told | {"image/svg+xml": svg} if svg else told


def _still(picture: Picture, notes: list[str]) -> str:
    """Return the still picture or its fallback, or ``""`` if there is neither; reasons are appended to ``notes``."""
    for count, most, what in ((picture.nodes, _MOST_NODES, "nodes"), (picture.parts, _MOST_PARTS, "parts")):
        if count > most:
            notes.append(f"{count} {what} are too many to draw unless you ask: .view() and .to_svg(path) draw them.")
            return ""
    for draw in filter(None, (picture.svg, picture.fallback)):
        try:
            return draw()
        except SplitError as error:
            notes.append(_why(error))
    return ""


def _why(error: SplitError) -> str:
    return f"No picture: {error.reason}. {error.remedy}"


def _lines(text: str) -> str:
    return f'<pre style="margin:4px 8px">{escaped(text)}</pre>'


def svg(shown: object, **options: Any) -> str:
    """Return the still picture of an object as SVG."""
    return pictured(shown, **options).svg()


def html(shown: object, *, fields: Mapping[str, Any] | None = None, **options: Any) -> str:
    """Return an object's page: interactive for a plan, else a still picture with tables.

    Args:
        shown: the object.
        fields: what a plan that is saved from the page has besides, such as the model of the command line.
        options: those of the object's `view`.
    """
    return picture_html(pictured(shown, **options), fields)


def picture_html(picture: Picture, fields: Mapping[str, Any] | None = None) -> str:
    """Return the page of a picture; ``fields`` as in `html`."""
    if picture.ladder is not None:
        data = picture.ladder().to_dict()
        return page(data | {"plan": data["plan"] | fields} if fields and "plan" in data else data)
    return still_page(picture.title, picture.inside())


def fallback_html(picture: Picture, error: SplitError) -> str:
    """Return a still page for a plan that cannot be drawn as a ladder; the page says why."""
    svg = picture.fallback() if picture.fallback else ""
    return still_page(picture.title, fragment(svg, picture.tables(), [_why(error)]))


def view(shown: object, *, height: int | None = None, live: bool = False, **options: Any) -> Any:
    """Return an object's page in a frame, or with ``live`` as a widget whose changes come back to Python.

    Raises:
        ViewError: SK901 for an object without a picture, or ``live`` for one that is not interactive; SK902 if
            anywidget is not installed.
    """
    picture = pictured(shown, **options)
    if not live:
        still = partial(_still, picture, [])
        return FramedPage(picture_html(picture), height or (720 if picture.ladder else 560), still)
    ladder = picture.ladder and picture.ladder()
    if isinstance(ladder, StagedView):
        reason = "the stages of a training step cannot be moved by hand, because what each saves is planned for it"
        raise ViewError("SK901", reason, "Leave live=True out, and plan again for other stages.")
    if not isinstance(ladder, LadderView):
        raise ViewError(
            "SK901", f"a {type(shown).__name__} is not interactive", "live=True is for plans and splits; use .view()."
        )
    try:
        from splitkit.view.page.live_widget import LadderWidget
    except ModuleNotFoundError as error:
        reason = f"view(live=True) needs the package {error.name}"
        raise ViewError("SK902", reason, "pip install anywidget; .view() needs no package.") from error
    return LadderWidget(ladder, height or 720)


# Checks the steps of a pipeline, simulated and measured, that somebody gives to a picture of a plan.


def checked_run(run: object, count: int, what: str) -> ScheduleRun | None:
    """Return a simulated step that has as many stages as the plan has stages or parts.

    Raises:
        ViewError: SK901 if it has not.
    """
    if run is None:
        return None
    if not isinstance(run, ScheduleRun):
        remedy = "Give what splitkit.simulate_schedule returns."
        raise ViewError("SK901", f"run is a {type(run).__name__}, not a simulated step", remedy)
    if len(run.stages) != count:
        reason = f"the run has {len(run.stages)} stages, but the plan has {count} {what}"
        of = "splitkit.stage_costs(flow, plan, costs)" if what == "parts" else "step.stage_costs(costs)"
        raise ViewError("SK901", reason, f"Simulate the stages of this plan: {of}.")
    return run


def checked_measurement(measured: object, run: ScheduleRun | None) -> MeasuredStep:
    """Return a measured step that has the actions of the simulated one.

    Raises:
        ViewError: SK901 if it has not.
    """
    if not isinstance(measured, MeasuredStep):
        remedy = "Give what StepRecorder.measured or splitkit.pipeline.trace.MeasuredStep.load returns."
        raise ViewError("SK901", f"measured is a {type(measured).__name__}, not a step that ran", remedy)
    remedy = "Simulate the actions that ran: run=splitkit.simulate_schedule(stages, measured.order)."
    if run is None:
        raise ViewError("SK901", "a measured step is drawn next to a simulated one, but run is missing", remedy)
    ran, planned = ({(e.rank, e.action) for e in step.timeline} for step in (measured, run))
    if other := min(ran ^ planned, default=None):
        where = "only measured" if other in ran else "only simulated"
        reason = f"the measured step is not the simulated one: {other[1]} on rank {other[0]} was {where}"
        raise ViewError("SK901", reason, remedy)
    return measured


# Makes the table of the stages of a training step.


def table_of_stages(view: StagedView) -> Table:
    """Return a table with a row for each stage: seconds of its parts, and bytes of a microbatch.

    ``fixed`` is weights, gradients and the state of the optimizer; ``held`` is what a microbatch holds from forward to
    backward, with what the stage received and sent.
    """
    unit, columns = view.stages[0].unit, view.still()["stages"]
    split = view.divided
    titles = ["stage", "forward", "input" if split else "backward", *(["weight"] if split else []), "ops again", "held"]
    titles += [*(["waits for weight"] if split else []), "sent", "gradients sent", "temporary", "fixed"]
    rows = []
    for number, costs in enumerate(view.stages):
        stage = view.step.stages[number]
        row = [str(number), duration(costs.forward, unit), duration(costs.backward_input, unit)]
        row += [duration(costs.backward_weight, unit)] if split else []
        row += [f"{columns['again'][number]:.0f}", size(costs.saved_bytes)]
        row += [size(stage.waiting_bytes)] if split else []
        row += [size(stage.sent_bytes), size(stage.gradients_sent_bytes)]
        rows.append([*row, size(costs.temporary_bytes), size(costs.fixed_bytes)])
    return table(titles, rows, titles[1:])


# Draws what a capture that failed had reached, and where it stopped.


def capture_failure_html(error: CaptureError, title: str = "") -> str:
    """Return a page of ``error.reached`` with the place and the reason where the capture stopped.

    It is the page of a plan of one stage. Where the graph has no sizes, as under ``symbolic_trace``, it is a table of
    the nodes.

    Args:
        error: what `splitkit.capture` raised; its ``reached`` is a graph module.
        title: the title of the page.
    """
    gm = error.reached
    assert gm is not None
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    try:
        whole, costs = plan(gm, lambda node: 0), flops(gm)
        data = LadderView(analyze(gm), whole, costs, title, optimizer=None).to_dict()
    except SplitError:
        rows = [(node.name, target_name(node), module_path(node), source_line(node)) for node in nodes]
        reached = table(("node", "op", "module", "line"), rows, title="reached, in order")
        return still_page(title, fragment(f'<pre style="white-space:pre-wrap">{escaped(str(error))}</pre>', [reached]))
    last = max(data["ops"]["row"], default=0)
    stopped = {"row": last, "node": nodes[-1].name, "at": error.stopped_at, "why": str(error)}
    return page(data | {"note": "", "stopped": stopped})
