"""Computes where the borders on the page may go, and simulates the step of a plan again for other stages.

The price of every segment of rows would be quadratic in the graph, so a tall ladder has prices only between its
`border_marks`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from splitkit.costs.links import Links
from splitkit.errors import SplitError
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedule import Schedule
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts

MOST_MARKS = 64
"""The number of segments between `border_marks` where there are more rows than this. The page has a price for every run
of segments: 64 * 65 / 2 = 2,080 of them."""


def border_marks(borders: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the rows above which a border may go.

    All rows where they are few. Otherwise rows that divide the rows and their seconds evenly, and the borders of the
    plan itself unless these are too many.

    Args:
        borders: the first row of each stage of the plan, and the number of rows.
        seconds: the seconds of each row.
    """
    rows = len(seconds)
    if rows <= MOST_MARKS:
        return list(range(rows + 1))
    # rows of about equal time, so that even plans exist, but not too many rows between two marks either
    found = {0, rows, *(borders if len(borders) <= MOST_MARKS else ())}
    mean = sum(seconds) / rows or 1.0
    past = list(accumulate(second / mean + 1 for second in seconds))  # time and rows weigh the same
    parts = MOST_MARKS + 2 - len(found)
    found.update(1 + bisect_left(past, past[-1] * part / parts, hi=rows - 2) for part in range(1, parts))
    return sorted(found)


def _scalable_schedule(run: ScheduleRun) -> Schedule | None:
    """Return the schedule if it makes an order for any number of stages, and all links are alike."""
    links = None if run.transport is None else run.transport.links
    alike = links is None or (isinstance(links, Links) and not links.size and not links.pairs)
    found = schedule_of(run.order) if alike else None
    return found if found is not None and found.window is not None else None


def resimulated(run: ScheduleRun, stages: Sequence[StageCosts]) -> ScheduleRun | None:
    """Simulate the same step with other stages; return ``None`` if the schedule does not allow that many."""
    schedule, transport = _scalable_schedule(run), run.transport
    if schedule is None or transport is None:
        return None
    options: dict[str, Any] = {
        "overlap": transport.overlap,
        "static_buffers": run.static_buffers,
        "links": transport.links,
    }
    try:
        return simulate_schedule(stages, schedule.name, run.order.microbatches, **options)
    except SplitError:
        return None
