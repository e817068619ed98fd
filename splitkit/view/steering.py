"""What a page is told beside the ladder so that it can be steered: where cuts may go, and how a step is simulated anew.

Both are kept linear in the graph: of a tall ladder not every stretch of rows is priced, only those between `marks`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from splitkit.costs.links import Links
from splitkit.errors import CostError, SplitError
from splitkit.pipeline.order import BACKWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stagecosts import StageCosts, bytes_back, bytes_on

MOST_MARKS = 64
"""Stretches between cuts that are each priced with all that follow: half of the square of this many prices."""


def marks(borders: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """The rows above which a cut may be: all of them where they are few.

    Of many rows those that divide them, and their seconds, evenly; those of the plan as it came are among them if they
    are no more than that.

    Args:
        borders: the first row of each stage, and the number of rows.
        seconds: of each row.
    """
    rows = len(seconds)
    if rows <= MOST_MARKS:
        return list(range(rows + 1))
    found = {0, rows, *(borders if len(borders) <= MOST_MARKS else ())}
    mean = sum(seconds) / rows or 1.0
    past = list(accumulate(second / mean + 1 for second in seconds))  # half by time, half by rows
    parts = MOST_MARKS + 2 - len(found)
    found.update(1 + bisect_left(past, past[-1] * part / parts, hi=rows - 2) for part in range(1, parts))
    return sorted(found)


def simulation(
    run: ScheduleRun, stages: Sequence[StageCosts], down: Sequence[int], up: Sequence[int]
) -> dict[str, Any] | None:
    """What the page simulates a step with once a cut has moved; ``None`` where it cannot.

    It can where backward is not divided, no stage has replicas, and the run is of these stages by these prices.

    Args:
        run: the step as it came.
        stages: of the plan, by the prices of the picture.
        down: bytes of activations that cross above each of the `marks`.
        up: bytes of gradients that do.
    """
    if run.wires is None or run.order.columns.kind.max() > BACKWARD or max(run.replicas) > 1:
        return None
    if _facts(run.stages) != _facts(stages):
        return None
    name, wires, of = _standard(run), run.wires, run.order.rank_of
    if name is not None:  # any two ranks talk alike, however many there are
        wires = replace(wires, devices=[[0], [1]])
    pairs = [(0, 1)] if name else list(pairwise(of))
    tables: dict[tuple[float, ...], int] = {}

    def table(source: int, target: int, nbytes: Sequence[int]) -> int:
        """The number of the seconds that a message takes at each mark; -1 where none is sent."""
        if source == target:
            return -1
        return tables.setdefault(tuple(wires.seconds(source, target, each) for each in nbytes), len(tables))

    try:
        found = {"down": [table(a, b, down) for a, b in pairs], "up": [table(b, a, up) for a, b in pairs]}
    except CostError:  # links of one's own, which know some sizes only
        return None
    return {"overlap": wires.overlap, "static": run.static_buffers, "standard": name, "trips": [*tables], **found}


def _facts(stages: Sequence[StageCosts]) -> list[tuple[float, ...]]:
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


def _standard(run: ScheduleRun) -> str | None:
    """The schedule, if it is one of torch's that any number of stages may have, and any two ranks talk alike."""
    from splitkit.pipeline.torch_orders import SCHEDULES, is_single, pipeline_order

    links = None if run.wires is None else run.wires.links
    alike = links is None or (isinstance(links, Links) and not links.size and not links.pairs)
    name = run.order.name
    if not alike or name not in SCHEDULES.values() or not is_single(name):
        return None
    same = pipeline_order(name, len(run.stages), run.order.microbatches)
    return name if same.ranks == run.order.ranks else None


def simulated_anew(run: ScheduleRun, stages: Sequence[StageCosts]) -> ScheduleRun | None:
    """The same step of other stages; ``None`` where the schedule does not go with as many."""
    name, wires = _standard(run), run.wires
    if name is None or wires is None:
        return None
    options: dict[str, Any] = {"overlap": wires.overlap, "static_buffers": run.static_buffers, "links": wires.links}
    try:
        return simulate_schedule(stages, name, run.order.microbatches, **options)
    except SplitError:
        return None
