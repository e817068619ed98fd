"""Makes the table of ranks that ``splitkit plan --devices`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitkit.checks import Memory, memory_of
from splitkit.pipeline.run import RankRow, ScheduleRun
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = (
    "rank",
    "device",
    "stages",
    "replicas",
    "busy",
    "load",
    "bubble",
    "in flight",
    "fixed",
    "saved",
    "temporary",
    "peak",
    "memory",
)
_SPARE = ("in flight", "temporary", "fixed", "saved", "stages", "bubble", "memory")


def rank_table(ranks: ScheduleRun | Sequence[RankRow], devices: Sequence[str] = (), memory: Memory = None) -> Table:
    """Return a table with one row per rank; leave out empty columns, and device or memory if all ranks have the same::

        from splitkit.view.console import show
        show(rank_table(splitkit.simulate_schedule(stages, "1f1b", 8), memory="80GiB"))

    Args:
        ranks: a simulated step of a pipeline, or rows.
        devices: the name of each rank's device, for a step.
        memory: the memory limit of all ranks (``"80GiB"``) or of each, for a step.

    Raises:
        PolicyError: SK302 if ``memory`` is not a size, or not one for each rank.
    """
    if isinstance(ranks, ScheduleRun):
        ranks = ranks.rows(devices, memory_of("rank_table", memory, ranks.ranks))
    rows = [rank.cells(number) for number, rank in enumerate(ranks)]
    same = [title for title in ("device", "memory") if len({row[title] for row in rows}) == 1]
    titles = [title for title in _TITLES if title not in same and any(row[title] for row in rows)]
    cells, numbers = ([row[title] for title in titles] for row in rows), [t for t in titles if t != "device"]
    return table(titles, cells, numbers, spare=_SPARE)
