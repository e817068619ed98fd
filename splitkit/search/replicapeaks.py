"""What each device of a replicated stage holds, for all stages between the borders of a track."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.pipeline.replication import trained_bytes, undivided
from splitkit.search.demand import Demand
from splitkit.search.holding import Holding
from splitkit.search.placing import Placing
from splitkit.search.tracks import Track
from splitkit.solvers.placement.problem import Floats, Ints

_FIXED, _SAVED, _TEMPORARY, _GRADIENTS = range(4)


@dataclass(frozen=True, eq=False)
class ReplicaPeaks:
    """Peaks by the formula of `splitkit.pipeline.replication.replica_of`: from below, as some of what waits for a
    device is known only when a step is simulated.

    Attributes:
        track: the borders.
        demand: whose stages.
        placing: the units.
        flights: (k,) microbatches that a stage has in flight, by the number of stages from it to the last, 1 first.
        most: replicas of a stage, at most.
    """

    track: Track
    demand: Demand
    placing: Placing
    flights: Ints
    most: int

    def price(self, room: float) -> None:
        """Find out what the stages hold of which a device may have room for its share."""
        holding = Holding.of(self.placing, self.demand.stage_prices.activations, self.demand.optimizer)
        saved = int(self.flights.min()) * self.track.between(holding.saved) / self.most
        wanted = (self.track.between(holding.fixed) + saved <= room) & (self._held[:, _FIXED] < 0)
        members = self.track.members
        for pair in np.flatnonzero(wanted).tolist():
            start, end = int(self.track.first[pair]), int(self.track.last[pair])
            held = self.track.stretch(start, end)
            trained = self._trained[members[end] & ~members[start]].tolist() if held.gradients else []
            fixed = held.parameters + held.gradients * (1 + self.track.state)
            self._held[pair] = fixed, held.saved, held.temporary, undivided(trained, held.gradients)

    def over(self, to_come: int, replicas: int, room: float, waiting: tuple[int, int] = (0, 0)) -> Floats:
        """(p,) bytes of each stage on so many devices beyond the room of each; infinite for one that is not priced.

        Args:
            to_come: stages from it to the last; 0 where that does not matter.
            replicas: how many devices.
            room: bytes of each.
            waiting: messages on and back that wait for a device, as is supposed.
        """
        fixed, saved, temporary, gradients = self._held.T
        besides = np.minimum(temporary, -(-(temporary + (replicas - 1) * gradients) // replicas))
        peaks = fixed + int(self.flights[max(0, to_come - 1)]) * -(-saved // replicas) + besides
        if self.demand.schedule is not None:
            on, back = self.track.crossing[0][self.track.first], self.track.crossing[1][self.track.last]
            peaks = peaks + waiting[0] * -(-on // replicas) + (1 + waiting[1]) * -(-back // replicas)
        return np.where(fixed < 0, np.inf, peaks - room)

    @cached_property
    def _held(self) -> Ints:
        """(p, 4) bytes, -1 where not known."""
        return np.full((len(self.track.first), 4), -1, np.int64)

    @cached_property
    def _trained(self) -> Ints:
        """(n,) bytes of gradients that the backward of each unit makes of parameters."""
        return trained_by_units(self.placing)


def trained_by_units(placing: Placing) -> Ints:
    """(n,) bytes of gradients that the backward of each unit makes of parameters."""
    sums = [sum(trained_bytes(placing.flow, node) for node in members) for members in placing.members]
    return np.array(sums, np.int64)
