"""Take the times of ops from several runs of a graph, of which some may be disturbed by other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from statistics import fmean

from torch.fx import Node

ROUNDS = 3
"""The least number of runs that are timed."""
MOST_ROUNDS = 9


class MeasuredRuns:
    """The times of several runs of one graph; runs on a busy machine count only if there are no others."""

    def __init__(self) -> None:
        self._quiet: list[Mapping[Node, float]] = []
        self._busy: list[Mapping[Node, float]] = []

    @property
    def quiet(self) -> bool:
        """Whether there was a run without other work on the machine."""
        return bool(self._quiet)

    @property
    def enough(self) -> bool:
        """Whether there was a quiet run, or so many busy runs that none is to be expected."""
        return self.quiet or len(self._busy) >= 2 * ROUNDS

    def add(self, seconds: Mapping[Node, float], *, busy: bool) -> None:
        """Add a run: node -> its seconds; a missing node took 0."""
        (self._busy if busy else self._quiet).append(seconds)

    def seconds(self, groups: Mapping[Node, Hashable]) -> dict[Node, float]:
        """Return node -> the mean time of its group's nodes, in the run where that mean is least.

        The least mean counts because other work only adds time. It is a mean within one run so that the prices of all
        nodes add up to the time of a run.

        Args:
            groups: node -> its group.
        """
        members: dict[Hashable, list[Node]] = {}
        for node, group in groups.items():
            members.setdefault(group, []).append(node)
        runs = self._quiet or self._busy
        least = {group: min(fmean(run.get(n, 0.0) for n in nodes) for run in runs) for group, nodes in members.items()}
        return {node: least[group] for node, group in groups.items()}


def timing_rounds(groups: int, min_run_time: float, settled: Callable[[], bool]) -> Iterator[int]:
    """Yield the numbers of runs: at least `ROUNDS`, then more while time is left or the runs have not settled.

    Args:
        groups: number of groups to time.
        min_run_time: seconds per group.
        settled: whether runs get no faster, or one of them was not disturbed.
    """
    end = time.perf_counter() + min_run_time * groups
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and time.perf_counter() >= end and settled():
            return
        yield number
