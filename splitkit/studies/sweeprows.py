"""The rows of a sweep over pipelines: which of them are best, as data, as a table and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from splitkit.brief import brief
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.record import Plan
from splitkit.shown import Shown
from splitkit.units import duration, size
from splitkit.view.pictures import Picture, pictured
from splitkit.view.svgscatter import ScatterDrawing, Spot
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = ("stages", "ranks", "schedule", "microbatches", "each", "bubble", "peak", "fits", "best")


@dataclass(frozen=True, eq=False)
class SweepRow:
    """One combination.

    Attributes:
        stages: how many stages the model is cut into.
        microbatches: how many microbatches a step has.
        schedule: as it was asked for.
        plan: the stages; ``None`` where there is no such pipeline.
        run: the step, simulated; ``None`` likewise.
        fits: whether the peak of every rank is within the memory; ``None`` where that has no limit, or nothing runs.
        why: what speaks against the combination: the schedule, the graph or the memory.
    """

    stages: int
    microbatches: int
    schedule: str
    plan: Plan | None = None
    run: ScheduleRun | None = None
    fits: bool | None = None
    why: str = ""

    __repr__ = brief

    @property
    def numbers(self) -> tuple[float, int, int]:
        """What the best have little of: seconds for each microbatch, bytes of the fullest rank, ranks.

        Seconds are rounded to nine digits, so that the order of sums does not decide.
        """
        if self.run is None:
            raise ValueError(f"nothing runs: {self.why}")
        return float(f"{self.run.seconds / self.microbatches:.9g}"), max(self.run.peaks), self.run.ranks

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, without its plan and timeline."""
        of = self.run
        each, peak, ranks = (None, None, None) if of is None else self.numbers
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "ranks": ranks,
            "seconds": of and of.seconds,
            "seconds_per_microbatch": each,
            "bubble": of and of.bubble,
            "peak": peak,
            "limiting_rank": of and of.limiting_rank,
            "fits": self.fits,
            "why": self.why,
        }


@dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """All combinations; in a notebook it is a picture of peak against time, and a table.

    Attributes:
        rows: in the order of stages, schedules, microbatches.
        memory: bytes that every rank has; ``None`` for no limit.
        note: what the prices say of themselves.
    """

    rows: tuple[SweepRow, ...]
    memory: int | None = None
    note: str = ""

    __repr__ = brief

    @cached_property
    def pareto(self) -> tuple[SweepRow, ...]:
        """The rows that fit and that no other beats in time a microbatch, peak or ranks without losing in another one;
        the first of equal rows; the fastest first."""
        fine = {row.numbers: row for row in reversed(self.rows) if row.run is not None and row.fits is not False}
        return tuple(fine[one] for one in sorted(fine) if not any(_beats(other, one) for other in fine))

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain data; ``pareto`` says which are not beaten."""
        best = set(self.pareto)
        rows = [row.to_dict() | {"pareto": row in best} for row in self.rows]
        return {"prices": self.note, "memory": self.memory, "rows": rows}

    @property
    def refused(self) -> tuple[str, ...]:
        """What speaks against rows, each reason once with the first row that it is of."""
        reasons = {row.why: row for row in reversed(self.rows) if row.why}
        return tuple(
            f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches: {why}"
            for why, row in reversed(reasons.items())
        )

    def table(self) -> Table:
        """All rows as a table for `rich`, which shows it whole; ``each`` is the time of a microbatch."""
        limit = f"{size(self.memory)} a rank" if self.memory is not None else ""
        right = [title for title in _TITLES if title not in ("schedule", "fits", "best")]
        note = "; ".join(filter(None, (self.note, limit)))
        return table(_TITLES, self._cells(), right, note, spare=("bubble", "ranks"))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        best = set(self.pareto)
        for row in self.rows:
            head = (str(row.stages), "-", row.schedule, str(row.microbatches))
            if row.run is None:
                yield (*head, "-", "-", "-", "-", "")
                continue
            each, peak, ranks = row.numbers
            times = (duration(each, row.run.unit), f"{row.run.bubble:.1%}", size(peak))
            fits = "" if row.fits is None else "yes" if row.fits else "no"
            yield (head[0], str(ranks), *head[2:], *times, fits, "best" if row in best else "")

    def __str__(self) -> str:
        from splitkit.view.console import to_text

        return "\n".join([to_text(self.table()), *self.refused])


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@pictured.register
def _sweep(sweep: Sweep) -> Picture:
    ran = [row for row in sweep.rows if row.run is not None]
    best = sweep.pareto
    unit = next((row.run.unit for row in ran if row.run), "s")
    schedules = list(dict.fromkeys(row.schedule for row in ran))

    def spot(row: SweepRow) -> Spot:
        each, peak, ranks = row.numbers
        name = f"{row.schedule} {row.stages}×{row.microbatches}"
        told = f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches on {ranks} ranks"
        told += f": {duration(each, unit)} a microbatch, peak {size(peak)}"
        return Spot(peak, each, name if row in best else "", told, row in best, schedules.index(row.schedule))

    def svg() -> str:
        found = "the best are named: schedule, stages×microbatches" if best else "none fits the memory"
        title = f"{len(ran)} pipelines; {found}"
        axes = "peak of the fullest rank (bytes)", "time of a microbatch"
        return ScatterDrawing(title, axes, [], [*map(spot, ran)], unit, schedules, sweep.memory).to_svg()

    return Picture("sweep", svg, lambda: [sweep.table()], notes=sweep.refused)
