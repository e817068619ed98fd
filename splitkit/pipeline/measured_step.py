"""Holds what each rank did in a training step that ran, and reads and writes it as a trace file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from splitkit import files
from splitkit.errors import FileError, ViewError
from splitkit.pipeline.action import KINDS, Action
from splitkit.pipeline.chrome_trace import chrome_trace
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.trace import Event
from splitkit.short_repr import brief

_LETTERS = {name: letter for letter, name in KINDS.items()}
_MOST_SECONDS = 1e6
"""Twelve days: a longer step is not a step. A clock may have run for a hundred times as long."""
_REMEDY = (
    "Write one: splitkit train PLAN.json --nproc N --trace FILE, or "
    "splitkit profile PLAN.json --ranks N --schedules 1f1b --trace FILE."
)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """What each rank did in one training step, by the clock of rank 0.

    Attributes:
        schedule: the name of the schedule.
        timeline: the actions, sorted by rank, then by start; the first one of all ranks starts at 0.
        memory: rank -> (seconds, bytes from then on, above what the rank held before the step); empty if not measured.
    """

    schedule: str
    timeline: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()

    __repr__ = brief

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(event.rank for event in self.timeline)

    @property
    def seconds(self) -> float:
        """Seconds of the step, from the start of the first action to the end of the last."""
        return max(event.end for event in self.timeline)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        found = [0.0] * self.ranks
        for event in self.timeline:
            found[event.rank] += event.end - event.start
        return tuple(found)

    @cached_property
    def order(self) -> PipelineOrder:
        """The actions of each rank in the order in which they ran.

        Raises:
            ScheduleError: SK331 if they are not one whole step of a pipeline.
            ViewError: SK901 if stages have replicas.
        """
        home: dict[int, int] = {}
        for event in self.timeline:
            if (other := home.setdefault(event.stage, event.rank)) != event.rank:
                reason = f"stage {event.stage} has replicas on the ranks {other} and {event.rank}"
                remedy = "Record one pipeline, without --dp; https://ui.perfetto.dev shows this trace as it is."
                raise ViewError("SK901", reason, remedy)
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        for event in self.timeline:
            rows[event.rank].append(Action(event.stage, event.kind, event.microbatch))
        return PipelineOrder(self.schedule, tuple(map(tuple, rows)))

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the step in the Trace Event Format."""
        return chrome_trace(self.timeline, self.memory, (), {"schedule": self.schedule, "measured": True})

    def to_trace(self, path: files.PathLike) -> None:
        """Write `to_chrome_trace` as JSON, which opens in Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

        Raises:
            FileError: SK504 if the file cannot be written.
        """
        files.save_text(path, json.dumps(self.to_chrome_trace()))

    @classmethod
    def load(cls, path: files.PathLike) -> MeasuredStep:
        """Read what `to_trace` wrote.

        Raises:
            FileError: SK504 if the file cannot be read, SK510 if it has no step of a pipeline.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError):
                raise FileError("SK504", f"cannot read {str(path)!r}: {error.strerror}", "Name a trace.") from error
            raise FileError("SK510", f"{path} is not JSON: {error}", _REMEDY) from error
        return cls.from_chrome_trace(data)

    @classmethod
    def from_chrome_trace(cls, data: Any) -> MeasuredStep:
        """Read a step from the Trace Event Format; events that are not actions of stages are left out.

        Raises:
            FileError: SK510 if there are no such actions, or a field of one is wrong.
        """
        told = data.get("traceEvents") if isinstance(data, dict) else data
        if not isinstance(told, list):
            raise FileError("SK510", "there is no list of events in the file", _REMEDY)
        found = [
            _event(number, each)
            for number, each in enumerate(told)
            if isinstance(each, dict) and each.get("ph") == "X" and each.get("cat") in _LETTERS
        ]
        if not found:
            raise FileError("SK510", "none of the events in the file is an action of a stage", _REMEDY)
        if (ranks := 1 + max(event.rank for event in found)) > len(found):
            raise FileError("SK510", f"the file has {len(found)} actions on {ranks} ranks", _REMEDY)
        about = data.get("otherData") if isinstance(data, dict) else None
        about = about if isinstance(about, dict) else {}
        schedule = about.get("schedule")
        # a simulated step counts all bytes of a rank, a measured one those above what it held before
        memory = _memory(told, ranks) if about.get("measured") is True else []
        return cls.of(schedule if isinstance(schedule, str) else "custom", found, memory)

    @classmethod
    def of(cls, schedule: str, events: list[Event], memory: list[list[tuple[float, int]]]) -> MeasuredStep:
        """Return a step of events in any order, and memory, on a clock that may start at any time."""
        first = min(event.start for event in events)
        moved = [event._replace(start=event.start - first, end=event.end - first) for event in events]
        moved.sort(key=lambda event: (event.rank, event.start))
        held = tuple(tuple((seconds - first, nbytes) for seconds, nbytes in sorted(points)) for points in memory)
        return cls(schedule, tuple(moved), held)


def _memory(told: list[Any], ranks: int) -> list[list[tuple[float, int]]]:
    memory: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    counters = [e for e in told if isinstance(e, dict) and e.get("ph") == "C" and e.get("name") == "memory"]
    for number, each in enumerate(counters):
        name = f"counter {number}"
        rank = _whole(name, each, "pid")
        if rank >= ranks:
            raise FileError("SK510", f"{name} is of rank {rank}, which has no actions", _REMEDY)
        memory[rank].append((_seconds(name, each, "ts"), _whole(name, each.get("args"), "bytes")))
    return memory if counters else []


def _event(number: int, told: Mapping[str, Any]) -> Event:
    name = f"event {number}"
    of = told.get("args")
    stage, microbatch = _whole(name, of, "stage"), _whole(name, of, "microbatch")
    start = _seconds(name, told, "ts")
    return Event(
        _whole(name, told, "pid"), _LETTERS[told["cat"]], stage, microbatch, start, start + _seconds(name, told, "dur")
    )


def _whole(name: str, told: Any, field: str) -> int:
    value = told.get(field) if isinstance(told, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise FileError("SK510", f"{field} of {name} is {value!r:.80}, not a whole number", _REMEDY)
    return value


def _seconds(name: str, told: Mapping[str, Any], field: str) -> float:
    """Return microseconds as seconds."""
    value = told.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise FileError("SK510", f"{field} of {name} is {value!r:.80}, not a number", _REMEDY)
    if abs(value) > _MOST_SECONDS * 1e6 * 100 or (field == "dur" and not 0 <= value <= _MOST_SECONDS * 1e6):
        raise FileError("SK510", f"{field} of {name} is {value:g} microseconds", _REMEDY)
    return value / 1e6
