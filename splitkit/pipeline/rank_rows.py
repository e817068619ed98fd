"""Tabulates the work and memory of each rank of a simulated step, or of each device of a plan without a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitkit.pipeline.stage_costs import StageCosts
from splitkit.units import duration, size

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
