"""Ops timed where they stand among the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch.fx import Node

from splitkit.costs.copies import Private
from splitkit.costs.measuring import MeasuringRun, call_of
from splitkit.costs.owntime import OwnTime
from splitkit.costs.timing import ROUNDS, Record

MOST_ROUNDS = 9


class TimedRun(MeasuringRun):
    """One run more, which times the ops of a first run where they stand.

    Attributes:
        seconds: what each op takes by itself.
        clock: of the run.
    """

    def __init__(self, run: MeasuringRun, private: Private) -> None:
        super().__init__(run.flow, private, run.cache, run.min_run_time, lambda: None)
        self.seconds: dict[Node, float] = {}
        self.clock = OwnTime()

    def _measured(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        call = call_of(n, self.private.module(str(n.target)) if n.op == "call_module" else n.target, args, kwargs)
        start = self.clock.now()
        result = call()
        self.seconds[n] = self.clock.now() - start
        return result


def time_in_place(run: MeasuringRun, inputs: Any, dice: torch.Tensor) -> None:
    """What ops take among the others: dispatch, memory that is given anew, arguments that the caches have lost.

    The graph runs some times more, always from the same state. Views are priced too.

    Args:
        run: the first run.
        inputs: as they were given.
        dice: the state of the random generator before it.
    """
    runs = MeasuredRuns()
    for _ in rounds(len(set(run.keys.values())), run.min_run_time, lambda: runs.enough):
        torch.random.set_rng_state(dice)
        again = TimedRun(run, Private(run.flow, run.private.device))
        with again.safely():
            values = again.private.inputs(inputs)
            again.clock = OwnTime()
            again.run(*values, enable_io_processing=False)
        runs.add(again.seconds, busy=again.clock.is_busy())
    found = runs.records(run.keys)
    for node, key in run.keys.items():
        run.keep(node, key, replace(found[key], workspace=run.found[node].workspace))
    run.cache.save()


class MeasuredRuns:
    """MeasuredRuns of one graph, of which those count that nothing else disturbed."""

    def __init__(self) -> None:
        self._quiet: list[Mapping[Node, float]] = []
        self._busy: list[Mapping[Node, float]] = []

    @property
    def quiet(self) -> bool:
        """Whether there was a run on a machine that had nothing else to do."""
        return bool(self._quiet)

    @property
    def enough(self) -> bool:
        """Whether there was one, or so many others that none is to be expected."""
        return self.quiet or len(self._busy) >= 2 * ROUNDS

    def add(self, seconds: Mapping[Node, float], *, busy: bool) -> None:
        """Count a run, with what each node took in it; 0 for one that is not there."""
        (self._busy if busy else self._quiet).append(seconds)

    def records(self, keys: Mapping[Node, str]) -> dict[str, Record]:
        """What each group takes: the mean of its nodes in the run where that is least.

        The least, for whatever else the machine does only ever adds; the mean within a run, so that the prices of all
        nodes add up to what a run takes. Where every run was disturbed, the records say so.

        Args:
            keys: the group of each node.
        """
        groups: dict[str, list[Node]] = {}
        for node, key in keys.items():
            groups.setdefault(key, []).append(node)
        runs = self._quiet or self._busy
        return {
            key: Record(min(fmean(run.get(n, 0.0) for n in nodes) for run in runs), 0, not self.quiet)
            for key, nodes in groups.items()
        }


def rounds(groups: int, min_run_time: float, settled: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Numbers of runs: a few, and some more as long as time is left for so many groups, or until they have settled.

    They have settled where none gets faster any more, or where one was not disturbed.
    """
    end = time.perf_counter() + min_run_time * groups
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and time.perf_counter() >= end and settled():
            return
        yield number
