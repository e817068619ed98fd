"""``splitkit sweep``: what less memory for training costs, from saving everything to saving the least; or pipelines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import splitkit as sk
from splitkit.cli import devicelist, placement, trainplan
from splitkit.cli.outcome import Outcome, facts, seconds, table
from splitkit.errors import UsageError
from splitkit.frontier import Point
from splitkit.units import duration, size

PIPELINES = ("microbatches", "schedules", "devices", "memory", "links", "optimizer")
"""Options that go with ``--stages``."""
POINTS = 10


def run(args: Namespace) -> Outcome:
    """See the module."""
    _check(args)
    if args.stages is not None:
        from splitkit.cli import pipelines

        return pipelines.run(args)
    return _frontier(args)


def _check(args: Namespace) -> None:
    """Refuse options of one sweep with the other, and what cannot be read; without torch."""
    if args.stages is None:
        for name in PIPELINES:
            if getattr(args, name) is not None:
                raise UsageError("SK601", f"--{name} goes with --stages", "Add --stages 2,4,8 to sweep over pipelines.")
        return
    if args.points is not None:
        raise UsageError("SK601", "--points does not go with --stages", "Leave one of them out.")
    if args.devices is not None:
        devicelist.check(args.devices)
    placement.bytes_of(args)


def _frontier(args: Namespace) -> Outcome:
    """Saved bytes against time."""
    work, costs = trainplan.priced(args)
    with work.clock.step("frontier", "finding the frontier"):
        frontier = sk.Frontier(work.joint, costs)
        points = list(_spread(frontier, args.points or POINTS))
    with work.clock.step("simulate", "simulating the memory of each point"):
        rows = [point.to_dict(peak=True) for point in points]
    data: dict[str, Any] = {
        "command": "sweep",
        "model": work.source.to_dict(),
        "prices": getattr(costs, "note", ""),
        "step": frontier.step_seconds,
        "corners": len(frontier.points),
        "points": rows,
        "seconds": work.clock.seconds,
    }
    took = work.clock.seconds
    text = facts(
        {
            "prices": data["prices"] or "FLOPs",
            "a step without recompute": duration(frontier.step_seconds, frontier.unit),
            "took": f"capture {seconds(took['capture'])}, frontier {seconds(took['frontier'])}",
        }
    )
    titles = ("saved", "of all", "computed again", "of the step", "peak")
    return Outcome(data, [text, "", table(titles, _cells(rows, frontier), titles)])


def _spread(frontier: sk.Frontier, count: int) -> Iterator[Point]:
    """Points at even distances, from the most bytes saved to the least, each once."""
    least, most = frontier.points[0].saved, frontier.points[-1].saved
    seen: set[int] = set()
    for number in range(count):
        point = frontier.within(most - (most - least) * number // max(1, count - 1))
        if point.saved not in seen:
            seen.add(point.saved)
            yield point


def _cells(rows: list[dict[str, Any]], frontier: sk.Frontier) -> Iterator[list[str]]:
    step, unit = frontier.step_seconds, frontier.unit
    most = max(row["saved"] for row in rows)
    for row in rows:
        share, again = row["saved"] / most if most else 1.0, row["seconds"] / step if step else 0.0
        yield [size(row["saved"]), f"{share:.0%}", duration(row["seconds"], unit), f"{again:.1%}", size(row["peak"])]
