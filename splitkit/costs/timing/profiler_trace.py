"""Read the ops of training steps, with the seconds of each in forward and backward, from a trace of torch's profiler.

The trace is what ``torch.profiler.profile(...).export_chrome_trace`` writes. An op of forward is an event
``aten::linear`` that lies in no other op. Each event tells the sequence number that the next node of autograd will get,
so a node belongs to the last event that began with its number. In backward, ``autograd::engine::evaluate_function`` has
the same number::

    forward   aten::linear [270]  >  aten::t [270], aten::addmm [271]      numbers 270 and 271 belong to linear
    backward  AddmmBackward0 [271]  AccumulateGrad  TBackward0 [270]       all three are the backward of linear

On a GPU the time of an op is the sum of the kernels that it launched.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkit.checks import is_number
from splitkit.errors import FileError
from splitkit.files import PathLike

_STEP, _BACKWARD = "ProfilerStep#", "autograd::engine::evaluate_function"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_REMEDY = "Write one with torch.profiler: profile(record_shapes=True), then export_chrome_trace(FILE)."


@dataclass(frozen=True)
class ProfiledOp:
    """An op of forward, as it ran in one step.

    Attributes:
        name: with its namespace, such as ``aten::linear``.
        shape: the sizes of its first argument; ``None`` if the trace has no shapes.
        forward: seconds.
        backward: seconds of the nodes of autograd that it made, and of the gradients that they added up.
    """

    name: str
    shape: tuple[int, ...] | None
    forward: float
    backward: float


@dataclass(frozen=True)
class ProfiledStep:
    """One step.

    Attributes:
        ops: the ops of forward, in the order in which they began.
        trains: whether a backward ran.
        on_gpu: whether the seconds are those of kernels.
    """

    ops: tuple[ProfiledOp, ...]
    trains: bool
    on_gpu: bool


def load_steps(path: PathLike) -> list[ProfiledStep]:
    """Read the steps of a trace: those that ``prof.step()`` marks, or the whole trace as one.

    Raises:
        FileError: SK504 if the file cannot be read, SK510 if it is not a trace of torch's profiler.
    """
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise FileError("SK504", f"cannot read {str(path)!r}: {error.strerror}", "Name a trace.") from error
    except (ValueError, RecursionError) as error:
        raise FileError("SK510", f"{path} is not JSON: {error}", _REMEDY) from error
    told = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(told, list):
        raise FileError("SK510", f"{path} has no list of events", _REMEDY)
    events = [_Event.of(path, number, each) for number, each in enumerate(told) if _counts(each)]
    if not any(event.is_op for event in events):
        raise FileError("SK510", f"{path} has no op of torch", _REMEDY)
    events.sort(key=lambda event: (event.start, -event.end))
    return [step for step in (_step(*each) for each in _divided(events)) if step.ops]


@dataclass(frozen=True)
class _Event:
    """An event of the trace: where it ran, when (seconds), and what else is told."""

    name: str
    kind: str
    thread: tuple[str, str]
    start: float
    end: float
    args: Mapping[str, Any]

    @classmethod
    def of(cls, path: PathLike, number: int, told: Mapping[str, Any]) -> _Event:
        start, length, args = told.get("ts"), told.get("dur"), told.get("args", {})
        if not is_number(start) or not is_number(length) or not isinstance(args, dict):
            raise FileError("SK510", f"event {number} of {path} has ts={start!r:.40}, dur={length!r:.40}", _REMEDY)
        begin = float(start) / 1e6
        thread = str(told.get("pid")), str(told.get("tid"))
        return cls(str(told.get("name")), str(told.get("cat")), thread, begin, begin + float(length) / 1e6, args)

    @property
    def is_op(self) -> bool:
        return self.kind == "cpu_op" and "::" in self.name and not self.name.startswith("autograd::")

    @property
    def is_backward(self) -> bool:
        return self.kind == "cpu_op" and self.name.startswith(_BACKWARD)

    @property
    def number(self) -> int | None:
        """The sequence number of autograd."""
        found = self.args.get("Sequence number")
        return found if isinstance(found, int) else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The sizes of the first argument, none if it is not a tensor; ``None`` if the trace has no sizes."""
        sizes = self.args.get("Input Dims")
        if not isinstance(sizes, list):
            return None
        first = sizes[0] if sizes and isinstance(sizes[0], list) else []
        return tuple(first) if all(isinstance(size, int) for size in first) else ()


_Launched = Mapping[Any, Sequence[_Event]]


def _counts(told: object) -> bool:
    kinds = ("cpu_op", "user_annotation", *_ON_DEVICE)
    return isinstance(told, dict) and told.get("ph") == "X" and told.get("cat") in kinds


def _divided(events: Sequence[_Event]) -> Iterator[tuple[list[_Event], _Launched]]:
    """Yield the events of each step on the CPU, with what they launched, though a GPU runs it later."""
    on_cpu, launched = [event for event in events if event.kind == "cpu_op"], _by_launcher(events)
    marks = [event for event in events if event.kind == "user_annotation" and event.name.startswith(_STEP)]
    if not marks:
        yield on_cpu, launched
    for mark in marks:
        own = [event for event in on_cpu if mark.start <= event.start < mark.end]
        ids = {event.args.get("External id") for event in own}
        yield own, {key: kernels for key, kernels in launched.items() if key in ids}


def _by_launcher(events: Iterable[_Event]) -> _Launched:
    """Return the id of an op -> the kernels that it launched."""
    found: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.kind in _ON_DEVICE:
            found[event.args.get("External id")].append(event)
    return found


def _step(on_cpu: Sequence[_Event], launched: _Launched) -> ProfiledStep:
    back = [event for event in on_cpu if event.is_backward]
    begins = min((event.start for event in back), default=float("inf"))
    ops = [event for event in on_cpu if event.is_op and event.start < begins]
    if not ops:
        return ProfiledStep((), trains=bool(back), on_gpu=bool(launched))
    forward = [event for event in ops if event.thread == ops[0].thread]
    roots, owner = _outermost(forward)
    seconds = _device_seconds(on_cpu, launched) if launched else {}
    backward = [0.0] * len(roots)
    last = None
    for event in back:
        of = None if event.number is None else owner.get(event.number)
        last = last if event.number is None else of  # gradients are added up right after the node that made them
        if last is not None:
            backward[last] += seconds.get(id(event), 0.0) if launched else event.end - event.start
    found = [
        ProfiledOp(e.name, e.shape, seconds.get(id(e), 0.0) if launched else e.end - e.start, behind)
        for e, behind in zip(roots, backward, strict=True)
    ]
    return ProfiledStep(tuple(found), trains=bool(back), on_gpu=bool(launched))


def _outermost(events: Sequence[_Event]) -> tuple[list[_Event], dict[int, int]]:
    """Return the ops that lie in no other, and sequence number -> the outermost op of the last event that has it."""
    roots: list[_Event] = []
    owner: dict[int, int] = {}
    for event in events:
        if not roots or event.start >= roots[-1].end:
            roots.append(event)
        if event.number is not None:
            owner[event.number] = len(roots) - 1
    return roots, owner


def _device_seconds(events: Sequence[_Event], launched: _Launched) -> dict[int, float]:
    """Return ``id`` of an event -> the seconds of the kernels that it and the events inside it launched."""
    found: dict[int, float] = defaultdict(float)
    open_events: dict[tuple[str, str], list[_Event]] = defaultdict(list)
    for event in events:
        around = open_events[event.thread]
        while around and event.start >= around[-1].end:
            around.pop()
        around.append(event)
        own = sum(kernel.end - kernel.start for kernel in launched.get(event.args.get("External id"), ()))
        if own:
            for outer in around:
                found[id(outer)] += own
    return found
