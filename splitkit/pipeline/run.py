"""Holds the result of a simulated pipeline step: its time, bubbles, timeline, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from splitkit.display import ShownOverTime
from splitkit.pipeline.memory import ByteBreakdown, RankMemory, memory_over_time, rank_memory
from splitkit.pipeline.order import BACKWARD_INPUT, FORWARD, most_on_host
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import StepTrace, chrome_trace
from splitkit.short_repr import brief
from splitkit.units import duration, size

_TITLES = ["rank", "stages", "busy", "bubble", "in flight", "peak", "fixed", "saved", "messages", "temporaries"]


@dataclass(frozen=True, eq=False)
class ScheduleRun(ShownOverTime, StepTrace):
    """One simulated step of a pipeline: the figures that follow from the times of its actions (`StepTrace`).

    In a notebook it is drawn as the work and memory of each rank over time; ``split.view(run=run)`` adds the stages.
    """

    __repr__ = brief

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(np.bincount(self.order.columns.rank, self.ends - self.starts, self.ranks).tolist())

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Rank -> the fraction of the step in which it computes nothing, from 0 to 1."""
        return tuple(1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy)

    @property
    def unit(self) -> str:
        """The measure of all times: ``"s"``, or that of nominal prices."""
        return self.stages[0].unit if self.stages else "s"

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which nothing is computed, from 0 to 1."""
        return sum(self.bubbles) / self.ranks

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches, counted once a stage, that each rank holds between forward and backward's end."""
        return self._most(self.order.columns.rank, self.ranks)

    @cached_property
    def in_flight_of_stages(self) -> tuple[int, ...]:
        """The most microbatches that each stage holds. Stages of one rank need not reach it at the same time."""
        return self._most(self.order.columns.stage, len(self.stages))

    def _most(self, group: npt.NDArray[np.int64], count: int) -> tuple[int, ...]:
        kind = self.order.columns.kind
        change = np.where(kind == FORWARD, 1, np.where(kind == BACKWARD_INPUT, 0, -1))
        ends = np.bincount(group, minlength=count).cumsum()[:-1]
        groups = np.split(change[np.argsort(group, kind="stable")], ends)
        return tuple(int(changes.cumsum().max(initial=0)) for changes in groups)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """The memory of each rank at its peak, by kind."""
        return rank_memory(self)

    @cached_property
    def host_peaks(self) -> tuple[int, ...]:
        """The most bytes that each rank has on the host at once."""
        moved = {s: costs.copies.nbytes for s, costs in enumerate(self.stages) if costs.copies is not None}
        return tuple(most_on_host(row, moved) for row in self.order.ranks)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return tuple(memory.peak for memory in self.memory)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Rank -> the number of its devices. All other figures of a rank are those of each device."""
        of = dict(zip(self.order.rank_of, self.stages, strict=True))
        return tuple(of[rank].replicas if rank in of else 1 for rank in range(self.ranks))

    @property
    def limiting_rank(self) -> int:
        """The rank with the highest peak, the first of equal ones."""
        return self.peaks.index(max(self.peaks))

    @property
    def busiest_rank(self) -> int:
        """The rank that computes most, the first of equal ones."""
        return self.busy.index(max(self.busy))

    def rows(self, devices: Sequence[str] = (), limits: Sequence[int | None] = ()) -> tuple[RankRow, ...]:
        """Return a row for each rank, for `splitkit.view.data.report.rank_table`.

        Args:
            devices: the name of each rank's device, if known.
            limits: the memory limit of each rank in bytes, if known.
        """
        return tuple(
            RankRow(
                device=devices[rank] if devices else "",
                stages=tuple(stage for stage, where in enumerate(self.order.rank_of) if where == rank),
                busy=self.busy[rank],
                bubble=self.bubbles[rank],
                in_flight=self.in_flight[rank],
                nbytes=(m.parameters + m.gradients + m.optimizer, m.saved, m.messages, m.temporaries),
                replicas=self.replicas[rank],
                limit=limits[rank] if limits else None,
                unit=self.unit,
            )
            for rank, m in enumerate(self.memory)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data without its timeline, which `to_chrome_trace` returns."""
        of = self.order.rank_of
        ranks = [
            {
                "rank": rank,
                "stages": [stage for stage in range(len(of)) if of[stage] == rank],
                "busy": self.busy[rank],
                "bubble": self.bubbles[rank],
                "in_flight": self.in_flight[rank],
                "memory": self.memory[rank].to_dict(),
                "replicas": self.replicas[rank],
            }
            for rank in range(self.ranks)
        ]
        return {
            "schedule": self.order.name,
            "microbatches": self.order.microbatches,
            "seconds": self.seconds,
            "unit": self.unit,
            "bubble": self.bubble,
            "peak": max(self.peaks),
            "limiting_rank": self.limiting_rank,
            "busiest_rank": self.busiest_rank,
            "in_flight_of_stages": list(self.in_flight_of_stages),
            "ranks": ranks,
        }

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, for ``json.dump``; opens in Perfetto and ``chrome://tracing``.

        A process for each rank, with a row for its work, one for each rank that it sends to, and a counter of its
        memory; an arrow goes from each sending action to the receiving one. Times are in microseconds.

        Raises:
            ViewError: SK903 if the step was simulated by prices that are not times.
        """
        from splitkit.prices import require_times  # needs torch, which simulating an order of one's own does not

        require_times(self)
        about = {"schedule": self.order.name, "measured": False}
        return chrome_trace(self.timeline, memory_over_time(self), self.transfers, about)

    @property
    def figures(self) -> str:
        """The time, bubble and peak of the step in words."""
        step = f"step {duration(self.seconds, self.unit)}, bubble {self.bubble:.1%}"
        return f"{step}, peak {size(max(self.peaks))} on rank {self.limiting_rank}"

    @property
    def told(self) -> str:
        """The time of the step as a sentence without its full stop."""
        took = duration(self.seconds, self.unit)
        return f"A step of {self.order.microbatches} microbatches under {self.order.name} takes {took}"

    def fullest(self, limits: Sequence[int | None] = ()) -> str:
        """Return which rank is nearest to its limit, or needs the most memory, as a sentence without its full stop."""
        of = [limit or max(self.peaks) for limit in limits or [None] * self.ranks]
        rank = max(range(self.ranks), key=lambda r: self.peaks[r] / of[r])
        held = ByteBreakdown.of_rank(self.memory[rank])
        if not limits or limits[rank] is None:
            return f"Rank {rank} needs the most memory: {held.told}"
        return f"Rank {rank} is the nearest to its limit of {size(of[rank])}: {held.told}"

    def __str__(self) -> str:
        where = f"{len(self.stages)} stages on {self.ranks} ranks"
        head = f"{self.order.name} of {where}, {self.order.microbatches} microbatches: {self.figures}"
        titles = [*_TITLES[:2], "replicas", *_TITLES[2:]] if max(self.replicas) > 1 else _TITLES
        rows = [
            titles,
            *([cells[t] for t in titles] for cells in (row.cells(i) for i, row in enumerate(self.rows()))),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([head, *lines])


# Tabulates the work and memory of each rank of a simulated step, or of each device of a plan without a schedule.


_KINDS = ("fixed", "saved", "messages", "temporaries")


@dataclass(frozen=True)
class RankRow:
    """The work and memory of one device.

    Attributes:
        device: its name; empty if only a number of stages is given.
        stages: the parts that it runs.
        busy: seconds of work in a step with a schedule, or per sample without one.
        bubble: the fraction of the step in which it computes nothing; ``None`` without a schedule.
        in_flight: the most microbatches in flight; ``None`` without a schedule.
        nbytes: bytes at its peak: (parameters with gradients and optimizer, saved for backward, messages, temporaries).
        limit: its memory limit in bytes.
        unit: the measure of ``busy``: ``"s"``, or that of nominal prices.
        replicas: the number of devices of which each does and holds this.
        load: seconds of work and transfers per sample; ``None`` with a schedule, or if it is not known.
    """

    device: str
    stages: tuple[object, ...]
    busy: float
    bubble: float | None
    in_flight: int | None
    nbytes: tuple[int, int, int, int]
    limit: int | None = None
    unit: str = "s"
    replicas: int = 1
    load: float | None = None

    @property
    def used(self) -> float:
        """The fraction of its memory that it uses; 0 without a limit."""
        return sum(self.nbytes) / self.limit if self.limit else 0.0

    def to_dict(self, number: int) -> dict[str, Any]:
        """Return the row as plain data."""
        memory = {"peak": sum(self.nbytes), **dict(zip(_KINDS, self.nbytes, strict=True)), "limit": self.limit}
        return {
            "rank": number,
            "device": self.device or None,
            "stages": list(self.stages),
            "busy": self.busy,
            **({} if self.load is None else {"load": self.load}),
            "unit": self.unit,
            "bubble": self.bubble,
            "in_flight": self.in_flight,
            "memory": memory,
            "replicas": self.replicas,
        }

    def cells(self, number: int) -> dict[str, str]:
        """Return column -> text for tables; empty where a value is missing. ``temporary`` includes messages."""
        return {
            "rank": str(number),
            "device": self.device,
            "stages": ",".join(map(str, self.stages)) or "none",
            "replicas": f"x{self.replicas}" if self.replicas > 1 else "",
            "busy": duration(self.busy, self.unit) if self.busy else "0",
            "load": "" if self.load is None else duration(self.load, self.unit) if self.load else "0",
            "bubble": "" if self.bubble is None else f"{self.bubble:.1%}",
            "in flight": "" if self.in_flight is None else str(self.in_flight),
            **dict(zip(_KINDS, map(size, self.nbytes), strict=True)),
            "temporary": size(sum(self.nbytes[2:])),
            "peak": size(sum(self.nbytes)),
            "memory": "no limit" if self.limit is None else size(self.limit),
        }


def number_of(part: Any) -> int:
    """Return the number of the device of a part ``2`` or ``(2, 0)``."""
    number: int = part[0] if isinstance(part, tuple) else part
    return number


def rows_of_parts(
    devices: Sequence[str],
    limits: Sequence[int | None],
    parts: Mapping[Any, StageCosts],
    loads: Sequence[float | None] | None = None,
) -> Iterator[RankRow]:
    """Yield a row for each device of a plan without a schedule, which runs one sample after the other.

    Args:
        devices: the name of each device.
        limits: the memory limit of each device.
        parts: part -> its costs on its device. Part ``0`` or ``(0, 1)`` is on device 0; a device may have several parts
            or none.
        loads: seconds of work and transfers of each device, if links are priced.
    """
    for number, (device, limit) in enumerate(zip(devices, limits, strict=True)):
        own = {key: part for key, part in parts.items() if number_of(key) == number}
        costs = own.values()
        fixed = sum(part.fixed_bytes for part in costs)
        temporary = max((part.temporary_bytes for part in costs), default=0)
        yield RankRow(
            device=device,
            stages=tuple(" ".join(map(str, key)) if isinstance(key, tuple) else key for key in own),
            busy=sum(part.forward + part.backward for part in costs),
            bubble=None,
            in_flight=None,
            nbytes=(fixed, sum(part.saved_bytes for part in costs), 0, temporary),
            limit=limit,
            unit=next((part.unit for part in costs), "s"),
            replicas=max((part.replicas for part in costs), default=1),
            load=None if loads is None else loads[number],
        )
