"""The rows of a sweep over pipelines, the best of them, and their table and picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from splitkit.display import Shown
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.record import Plan
from splitkit.policies.pipeline import Pipeline
from splitkit.short_repr import brief
from splitkit.units import duration, measure, size
from splitkit.view.console.tables import table
from splitkit.view.renderers import Picture, pictured
from splitkit.view.svg.scatter import ScatterDrawing, ScatterPoint

if TYPE_CHECKING:
    from rich.table import Table

_MOST_PLANS = 24
"""The most plans that a page of a sweep draws, the best first: each takes 10 to 50 KB."""

_TITLES = ("stages", "ranks", "schedule", "microbatches", "each", "bubble", "peak", "fits", "best")
_TRAINING_TITLES = (*_TITLES[:7], "gap", "decides", *_TITLES[7:])


@dataclass(frozen=True, eq=False)
class SweepRow:
    """One combination of stages, microbatches and schedule.

    Attributes:
        stages: the number of stages.
        microbatches: the number of microbatches in a step.
        schedule: the name of the schedule, as it was given.
        plan: the stages; ``None`` if there is no such pipeline.
        run: the simulated step; ``None`` if there is no such pipeline.
        fits: whether the peak of every rank is within the memory; ``None`` without a limit, or without a pipeline.
        why: the reason against the combination: the schedule, the graph or the memory.
        chunks: the number of stages on each rank, if it was asked for.
        policy: of a training step in stages, the `Pipeline` that makes the plan.
        decides: of a training step in stages, the rank that paces the step, and the memory that makes it recompute.
        needs: of a training step in stages that does not fit: bytes of each rank for which a plan was found.
    """

    stages: int
    microbatches: int
    schedule: str
    plan: Plan | None = None
    run: ScheduleRun | None = None
    fits: bool | None = None
    why: str = ""
    chunks: int | None = None
    policy: Pipeline | None = None
    decides: str = ""
    needs: int | None = None

    __repr__ = brief

    @property
    def gap(self) -> float | None:
        """The part of the step by which a better plan could be shorter, as far as is proven; of a training step."""
        return None if self.policy is None or self.plan is None or self.plan.claim is None else self.plan.claim.gap

    @property
    def numbers(self) -> tuple[float, int, int]:
        """The three numbers to minimise: seconds per microbatch, peak of the fullest rank, ranks.

        Seconds are rounded to nine digits, so that rounding in sums does not decide.
        """
        if self.run is None:
            raise ValueError(f"nothing runs: {self.why}")
        return float(f"{self.run.seconds / self.microbatches:.9g}"), max(self.run.peaks), self.run.ranks

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, without its plan and timeline."""
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
            **self._proven(),
        }

    def _proven(self) -> dict[str, Any]:
        claim = self.plan.claim if self.policy is not None and self.plan is not None else None
        if claim is None:
            return {"chunks": self.chunks, "needs": self.needs} if self.chunks or self.needs else {}
        on_host = max(self.run.host_peaks) if self.run is not None else 0
        told = {"chunks": self.chunks, "bound": claim.bound, "gap": claim.gap, "decides": self.decides}
        return told | ({"host": on_host} if self.policy is not None and self.policy.offload is not None else {})


@dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """All combinations; in a notebook, a picture of peak against time and a table.

    Attributes:
        rows: the rows, in the order of stages, schedules, microbatches.
        memory: the bytes of every rank; ``None`` for no limit.
        note: the note of the prices.
    """

    rows: tuple[SweepRow, ...]
    memory: int | None = None
    note: str = ""

    __repr__ = brief

    @cached_property
    def pareto(self) -> tuple[SweepRow, ...]:
        """The rows that fit and are not dominated in time per microbatch, peak and ranks; the fastest comes first.

        Of equal rows only the first is here.
        """
        fine = {row.numbers: row for row in reversed(self.rows) if row.run is not None and row.fits is not False}
        return tuple(fine[one] for one in sorted(fine) if not any(_beats(other, one) for other in fine))

    def to_dict(self) -> dict[str, Any]:
        """Return all rows as plain data; ``pareto`` marks the best."""
        best = set(self.pareto)
        rows = [row.to_dict() | {"pareto": row in best} for row in self.rows]
        return {"prices": self.note, "memory": self.memory, "rows": rows}

    @property
    def refused(self) -> tuple[str, ...]:
        """The reasons against rows, each once, with its first row."""
        reasons = {row.why: row for row in reversed(self.rows) if row.why}
        return tuple(
            f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches: {why}"
            for why, row in reversed(reasons.items())
        )

    def table(self) -> Table:
        """Return all rows as a table for `rich`; ``each`` is the time per microbatch."""
        limit = f"{size(self.memory)} a rank" if self.memory is not None else ""
        titles = _TRAINING_TITLES if self.trains else _TITLES
        right = [title for title in titles if title not in ("schedule", "decides", "fits", "best")]
        note = "; ".join(filter(None, (self.note, limit)))
        return table(
            titles, self._cells(), right, note, least=dict.fromkeys(titles, 1), spare=("bubble", "ranks", "decides")
        )

    @property
    def trains(self) -> bool:
        """Whether the rows are of a training step in stages."""
        return any(row.policy is not None or row.needs is not None for row in self.rows)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        best = set(self.pareto)
        for row in self.rows:
            head = (str(row.stages), "-", row.schedule, str(row.microbatches))
            if row.run is None:
                yield (*head, *["-"] * (5 if self.trains else 3), "-" if row.fits is None else "no", "")
                continue
            each, peak, ranks = row.numbers
            times: tuple[str, ...] = (duration(each, row.run.unit), f"{row.run.bubble:.1%}", size(peak))
            if self.trains:
                times = (*times, "-" if row.gap is None else f"{row.gap:.1%}", row.decides)
            fits = "" if row.fits is None else "yes" if row.fits else "no"
            yield (head[0], str(ranks), *head[2:], *times, fits, "best" if row in best else "")

    def __str__(self) -> str:
        from splitkit.view.console.console import to_text

        return "\n".join([to_text(self.table()), *self.refused])


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@pictured.register
def _sweep(sweep: Sweep) -> Picture:
    ran = [row for row in sweep.rows if row.run is not None]
    best = sweep.pareto
    unit = next((row.run.unit for row in ran if row.run), "s")
    schedules = list(dict.fromkeys(row.schedule for row in ran))

    plans = [] if sweep.trains else _drawn_plans([*best, *ran])
    anchors = {id(plan.places): f"plan-{number}" for number, plan in enumerate(plans)}

    def spot(row: SweepRow, links: bool = False) -> ScatterPoint:
        each, peak, ranks = row.numbers
        told = f"{row.schedule} of {row.stages} stages, {row.microbatches} microbatches on {ranks} "
        told += f"rank{'s' if ranks > 1 else ''}: {duration(each, unit)} a microbatch, peak {size(peak)}"
        link = anchors.get(id(row.plan.places), "") if links and row.plan is not None else ""
        name = _short_name(row) if row in best else ""
        return ScatterPoint(peak, each, name, told, row in best, schedules.index(row.schedule), link)

    def svg(links: bool = False) -> str:
        found = "the best are named: schedule, stages×microbatches" if best else "none fits the memory"
        title = f"{len(ran)} pipelines; {found}"
        axes = "peak of the fullest rank (bytes)", f"{measure(unit)} of a microbatch"
        spots = [spot(row, links) for row in ran]
        return ScatterDrawing(title, axes, [], spots, unit, schedules, sweep.memory).to_svg()

    def page() -> tuple[str, str]:
        return svg(True), "".join(_section(plan, anchors[id(plan.places)], ran) for plan in plans)

    return Picture("sweep", svg, lambda: [sweep.table()], notes=sweep.refused, page=page)


def _drawn_plans(rows: Sequence[SweepRow]) -> list[Plan]:
    """Return the plans that a page draws below the picture, the best first; several rows may have the same stages."""
    found: dict[int, Plan] = {}
    for row in rows:
        if row.plan is not None:
            found.setdefault(id(row.plan.places), row.plan)
    return list(found.values())[:_MOST_PLANS]


def _short_name(row: SweepRow) -> str:
    return f"{row.schedule} {row.stages}×{row.microbatches}"


def _section(plan: Plan, anchor: str, rows: Sequence[SweepRow]) -> str:
    """Return the picture of a plan, which the dots of its rows link to."""
    told = ", ".join(_short_name(row) for row in rows if row.plan is not None and row.plan.places is plan.places)
    return f'<section id="{anchor}">{pictured(plan).inside(told)}</section>'
