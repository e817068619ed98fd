"""Time ops in place, in runs of the whole graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch.fx import Node

from splitkit.costs.timing.call_timing import ROUNDS, Record
from splitkit.costs.timing.cpu_time import OwnTime
from splitkit.costs.timing.measuring_run import MeasuringRun, bound_call
from splitkit.costs.timing.run_inputs import Private

MOST_ROUNDS = 9


class TimedRun(MeasuringRun):
    """A further run, which times each op in place.

    Attributes:
        seconds: node -> its time.
        clock: the clock of the run.
    """

    def __init__(self, run: MeasuringRun, private: Private) -> None:
        super().__init__(run.flow, private, run.cache, run.min_run_time, lambda: None)
        self.seconds: dict[Node, float] = {}
        self.clock = OwnTime()

    def _measured(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        call = bound_call(n, self.private.module(str(n.target)) if n.op == "call_module" else n.target, args, kwargs)
        start = self.clock.now()
        result = call()
        self.seconds[n] = self.clock.now() - start
        return result


def time_in_place(run: MeasuringRun, inputs: Any, rng_state: torch.Tensor) -> None:
    """Replace the records of a first run by times in place, with dispatch, new memory and cold arguments.

    The graph runs several more times, always from the same state. Views are timed too.

    Args:
        run: the first run.
        inputs: the inputs that the user gave.
        rng_state: the RNG state before the first run.
    """
    runs = MeasuredRuns()
    for _ in timing_rounds(len(set(run.keys.values())), run.min_run_time, lambda: runs.enough):
        torch.random.set_rng_state(rng_state)
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

    def records(self, keys: Mapping[Node, str]) -> dict[str, Record]:
        """Return key -> record of each group: the mean of its nodes' times in the run where that mean is least.

        The least mean counts because other work only adds time. It is a mean within one run so that the prices of all
        nodes add up to the time of a run. If every run was disturbed, the records are marked busy.

        Args:
            keys: node -> the key of its group.
        """
        groups: dict[str, list[Node]] = {}
        for node, key in keys.items():
            groups.setdefault(key, []).append(node)
        runs = self._quiet or self._busy
        return {
            key: Record(min(fmean(run.get(n, 0.0) for n in nodes) for run in runs), 0, not self.quiet)
            for key, nodes in groups.items()
        }


def timing_rounds(groups: int, min_run_time: float, settled: Callable[[], bool] = lambda: True) -> Iterator[int]:
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
