"""Computes what makes the page interactive: where borders may go, and what a step is resimulated with.

The price of every segment of rows would be quadratic in the graph, so a tall ladder has prices only between its
`border_marks`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from splitkit.costs.links import Links
from splitkit.errors import CostError, ScheduleError, SplitError
from splitkit.pipeline.memory import keeps_sent
from splitkit.pipeline.order import BACKWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedule import Schedule
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts, bytes_back, bytes_on

MOST_MARKS = 64
"""The number of segments between `border_marks` where there are more rows than this. The page has a price for every run
of segments: 64 * 65 / 2 = 2,080 of them."""

MOST_STAGES = 16
"""The slider of the page goes up to this many stages, or to those of the plan if it has more."""


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


def simulation(
    run: ScheduleRun, stages: Sequence[StageCosts], down: Sequence[int], up: Sequence[int]
) -> dict[str, Any] | None:
    """Return what the page resimulates a step with after a border has moved; ``None`` where it cannot.

    It can if backward is not divided, no stage has replicas, and the run was simulated from these stages.

    Args:
        run: the step of the plan.
        stages: the costs of the plan's stages, by the prices of the picture.
        down: the bytes of activations that cross above each of the `border_marks`.
        up: the bytes of gradients that cross there.
    """
    if run.transport is None or run.order.columns.kind.max() > BACKWARD or max(run.replicas) > 1:
        return None
    if _figures(run.stages) != _figures(stages):
        return None
    schedule, transport, of = _scalable_schedule(run), run.transport, run.order.rank_of
    if schedule is not None:  # all pairs of ranks have the same link, so one pair stands for any number of ranks
        transport = replace(transport, devices=[[0], [1]])
    pairs = list(pairwise(of)) if schedule is None else [(0, 1)]
    tables: dict[tuple[float, ...], int] = {}

    def table(source: int, target: int, nbytes: Sequence[int]) -> int:
        """Return the index in ``tables`` of a message's seconds at each mark; -1 if no message is sent."""
        if source == target:
            return -1
        return tables.setdefault(tuple(transport.seconds(source, target, each) for each in nbytes), len(tables))

    try:
        found = {"down": [table(a, b, down) for a, b in pairs], "up": [table(b, a, up) for a, b in pairs]}
    except CostError:  # links of a user's own class may know only the sizes that they were measured at
        return None
    most = min(len(down) - 1, max(MOST_STAGES, len(stages)))
    return {
        "overlap": transport.overlap,
        "static": run.static_buffers,
        "kept": keeps_sent(run),
        "windows": None if schedule is None else _windows(schedule, run.order.microbatches, most),
        "trips": [*tables],
        **found,
    }


def _figures(stages: Sequence[StageCosts]) -> list[tuple[float, ...]]:
    return [
        (
            s.forward,
            s.backward,
            s.fixed_bytes,
            s.saved_bytes,
            s.temporary_bytes,
            bytes_on(stages, k),
            bytes_back(stages, k),
        )
        for k, s in enumerate(stages)
    ]


def _windows(schedule: Schedule, microbatches: int, most: int) -> dict[str, list[int]]:
    """Return number of stages -> the window of each stage, for all numbers of stages that the schedule allows."""
    found = {}
    for stages in range(1, most + 1):
        with suppress(ScheduleError):
            schedule.require(stages, microbatches, stages)
            found[str(stages)] = schedule.windows(stages, microbatches) or []
    return found


def _scalable_schedule(run: ScheduleRun) -> Schedule | None:
    """Return the schedule if the page can make its order for any number of stages, and all links are alike."""
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
