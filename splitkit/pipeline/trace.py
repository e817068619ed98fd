"""Holds the times of the actions and messages of a simulated pipeline step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitkit.pipeline.order import LETTERS, PipelineOrder
from splitkit.pipeline.stage_costs import StageCosts, bytes_back, bytes_on
from splitkit.pipeline.transport import Transport

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
                nbytes = (bytes_on if source.kind == "F" else bytes_back)(self.stages, source.stage)
                times = float(self.departures[maker]), float(self.arrivals[maker])
                found.append(Transfer(source.rank, target.rank, source.action, int(nbytes), *times))
        return tuple(found)
