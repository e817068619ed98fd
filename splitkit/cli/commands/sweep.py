"""``splitkit sweep``: what less memory for training costs, from saving everything to saving the least; or pipelines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import devicelist, placement, source
from splitkit.cli.commands import plan_training as trainplan
from splitkit.cli.outcome import Outcome, seconds
from splitkit.cli.pages import wrote
from splitkit.cli.source import Source
from splitkit.cli.work import TRAINING, read_plan
from splitkit.errors import UsageError
from splitkit.plans.file import parts_of
from splitkit.studies.frontier import Point
from splitkit.units import duration, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPELINES = ("microbatches", "schedules", "devices", "memory", "links", "optimizer")
"""Options that go with ``--stages``."""
POINTS = 10


def run(args: Namespace) -> Outcome:
    """See the module."""
    wanted = _model(args)
    _check(args)
    if args.stages is not None:
        from splitkit.cli.commands import sweep_pipelines as pipelines

        return pipelines.run(args, wanted)
    return _frontier(args, wanted)


def _model(args: Namespace) -> Source:
    """The model to sweep over. A plan file names it, and the number of stages as well unless ``--stages`` does."""
    if not args.target.endswith(".json"):
        return source.from_args(args.target, args)
    data = read_plan(args.target)
    wanted = source.from_plan(args.target, data, args)
    if args.stages is None and data.get("what") != TRAINING:
        args.stages = (max(1, len(parts_of(data))),)
    return wanted


def _check(args: Namespace) -> None:
    """Refuse options of one sweep with the other, and what cannot be read; without torch."""
    if args.stages is None:
        for name in PIPELINES:
            if getattr(args, name) is not None:
                raise UsageError("SK601", f"--{name} goes with --stages", "Add --stages 2,4,8 to sweep over pipelines.")
        return
    for name in ("points", "of"):
        if getattr(args, name) is not None:
            raise UsageError("SK601", f"--{name} does not go with --stages", "Leave one of them out.")
    if args.devices is not None:
        devicelist.check(args.devices)
    placement.check_memory(args, least=False)


def _frontier(args: Namespace, wanted: Source) -> Outcome:
    """Saved bytes, or the peak, against time."""
    work, costs = trainplan.priced(args, wanted)
    with work.clock.step("frontier", "finding the frontier"):
        count = args.points or POINTS
        frontier = sk.Frontier(work.joint, costs, of=args.of or "saved", budgets=count)
        points = list(_spread(frontier, count))
    with work.clock.step("simulate", "simulating the memory of each point"):
        rows = [point.to_dict(peak=True) for point in points]
    data: dict[str, Any] = {
        "command": "sweep",
        "model": work.source.to_dict(),
        "prices": getattr(costs, "note", ""),
        "step": frontier.step_seconds,
        "of": frontier.of,
        "corners": len(frontier.points),
        "points": rows,
        "seconds": work.clock.seconds,
    }
    took = work.clock.seconds
    text = facts(
        {
            "prices": data["prices"] or ("FLOPs" if frontier.unit == "s" else frontier.unit),
            "a step without recompute": duration(frontier.step_seconds, frontier.unit),
            "took": f"capture {seconds(took['capture'])}, frontier {seconds(took['frontier'])}",
        }
    )
    of, other = ("peak", "saved") if frontier.of == "peak" else ("saved", "peak")
    titles = (of, "of all", "computed again", "of the step", other)
    files, written = {}, []
    if args.view:
        from splitkit.view.showing import html

        files[args.view] = page = html(frontier, title=f"frontier of {work.source.spec}")
        written = [wrote(args.view, page)]
    shown: list[RenderableType] = [text, "", table(titles, _cells(rows, frontier, of, other), titles), *written]
    return Outcome(data, shown, files=files)


def _spread(frontier: sk.Frontier, count: int) -> Iterator[Point]:
    """Points at even distances, from the most bytes to the least, each once."""
    least, most = frontier.taken(frontier.points[0]), frontier.taken(frontier.points[-1])
    seen: set[int] = set()
    for number in range(count):
        point = frontier.within(most - (most - least) * number // max(1, count - 1))
        if frontier.taken(point) not in seen:
            seen.add(frontier.taken(point))
            yield point


def _cells(rows: list[dict[str, Any]], frontier: sk.Frontier, of: str, other: str) -> Iterator[list[str]]:
    step, unit = frontier.step_seconds, frontier.unit
    most = max(row[of] for row in rows)
    for row in rows:
        share, again = row[of] / most if most else 1.0, row["seconds"] / step if step else 0.0
        yield [size(row[of]), f"{share:.0%}", duration(row["seconds"], unit), f"{again:.1%}", size(row[other])]
