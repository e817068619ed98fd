"""The memory of each device of a replicated stage, for all stages between a set of borders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.pipeline.replication_costs import trained_bytes, undivided
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest
from splitkit.search.stages.candidate_borders import BorderSet
from splitkit.solvers.placement.problem import Floats, Ints

_FIXED, _SAVED, _TEMPORARY, _GRADIENTS = range(4)


@dataclass(frozen=True, eq=False)
class ReplicaPeaks:
    """Peaks by the formula of `splitkit.pipeline.replication_costs.replica_of`.

    They are lower bounds, since some of what waits for a device is known only when a step is simulated.

    Attributes:
        track: the borders.
        demand: the request.
        placing: the units.
        flights: (k,) microbatches that a stage has in flight, by the number of stages from it to the last, 1 first.
        most: the largest number of replicas of a stage.
    """

    track: BorderSet
    demand: StageRequest
    placing: PlacementModel
    flights: Ints
    most: int

    def price(self, room: float) -> None:
        """Compute the memory of the stages whose share may fit a device."""
        holding = AdditiveMemory.of(self.placing, self.demand.stage_prices.activations, self.demand.optimizer)
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
        """Return (p,) bytes by which each stage on so many devices exceeds their room; infinite if it is not priced.

        Args:
            to_come: stages from it to the last; 0 where that does not matter.
            replicas: the number of devices.
            room: bytes of each device.
            waiting: how many messages are assumed to wait for a device, downstream and upstream.
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
        """(n,) bytes of parameter gradients that the backward of each unit makes."""
        return trained_by_units(self.placing)


def trained_by_units(placing: PlacementModel) -> Ints:
    """Return (n,) bytes of parameter gradients that the backward of each unit makes."""
    sums = [sum(trained_bytes(placing.flow, node) for node in members) for members in placing.members]
    return np.array(sums, np.int64)
