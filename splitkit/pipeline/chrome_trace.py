"""Writes what the ranks of a pipeline do over time in the Trace Event Format, for Perfetto and ``chrome://tracing``.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from splitkit.pipeline.action import KINDS
from splitkit.pipeline.trace import Event, Transfer

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
