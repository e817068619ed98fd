"""A lower bound on the step of given cuts: a simulation with the least times that their stages can have.

A simulated step is not longer if stages are quicker, so this holds for everything that the stages may save.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from splitkit.costs import Links
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import RankChoice

Floats = NDArray[np.float64]

_RANGES = 60  # shares of what may run in forward or backward that are simulated for a bound
_SMALL = 150  # ops of a stage for which an integer program is solved


class LeastStep:
    """The bounds for one graph, schedule and memory."""

    def __init__(self, choices: RankChoice, order: PipelineOrder, links: Links | None) -> None:
        self.choices, self.order, self.links = choices, order, links
        self.problems = choices.frontiers.problems

    def of(self, ends: Sequence[int], enough: float | None = None) -> float:
        """Return a lower bound on the step of some cuts; infinite if a rank cannot hold its stages.

        Args:
            ends: the cuts.
            enough: look for a sharper bound, up to this.
        """
        spans, exact = list(zip((0, *ends[:-1]), ends, strict=True)), enough is not None
        costs: list[StageCosts] = [StageCosts(0.0, 0.0)] * len(spans)
        for rank, load in enumerate(self.choices.loads):
            fixed = sum(self.choices.fixed(spans[stage]) for stage in load.stages)
            for stage, count in zip(load.stages, load.surely().tolist(), strict=True):
                limit, again = self.choices.limits[rank], 0.0
                if limit is not None:
                    made = self.problems.peaks.gradients[list(spans[stage])]
                    left = limit - fixed - int(made[1] - made[0])
                    frontier = self.choices.frontiers.of(*spans[stage])
                    bound = frontier.least if exact and len(frontier.problem.ops) <= _SMALL else frontier.bound
                    again = bound(left // max(1, count)) if left >= 0 else np.inf
                if not np.isfinite(again):
                    return float("inf")
                costs[stage] = self.problems.least_seconds(*spans[stage], again)
        either = np.array([self.problems.either[b] - self.problems.either[a] for a, b in spans])
        return self._with_shares(costs, either, 0.0 if enough is None else enough)

    def _with_shares(self, costs: Sequence[StageCosts], either: Floats, enough: float) -> float:
        """Return a lower bound on the step if each stage has any share of ``either`` in forward, the rest in backward.

        Halve the range of a share where the bound is lowest: each range counts with the least that is in either half.
        """

        def bound(low: Floats, high: Floats) -> float:
            early, late = (low * either).tolist(), ((1.0 - high) * either * (not self.problems.divided)).tolist()
            shared = [
                replace(c, forward=c.forward + f, backward_input=c.backward_input + b)
                for c, f, b in zip(costs, early, late, strict=True)
            ]
            return simulate_schedule(shared, self.order, links=self.links).seconds

        low, high, number = np.zeros(len(costs)), np.ones(len(costs)), 0
        ranges = [(bound(low, high), number, low, high)]
        while ranges[0][0] < enough and number < _RANGES and either.any():
            _, _, low, high = heapq.heappop(ranges)
            stage = int(np.argmax((high - low) * either))
            middle, change = (low[stage] + high[stage]) / 2, np.arange(len(low)) == stage
            for pair in ((low, np.where(change, middle, high)), (np.where(change, middle, low), high)):
                number += 1
                heapq.heappush(ranges, (bound(*pair), number, *pair))
        return ranges[0][0]
