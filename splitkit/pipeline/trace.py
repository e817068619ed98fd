"""Holds the times of the actions and messages of a simulated pipeline step."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from splitkit import files
from splitkit.checks import is_number, shown
from splitkit.errors import CostError, FileError, ViewError
from splitkit.pipeline.order import KINDS, LETTERS, Action, PipelineOrder
from splitkit.pipeline.stage_costs import StageCosts, bytes_back
from splitkit.short_repr import brief

Floats = npt.NDArray[np.float64]


class Event(NamedTuple):
    """An action that ran: rank, kind, stage, microbatch, and its start and end in seconds."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def action(self) -> str:
        """The action as torch writes it: ``3F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class Transfer(NamedTuple):
    """A message: its source and target ranks, the action that made it, its bytes, and its start and end in seconds."""

    source: int
    target: int
    action: str
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class StepTrace:
    """The times of all actions of a step.

    Attributes:
        order: the actions of each rank.
        stages: the costs of the stages.
        starts: when each action of ``order.columns`` starts, in seconds.
        ends: when each action ends.
        departures: when its result leaves for another rank; its end if the result stays.
        arrivals: when its result arrives; its end if the result stays.
        static_buffers: whether each microbatch has receive buffers of its own.
        syncs: rank -> seconds in which its replicas sum their gradients after the last action; empty if no stage has
            replicas, or messages take no time.
        transport: the communication model, if known.
        goes_on: when the rank goes on after each action: at its end, or later where it waits for copies to the host;
            ``None`` if no stage copies.
    """

    order: PipelineOrder
    stages: tuple[StageCosts, ...]
    starts: Floats
    ends: Floats
    departures: Floats
    arrivals: Floats
    static_buffers: bool
    syncs: tuple[float, ...] = ()
    transport: Transport | None = None
    goes_on: Floats | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.order.ranks)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step, to the end of the last action and of the all-reduce of gradients."""
        if not any(self.syncs):
            return float(self.ends.max())
        last = np.zeros(self.ranks)
        np.maximum.at(last, self.order.columns.rank, self.ends)
        return float((last + np.array(self.syncs)).max())

    @cached_property
    def timeline(self) -> tuple[Event, ...]:
        """All actions with their times, sorted by rank, then in the order of the rank."""
        rank, stage, kind, microbatch = (column.tolist() for column in self.order.columns)
        kinds = [LETTERS[k] for k in kind]
        return tuple(map(Event, rank, kinds, stage, microbatch, self.starts.tolist(), self.ends.tolist()))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All messages between ranks, sorted by the action that made them."""
        data, found = self.order.links.data, []
        for reader in np.argsort(data, kind="stable").tolist():
            source, target = self.timeline[maker := int(data[reader])], self.timeline[reader]
            if maker >= 0 and source.rank != target.rank:
                on, back = self.stages[source.stage].activation_bytes, bytes_back(self.stages, source.stage)
                nbytes = on if source.kind == "F" else back
                times = float(self.departures[maker]), float(self.arrivals[maker])
                found.append(Transfer(source.rank, target.rank, source.action, int(nbytes), *times))
        return tuple(found)


# Prices messages between the ranks of a pipeline, by the links between their devices.


class LinkTimes(Protocol):
    """An object that prices messages, such as `splitkit.costs.Links`."""

    def seconds(self, source: Hashable, target: Hashable, nbytes: float) -> float:
        """Return the seconds of one message of ``nbytes`` from one device to another."""
        ...


@dataclass(frozen=True)
class Transport:
    """The communication model of a simulated step.

    Attributes:
        links: prices of messages; ``None``: they take no time.
        devices: rank -> the names of its devices in ``links``.
    """

    links: LinkTimes | None
    devices: Sequence[Sequence[Hashable]]

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Return the seconds of one message between two ranks, over the slowest link between their devices.

        Raises:
            CostError: SK322 if the links give no number of seconds.
        """
        if self.links is None:
            return 0.0
        pairs = product(self.devices[source], self.devices[target])
        return max((message_seconds(self.links, here, there, nbytes) for here, there in pairs), default=0.0)


def message_seconds(links: LinkTimes, here: Hashable, there: Hashable, nbytes: float) -> float:
    """Return the seconds of one message; raise SK322 if the links give no number of seconds."""
    found: object = links.seconds(here, there, nbytes)
    if not is_number(found) or float(found) == math.inf:
        reason = f"{nbytes} bytes from {here} to {there} take {shown(found)} seconds"
        raise CostError("SK322", reason, "Give links whose times are finite numbers, 0 or more.")
    return float(found)


# Holds what each rank did in a training step that ran, and reads and writes it as a trace file.


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


# Writes what the ranks of a pipeline do over time in the Trace Event Format, for Perfetto and ``chrome://tracing``.
#
# The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU


_COMPUTE = 0
"""The row of a rank's actions; messages to rank ``n`` are in the row ``n + 1``."""


def chrome_trace(
    timeline: Sequence[Event],
    memory: Sequence[Sequence[tuple[float, int]]],
    transfers: Sequence[Transfer],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return the actions of a step, with an arrow from each sending action to the receiving one.

    A process for each rank, with a row for its work, one for each rank that it sends to, and a counter of its memory.

    Args:
        timeline: the actions; times in seconds, written in microseconds.
        memory: rank -> (seconds, bytes from then on); empty if not known.
        transfers: the messages; empty if their times are not known.
        about: what else the file tells.
    """
    events = list(_names(timeline, transfers))
    for e in timeline:
        args = {"stage": e.stage, "microbatch": e.microbatch}
        events.append(_complete(e.action, KINDS[e.kind], e.rank, _COMPUTE, e.start, e.end, args))
    for t in transfers:
        args = {"bytes": t.nbytes}
        events.append(_complete(t.action, "transfer", t.source, t.target + 1, t.start, t.end, args))
    events += _arrows(timeline)
    for rank, points in enumerate(memory):
        events += [
            {"ph": "C", "name": "memory", "pid": rank, "ts": seconds * 1e6, "args": {"bytes": nbytes}}
            for seconds, nbytes in points
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: Sequence[Event], transfers: Sequence[Transfer]) -> Iterator[dict[str, Any]]:
    for rank in sorted({event.rank for event in timeline}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": _COMPUTE, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": _COMPUTE, "args": {"name": "compute"}}
    for source, target in sorted({(t.source, t.target) for t in transfers}):
        name = {"name": f"to rank {target}"}
        yield {"ph": "M", "name": "thread_name", "pid": source, "tid": target + 1, "args": name}


def _arrows(timeline: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield both ends of an arrow for each value that goes to another rank."""
    readers = {("F" if e.kind == "F" else "B", e.stage, e.microbatch): e for e in timeline if e.kind != "W"}
    number = 0
    for (kind, stage, microbatch), maker in readers.items():
        reader = readers.get((kind, stage + (1 if kind == "F" else -1), microbatch))
        if reader is None or reader.rank == maker.rank:
            continue
        common = {"name": "activation" if kind == "F" else "gradient", "cat": "message", "id": number, "tid": _COMPUTE}
        # an arrow is bound to the action around its time
        yield {"ph": "s", **common, "pid": maker.rank, "ts": (maker.start + maker.end) / 2 * 1e6}
        yield {"ph": "f", "bp": "e", **common, "pid": reader.rank, "ts": (reader.start + reader.end) / 2 * 1e6}
        number += 1


def _complete(
    name: str, category: str, process: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, **times, "args": args}
