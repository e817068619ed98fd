"""When each action of a pipeline step ran, and what was sent when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitkit.pipeline.order import LETTERS, PipelineOrder
from splitkit.pipeline.stagecosts import StageCosts, bytes_back, bytes_on
from splitkit.pipeline.wires import Wires

Floats = npt.NDArray[np.float64]


class Event(NamedTuple):
    """An action that ran: who, what, and from when to when, in seconds."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def action(self) -> str:
        """As torch writes it: ``3F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class Transfer(NamedTuple):
    """A message: from whom to whom, what made it, how large, and from when to when, in seconds."""

    source: int
    target: int
    action: str
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class StepTrace:
    """The times of all actions.

    Attributes:
        order: what each rank ran.
        stages: what they cost.
        starts: when each action of ``order.columns`` started, in seconds.
        ends: when it ended.
        departures: when its result went off to another rank; its end if it stays.
        arrivals: when it was there.
        static_buffers: whether each microbatch has receive buffers of its own.
        syncs: seconds that the replicas of each rank take after their last action to add up their gradients; empty
            where no stage has replicas, or messages take no time.
        wires: how the ranks talk, if that is known.
    """

    order: PipelineOrder
    stages: tuple[StageCosts, ...]
    starts: Floats
    ends: Floats
    departures: Floats
    arrivals: Floats
    static_buffers: bool
    syncs: tuple[float, ...] = ()
    wires: Wires | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.order.ranks)

    @cached_property
    def seconds(self) -> float:
        """Of the step: the end of the last action, and of the adding up of gradients."""
        if not any(self.syncs):
            return float(self.ends.max())
        last = np.zeros(self.ranks)
        np.maximum.at(last, self.order.columns.rank, self.ends)
        return float((last + np.array(self.syncs)).max())

    @cached_property
    def timeline(self) -> tuple[Event, ...]:
        """What ran when: rank after rank, each in its order."""
        rank, stage, kind, microbatch = (column.tolist() for column in self.order.columns)
        kinds = [LETTERS[k] for k in kind]
        return tuple(map(Event, rank, kinds, stage, microbatch, self.starts.tolist(), self.ends.tolist()))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What was sent when, sender after sender."""
        data, found = self.order.links.data, []
        for reader in np.argsort(data, kind="stable").tolist():
            source, target = self.timeline[maker := int(data[reader])], self.timeline[reader]
            if maker >= 0 and source.rank != target.rank:
                nbytes = (bytes_on if source.kind == "F" else bytes_back)(self.stages, source.stage)
                times = float(self.departures[maker]), float(self.arrivals[maker])
                found.append(Transfer(source.rank, target.rank, source.action, int(nbytes), *times))
        return tuple(found)
