"""What each kind of object is drawn as. Rooms above this one add theirs with ``pictured.register``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import TYPE_CHECKING, Any

from torch import fx

from splitkit.checks import nbytes
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair, divide
from splitkit.engine.split import Split
from splitkit.errors import ViewError
from splitkit.graph.dataflow import Dataflow, analyze, module_path
from splitkit.graph.joint import forward_outputs, is_joint
from splitkit.memory.profile import MemoryProfile
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stageprices import Optimizer
from splitkit.plans.record import Plan
from splitkit.training.flow import BACKWARD, FORWARD
from splitkit.training.savedvalues import SavedValue
from splitkit.units import size
from splitkit.view.halves import HalvesView
from splitkit.view.ladder import LadderView
from splitkit.view.ranks import rank_table
from splitkit.view.report import Report, report
from splitkit.view.svgbars import Bar, BarsDrawing
from splitkit.view.svgladder import ladder_svg
from splitkit.view.svgmemory import memory_svg
from splitkit.view.svgtimeline import timeline_svg
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table

_TOP = 12
"""Values that are shown of many."""


@dataclass(frozen=True)
class Picture:
    """How an object is drawn.

    Attributes:
        title: of its page.
        svg: makes the still picture.
        tables: makes the tables below it.
        ladder: makes what is to be steered: a plan, or forward and backward; a still picture does without.
        nodes: how many nodes a picture of a plan draws.
        parts: how many parts a picture of a plan draws.
        instead: makes another still picture where `svg` is refused.
        notes: what is said below.
    """

    title: str
    svg: Callable[[], str]
    tables: Callable[[], Iterable[Table]]
    ladder: Callable[[], LadderView | HalvesView] | None = None
    nodes: int = 0
    parts: int = 0
    instead: Callable[[], str] | None = None
    notes: tuple[str, ...] = ()


@singledispatch
def pictured(shown: object) -> Picture:
    """How an object is drawn; options are those that its class speaks of.

    Raises:
        ViewError: SK901 for what has no picture.
    """
    raise ViewError(
        "SK901", f"a {type(shown).__name__} has no picture", "Draw a plan, a split, a frontier, a profile or a run."
    )


@pictured.register
def _plan(plan: Plan, **options: Any) -> Picture:
    gm = _module_of(plan)
    if plan.parts.keys() <= {FORWARD, BACKWARD} and is_joint(gm.graph):
        return _halves(gm, plan, **options)
    return _ladder(analyze(gm), plan, **options)


def _halves(
    gm: fx.GraphModule,
    plan: Plan,
    *,
    costs: Costs | None = None,
    memory: float | str | None = None,
    title: str = "",
) -> Picture:
    """A plan of forward and backward: what the pair shows that is cut by it."""
    prices = default(gm) if costs is None else costs

    @cache
    def of() -> Picture:
        from splitkit.frontends.aot import joint_flow

        pair = divide(joint_flow(gm, forward_outputs(gm.graph)), plan, prices)
        return _pair(pair, costs=costs, memory=memory, title=title or plan.note)

    def ladder() -> LadderView | HalvesView:
        found = of().ladder
        assert found is not None  # the pair knows its plan
        return found()

    def instead() -> str:
        return _bars(report(gm, plan, prices))

    limit_of(memory)
    name = title or plan.note or "plan"
    return Picture(name, lambda: of().svg(), lambda: of().tables(), ladder, len(gm.graph.nodes), 2, instead)


@pictured.register
def _split(split: Split, **options: Any) -> Picture:
    return _ladder(split.flow, split.plan, **options)


def _module_of(plan: Plan) -> fx.GraphModule:
    """The module of the graph whose nodes are placed."""
    first = next(iter(plan), None)
    found = None if first is None else first.graph.owning_module
    if isinstance(found, fx.GraphModule) and first is not None and found.graph is first.graph:
        return found
    what = "places no node" if first is None else "does not know the module of its graph"
    raise ViewError(
        "SK901", f"the plan {what}, so it cannot be drawn alone", "splitkit.split(gm, plan).view() draws it."
    )


def _ladder(
    flow: Dataflow,
    plan: Plan,
    *,
    costs: Costs | None = None,
    optimizer: Optimizer = "adam",
    memory: float | str | None = None,
    run: ScheduleRun | None = None,
    beside: Plan | None = None,
    title: str = "",
) -> Picture:
    if run is not None and len(run.stages) != len(plan.parts):
        reason = f"the run is of {len(run.stages)} stages, the plan has {len(plan.parts)} parts"
        raise ViewError("SK901", reason, "Simulate the stages of this plan: splitkit.stage_costs(flow, plan, costs).")
    prices = default(flow) if costs is None else costs
    limit = limit_of(memory)
    if beside is not None and any(node not in flow.index for node in beside):
        raise ViewError("SK901", "the plan beside is of another graph", "Compare plans of one graph module.")
    view = LadderView(flow, plan, prices, title, optimizer, limit, run, beside)

    def svg() -> str:
        return ladder_svg(view)

    def tables() -> list[Table]:
        ranks = [] if run is None else [rank_table(run, memory=limit)]
        return [report(flow.root, plan, prices).table(), *ranks]

    def instead() -> str:
        return _bars(report(flow.root, plan, prices))

    return Picture(title or plan.note or "plan", svg, tables, lambda: view, len(flow.nodes), len(plan.parts), instead)


def limit_of(memory: float | str | None) -> int | None:
    """The bytes of a device that a picture is asked to mark; SK302 for what is no number of bytes."""
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
        ("share of the time", bars([part.share for part in found.parts], "{:.1%}".format)),
        ("bytes of parameters and buffers", bars([part.parameter_bytes for part in found.parts], size)),
    ]
    if found.sizes_known:
        groups.append(("bytes that are handed on", bars([part.bytes_out for part in found.parts], size)))
    return BarsDrawing(f"{len(found.parts)} parts{f': {found.note}' if found.note else ''}", groups).to_svg()


@pictured.register
def _run(run: ScheduleRun, *, memory: float | str | None = None) -> Picture:
    limit = limit_of(memory)
    return Picture(run.order.name, lambda: timeline_svg(run, limit), lambda: [rank_table(run, memory=limit)])


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

    return Picture("memory", lambda: memory_svg(profile, limit), tables)


@pictured.register
def _pair(pair: Pair, *, costs: Costs | None = None, memory: float | str | None = None, title: str = "") -> Picture:
    forward, backward = len(pair.forward.graph.nodes), len(pair.backward.graph.nodes)
    values = [value for value in pair.saved_values if value.nbytes]
    total = sum(value.nbytes for value in values)

    def svg() -> str:
        halves = [Bar("forward", forward, f"{forward} nodes", 0), Bar("backward", backward, f"{backward} nodes", 1)]
        groups: dict[str, list[SavedValue]] = {}
        for value in values:
            groups.setdefault(value.label, []).append(value)
        shown = sorted((_bar(label, group) for label, group in groups.items()), key=lambda bar: -bar.value)
        if left := shown[_TOP:]:
            rest = sum(bar.value for bar in left)
            shown = [*shown[:_TOP], Bar(f"{len(left)} smaller ones", rest, size(rest), 0)]
        again = _again(pair)
        heading = f"{size(total)} in {len(values)} values saved for backward{again}"
        return BarsDrawing(heading, [("graphs", halves), ("saved for backward, in bytes", shown)]).to_svg()

    def tables() -> list[Table]:
        rows = [(value.module or "(top level)", value.op, value.name, size(value.nbytes)) for value in values[:_TOP]]
        more = f" ({len(values) - len(rows)} more)" if len(values) > len(rows) else ""
        return [table(("module", "op", "node", "bytes"), rows, ("bytes",), f"saved, the largest first{more}")]

    title, plan, limit = title or "forward and backward", pair.plan, limit_of(memory)
    if plan is None:  # by one of torch's partitioners: of what graph it is not known
        return Picture(title, svg, tables)

    def ladder() -> HalvesView:
        flow = analyze(_module_of(plan))
        return HalvesView(flow, [pair], default(flow) if costs is None else costs, title, memory=limit)

    return Picture(title, svg, tables, ladder)


def _bar(label: str, values: Sequence[SavedValue]) -> Bar:
    """Values of one module and op."""
    total = sum(value.nbytes for value in values)
    several = f" ×{len(values)}" if len(values) > 1 else ""
    return Bar(f"{label}{several}", total, size(total), 0, ", ".join(value.name for value in values[:_TOP]))


def _again(pair: Pair) -> str:
    twice = sum(len(keys) > 1 for keys in pair.plan.places.values()) if pair.plan else 0
    return f", {twice} nodes computed again" if twice else ""
